"""A ruler for methods: what ensembles of 1, 2, ... plain networks reach, as means over all subsets of trained networks.

The figure that counts is the calibrated NLL. A method is worth K networks if it reaches what K of them reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from leanbayes import metrics
from leanbayes.metrics._validate import log_probabilities, pick
from leanbayes.metrics.temperature import cross_fitted

FIGURES = ("accuracy", "nll", "cnll", "ece")
BOOTSTRAPS = 400
"""How often the test rows are drawn again for the part of an error that comes from them."""

FLOOR_DRAWS = 200
"""How often the classes of the test rows are drawn from a network's own probabilities."""


@dataclass(frozen=True, eq=False)
class Scored:
    """The figures of one prediction.

    Attributes:
        figures: accuracy, NLL, calibrated NLL and ECE.
        rows: what each row adds to the first three, which are means over rows.
    """

    figures: dict[str, float]
    rows: dict[str, Tensor]


def score(probabilities: Tensor, y: Tensor) -> Scored:
    """Score the class probabilities (N, C) of N rows; the calibrated NLL is that of `metrics.calibrated_nll`."""
    y = y.long()
    calibrated = torch.empty(len(y), dtype=torch.float64)
    for rows, losses in cross_fitted(probabilities, y):
        calibrated[rows] = losses
    each = {
        "accuracy": (probabilities.argmax(1) == y).double(),
        "nll": -pick(log_probabilities(probabilities), y),
        "cnll": calibrated,
    }
    figures = {name: float(values.mean()) for name, values in each.items()}
    return Scored(figures | {"ece": float(metrics.ece(probabilities, y))}, each)


