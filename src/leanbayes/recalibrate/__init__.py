"""Recalibration: mend the probabilities of any prediction after training, with a few hundred rows set aside.

`Temperature` gives back a prediction that is as sure as it is right; `Stacking` weighs the draws by how well they
predict together; `Conformal` gives sets of classes, or intervals, that hold the target as often as they promise,
whatever the model. All are fitted on rows that trained nothing: `fit(prediction, y)`, then called on new predictions.
"""

from leanbayes.recalibrate.conformal import Conformal
from leanbayes.recalibrate.stacking import Stacking
from leanbayes.recalibrate.temperature import Temperature

__all__ = ["Conformal", "Stacking", "Temperature"]
