"""Scalable Bayesian neural networks by layer-wise input augmentation (Trinh, Kaski, Heinonen, 2020)."""

PAPER = "Scalable Bayesian neural networks by layer-wise input augmentation (Trinh, Kaski, Heinonen, 2020)"
