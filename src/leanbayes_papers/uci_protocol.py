"""How ensemble model patching trains and judges its regressions (appendix D.7), and the data they are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes import data
from leanbayes_papers.batched_regression import BatchedRegression, Mask, Nothing, PatchedNorm, Place
from leanbayes_papers.uci_scores import Unit

METHODS = ("ECMP", "EMP", "Dropout", "Ensemble")
"""In the order of the paper's columns."""

EXPLICIT = frozenset({"Ensemble"})
"""Methods whose draws are whole networks, and whose networks have neither norms nor masks."""


class Sizes(NamedTuple):
    """Hidden units and number of standard splits of a data set."""

    hidden: int = 50
    splits: int = 20


SETS = {
    "uci-boston": Sizes(),
    "uci-concrete": Sizes(),
    "uci-energy": Sizes(),
    "uci-kin8nm": Sizes(),
    "uci-naval": Sizes(),
    "uci-power": Sizes(),
    "uci-protein": Sizes(hidden=100, splits=5),
    "uci-wine-red": Sizes(),
    "uci-yacht": Sizes(),
}
"""In the order of the paper's rows; its tenth, Year Prediction MSD, is not among our data sets."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The paper's numbers; `lr` and `spread`, which it does not print, are Adam's default and ours.

    Attributes:
        epochs: passes over the training rows.
        batch: rows of a step.
        draws: of a prediction; an explicit ensemble has its members instead.
        splits: how many of the standard splits; 0 is all.
        copies: of every scale and shift, and members of an explicit ensemble.
        scale: of the norms at the start.
        spread: of the copies around it, relative.
        dropout: rate of the dropout networks.
        lr: of Adam.
        weight_decay: L2 of Adam, on all parameters.
        precision: tau, one over the variance of the noise, in the units of the target.
    """

    epochs: int = 4000
    batch: int = 100
    draws: int = 10_000
    splits: int = 0
    copies: int = 5
    scale: float = 0.2
    spread: float = 0.1
    dropout: float = 0.005
    lr: float = 1e-3
    weight_decay: float = 0.01
    precision: float = 0.1

    def members(self, method: str) -> int:
        """Return the number of networks that are trained for a split."""
        return self.copies if method in EXPLICIT else 1

    def steps(self, rows: int) -> int:
        """Return the steps of a training; batches that overlap the end of an epoch are cut from the next one."""
        return max(1, round(self.epochs * rows / min(self.batch, rows)))

    def network(self, method: str, *, nets: int, inputs: int, hidden: int) -> BatchedRegression:
        """Return the networks of a method at their start, from torch's global generator."""
        place = self._places(nets)[method]
        return BatchedRegression(place(inputs), place(hidden), nets=nets, inputs=inputs, hidden=hidden)

    def optimizer(self, net: BatchedRegression) -> torch.optim.Adam:
        """Return Adam, fused where that makes a step shorter and can be captured."""
        fused = net.hidden_weight.device.type in ("cpu", "cuda")
        return torch.optim.Adam(net.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=fused)

    def _places(self, nets: int) -> dict[str, Callable[[int], Place]]:
        """Return, by method, what makes the place in front of a linear layer of so many features."""

        def norm(features: int, *, crossed: bool) -> Place:
            shape = (self.copies, nets, features)
            return PatchedNorm(shape, crossed=crossed, scale=self.scale, spread=self.spread)

        return {
            "ECMP": lambda features: norm(features, crossed=True),
            "EMP": lambda features: norm(features, crossed=False),
            "Dropout": lambda features: Mask(nets, features, rate=self.dropout),
            "Ensemble": lambda features: Nothing(),
        }


class Splits(NamedTuple):
    """The splits of a data set, stacked.

    Attributes:
        x: training inputs (T, N, d), standardised.
        y: training targets (T, N), standardised.
        x_test: test inputs (T, d, n), standardised.
        y_test: test targets (T, n), in their own units.
        unit: of the targets.
        sha256: digest of the file.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    unit: Unit
    sha256: str


def load_splits(name: str, count: int, root: str | None, device: torch.device) -> Splits:
    """Read the standard splits of a UCI set, each standardised by its own training rows."""
    sets = [data.load(name, root, split=split) for split in range(count)]
    prepared = [each.prepared(each.train) for each in sets]
    stacked = (
        torch.stack([x for x, _ in prepared]),
        torch.stack([y[:, 0] for _, y in prepared]),
        torch.stack([each.inputs(each.test.x).T for each in sets]),
        torch.stack([each.test.y[:, 0] for each in sets]),
        torch.cat([each.target_mean for each in sets]),
        torch.cat([each.target_std for each in sets]),
    )
    x, y, x_test, y_test, mean, std = (tensor.to(device) for tensor in stacked)
    return Splits(x, y, x_test, y_test, Unit(mean, std), sets[0].sha256)
