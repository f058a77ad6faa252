"""Ensemble Model Patching: A Parameter-Efficient Variational Bayesian Neural Network (Chang et al., 2019)."""

PAPER = "Ensemble Model Patching: A Parameter-Efficient Variational Bayesian Neural Network (Chang et al., 2019)"
