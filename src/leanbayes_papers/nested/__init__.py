"""Variational Nested Dropout (Cui, Mao, Liu, Li, Chan, Liu, Kuo, Xue, 2021)."""

PAPER = "Cui, Mao, Liu, Li, Chan, Liu, Kuo, Xue, 2021: Variational Nested Dropout"
