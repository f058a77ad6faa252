"""Recalibrate the predictions of a trained model with a few hundred held-out rows.

`Temperature` rescales confidence, `Stacking` weighs the draws, `Conformal` gives sets or intervals with guaranteed
coverage. Each has `fit(prediction, y)` for rows that were not used in training, and is then called on new predictions.
"""

from leanbayes.recalibrate.calibrators import Conformal, Stacking, Temperature

__all__ = ["Conformal", "Stacking", "Temperature"]
