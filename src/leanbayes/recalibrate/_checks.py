"""What every recalibration refuses, in the same words."""

from __future__ import annotations

from leanbayes.prediction import Prediction

UNFITTED = "{} is not fitted yet: call fit(prediction, y) with rows that trained nothing"


def check_prediction(prediction: object) -> None:
    """Raise unless it is a prediction, and not the probabilities out of one."""
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"expected a Prediction, as lb.predict returns it, got {type(prediction).__name__}; pass all of it, not "
            "its mean"
        )


def check_kind(likelihood: type, prediction: Prediction) -> None:
    """Raise unless the prediction is of the kind that was fitted."""
    check_prediction(prediction)
    if type(prediction.likelihood) is not likelihood:
        raise TypeError(
            f"expected a prediction with {likelihood.__name__}, as fitted, got {type(prediction.likelihood).__name__}; "
            f"fit another one"
        )
