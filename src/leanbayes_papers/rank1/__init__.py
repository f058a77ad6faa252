"""Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors (Dusenberry et al., 2020)."""

PAPER = "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors (Dusenberry et al., 2020)"
