"""Split-conformal prediction: sets of classes, or intervals, with guaranteed coverage."""

from __future__ import annotations

import math
from typing import Self

from torch import Tensor

from leanbayes.core.prediction import over_classes, Prediction
from leanbayes.distributions.likelihoods import Gaussian
from leanbayes.metrics._validate import finite, flatten, matched, pick
from leanbayes.recalibrate._shared import check_kind, check_prediction, class_targets, UNFITTED

# B rows, C classes, D targets


class Conformal:
    """Split-conformal prediction: sets that hold the target with probability `level`, for any model.

    q is the ceil((n + 1) level)-th smallest of the scores s of n held-out rows. A new row from the same distribution
    has s <= q with a probability between level and level + 1 / (n + 1) (if no scores are tied).

    *Classes.* The score is -p(y), which ranks like 1 - p(y) and is not rounded near one: a set holds every class with
    p >= -q. Sets are the smallest on average. A set may be empty if the model is correct more often than `level`.
    Dense predictions count pixels. Bernoulli predictions have two classes, no and yes.

    *Real targets.* The score is |y - mean| / std, each target with its own q: the interval is mean -+ q std.

    Args:
        level: the share of targets to hold.

    Attributes:
        threshold: q, one for all classes or one for each target (D,); None before `fit`.
    """

    def __init__(self, level: float = 0.9) -> None:
        if not 0 < level < 1:
            raise ValueError(f"expected a level between 0 and 1, got {level!r}")
        self.level = level
        self.threshold: Tensor | None = None
        self._likelihood: type | None = None

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the threshold from held-out predictions and targets; return itself."""
        check_prediction(prediction)
        if isinstance(prediction.likelihood, Gaussian):
            mean, std = finite(prediction.mean, "predictions"), finite(prediction.std, "standard deviations")
            scores = (matched(y, mean) - mean).abs() / std
        else:
            rows, classes = flatten(over_classes(prediction.mean, prediction), class_targets(prediction, y))
            scores = -pick(rows.double(), classes)
        count = len(scores)
        rank = math.ceil((count + 1) * self.level - 1e-9)  # 0.07 * 100 is a little more than 7
        if rank > count:
            raise ValueError(
                f"expected at least {math.ceil(self.level / (1 - self.level) - 1e-9)} rows for level {self.level}, got "
                f"{count}: no finite set is sure enough; set more rows aside, or lower the level"
            )
        self.threshold = scores.sort(0).values[rank - 1]
        self._likelihood = type(prediction.likelihood)
        return self

    def __call__(self, prediction: Prediction) -> Tensor | tuple[Tensor, Tensor]:
        """Return the membership of classes in each set (B, C, ...), or the ends of the intervals (B, D)."""
        if self._likelihood is None or self.threshold is None:
            raise RuntimeError(UNFITTED.format("Conformal"))
        check_kind(self._likelihood, prediction)
        threshold = self.threshold.to(prediction.mean.device)
        if isinstance(prediction.likelihood, Gaussian):
            half = (threshold * prediction.std).to(prediction.mean.dtype)
            return prediction.mean - half, prediction.mean + half
        return -over_classes(prediction.mean, prediction).double() <= threshold