def ece_floor(probabilities: Tensor, *, draws: int = FLOOR_DRAWS) -> dict[str, float]:
    """Return the ECE that a calibrated network with these probabilities has on so many rows, because rows are few.

    Classes are drawn from the probabilities, so the network is calibrated and its ECE is noise. A measured ECE within
    the central 95 % of these is not distinguishable from that of a calibrated network.

    Returns:
        `mean`, `low` (2.5 %) and `high` (97.5 %) over the draws.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probabilities.double(), draws, replacement=True, generator=generator)
    values = torch.stack([torch.as_tensor(metrics.ece(probabilities, y)) for y in drawn.unbind(1)]).double()
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high}


class Ruler:
    """Ensembles of all subsets of trained networks, and what a method is worth against them."""

    def __init__(self, networks: Sequence[Tensor], y: Tensor) -> None:
        """Score all subsets.

        Args:
            networks: class probabilities (N, C) of every network for the same rows; at least two networks.
            y: classes (N,).
        """
        if len(networks) < 2 or len({tuple(p.shape) for p in networks}) > 1:
            shapes = [tuple(p.shape) for p in networks]
            raise ValueError(f"expected probabilities of one shape of at least two networks, got shapes {shapes}")
        self.count = len(networks)
        self.scored: dict[tuple[int, ...], Scored] = {}
        for size in range(1, self.count + 1):
            for subset in combinations(range(self.count), size):
                mean = torch.stack([networks[i].double() for i in subset]).mean(0)
                self.scored[subset] = score(mean, y)

    def curve(self, figure: str = "cnll", without: int | None = None) -> dict[int, float]:
        """Return the mean of a figure over all subsets of each size, of those without one network if it is named."""
        found: dict[int, list[float]] = {}
        for subset, scored in self.scored.items():
            if without not in subset:
                found.setdefault(len(subset), []).append(scored.figures[figure])
        return {size: math.fsum(values) / len(values) for size, values in found.items()}

    def rows(self, figure: str = "cnll") -> Tensor:
        """Return what each row adds to the curve: (sizes, rows), means over the subsets of a size."""
        sizes = range(1, self.count + 1)
        of_size = [[s.rows[figure] for subset, s in self.scored.items() if len(subset) == size] for size in sizes]
        return torch.stack([torch.stack(each).mean(0) for each in of_size])

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each size: the mean of each figure, and its standard errors.

        `se_networks` says how far the mean would move with other networks (jackknife over networks; none for the
        ensemble of all, of which there is one). `se_rows` says how far it would move with other test rows; it is
        common to all methods that are scored on these rows, and mostly cancels in their differences.
        """
        found: list[dict[str, Any]] = [
            {"networks": size, "subsets": math.comb(self.count, size)} for size in range(1, self.count + 1)
        ]
        for figure in FIGURES:
            parts = [self.curve(figure, without=i) for i in range(self.count)]
            for row, mean in zip(found, self.curve(figure).values(), strict=True):
                left = [part[row["networks"]] for part in parts if row["networks"] in part]
                row[figure] = {"mean": mean, "se_networks": jackknife(left) if left else None}
            if figure != "ece":
                for row, each in zip(found, self.rows(figure), strict=True):
                    row[figure]["se_rows"] = float(each.std() / math.sqrt(len(each)))
        return found

    def worth(self, runs: Sequence[Scored]) -> dict[str, Any]:
        """Say how many networks the runs of a method are worth by their calibrated NLL, and what they gain.

        The curve is linear in 1 / K between measured sizes. The variance of an error is the sum of three: other plain
        networks and other seeds of the method (jackknife), and other test rows (bootstrap, the same rows for both).

        Returns:
            `networks` with `bound` ("at most" or "at least" outside of the curve) and `se`; `gain`, the calibrated NLL
            of one network less that of the method, with `gain_se`.
        """
        losses = torch.stack([run.rows["cnll"] for run in runs])
        own = losses.mean(1)
        found: dict[str, Any] = {"cnll": float(own.mean()), "runs": len(runs)}
        networks = metrics.ensemble_equivalent(found["cnll"], self.curve())
        found |= {"networks": networks.networks, "bound": networks.bound}
        for name, of in (("se", _equivalent), ("gain_se", _gain)):
            found[name] = math.sqrt(sum(self._variances(of, losses)))
        return found | {"gain": self.curve()[1] - found["cnll"]}

    def _variances(self, of: Callable[[float, dict[int, float]], float], losses: Tensor) -> Iterable[float]:
        """Yield the variances of a figure that come from networks, seeds and rows."""
        mean, curve = float(losses.mean()), self.curve()
        yield jackknife([of(mean, self.curve(without=i)) for i in range(self.count)]) ** 2
        if len(losses) > 1:
            own = losses.mean(1)
            yield jackknife([of(float((own.sum() - one) / (len(own) - 1)), curve) for one in own]) ** 2
        each = torch.cat([losses.mean(0, keepdim=True), self.rows()])  # the method, then 1, 2, ... networks
        again = torch.stack([row_counts @ each.T for row_counts in _resampled(each.shape[1])]) / each.shape[1]
        values = [of(row[0], dict(enumerate(row[1:], start=1))) for row in again.tolist()]
        yield float(torch.tensor(values, dtype=torch.float64).var())


def jackknife(left_out: Sequence[float]) -> float:
    """Return the standard error of an estimate from its values with one unit left out.

    se^2 = (n - 1) / n sum_i (e_i - mean e)^2.
    """
    values = torch.tensor(left_out, dtype=torch.float64)
    return float(((len(values) - 1) * (values - values.mean()).square().mean()).sqrt())


def paired(runs: dict[int, Scored], plain: dict[int, Scored], figure: str = "cnll") -> dict[str, Any]:
    """Return the difference of a method from the plain networks of the same seeds, which began as the same network."""
    seeds = sorted(set(runs) & set(plain))
    each = [runs[seed].figures[figure] - plain[seed].figures[figure] for seed in seeds]
    values = torch.tensor(each, dtype=torch.float64)
    se = float(values.std() / math.sqrt(len(seeds))) if len(seeds) > 1 else None
    return {"seeds": seeds, "differences": each, "mean": float(values.mean()) if seeds else None, "se": se}


def _equivalent(cnll: float, curve: dict[int, float]) -> float:
    return metrics.ensemble_equivalent(cnll, curve).networks


def _gain(cnll: float, curve: dict[int, float]) -> float:
    return curve[1] - cnll


def _resampled(rows: int) -> Iterable[Tensor]:
    """Yield how often each row is drawn when as many rows are drawn with replacement."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(BOOTSTRAPS):
        yield torch.bincount(torch.randint(rows, (rows,), generator=generator), minlength=rows).double()
