"""Pure functions on predictions and targets."""

from leanbayes.metrics.calibration import ece as ece

__all__ = ["ece"]
