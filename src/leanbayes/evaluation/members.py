"""The members of an ensemble of plain networks, each as a network of its own.

A draw of such an ensemble is a member. So the figures of the members need no further passes. They are figures of plain
networks: the members are trained as the plain row is, from other seeds (docs/results/rule.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from leanbayes.core.prediction import over_classes, Prediction
from leanbayes.distributions.likelihoods import entropy
from leanbayes.recalibrate import Temperature


@dataclass(frozen=True)
class Member:
    """One member of an ensemble at its own temperature.

    Attributes:
        number: k of the member, the number of its draw.
        calibrator: its temperature, from held-out rows.
    """

    number: int
    calibrator: Temperature

    def __call__(self, prediction: Prediction) -> Prediction:
        """Return the prediction of the member alone, from that of the ensemble."""
        return self.calibrator(alone(prediction, self.number))


def alone(prediction: Prediction, draw: int) -> Prediction:
    """Return the prediction of one draw; all its uncertainty is aleatoric."""
    if prediction.samples is None:
        raise ValueError("the prediction of one draw needs the draws; call predict with keep_samples=True")
    mean, variances = prediction.samples[draw], prediction.variances
    own = entropy(over_classes(mean, prediction)) if variances is None else variances[draw]
    return replace(
        prediction,
        mean=mean,
        total=own,
        aleatoric=own,
        epistemic=torch.zeros_like(own),
        samples=mean[None],
        variances=None if variances is None else own[None],
        weights=None,
        draws=None,
    )
