"""Stop early, row by row: a row takes no more draws once they would change its prediction by less than a tolerance.

After s of S draws, p_s is the mean of a row's predictions, and v_c the variance of class c between draws. The answer of
all S draws differs from it by the divergence (second order in the difference)

    E KL(p_S || p_s)  =  1/2 (1/s - 1/S) sum_c v_c / p_c        nats, for classes,
                         1/2 (1/s - 1/S) v / (total variance)   nats, for real targets, summed over targets,

averaged over the positions of a dense output. A row stops if this is at most the tolerance, unless all its draws so far
are equal: few draws of a discrete posterior may be one function (a patch, a mask), which says nothing about the others.
The rule is checked after 4, 8, 16, ... draws. The variance is taken over independent units: draws, or pairs of draws
under `design="paired"`, where v is twice the variance of the means of pairs. No other row has a part in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from leanbayes.core.prediction import Decomposition, Prediction, RunningUncertainty
from leanbayes.distributions.likelihoods import Bernoulli, Likelihood
from leanbayes.runtime.batches import Inputs, map_rows

FIRST_CHECK = 4
"""Draws before the first check: the variance of fewer says too little."""

SIZES = (1.0, 0.75)
"""Rows left are filled up to B times one of these, halved as often as needed: few shapes, at most a third of waste."""

SMALLEST_PROBABILITY = 1e-3
"""Added to the probability of a class, so that the variance of a class without probability does not matter."""

Run = Callable[[Inputs, range], Iterator[tuple[Tensor, Tensor]]]
"""Yields predictions (G, B, ...) and own uncertainties of a range of draws on some rows."""


def stages(number: int) -> list[range]:
    """Return the draws between two checks: 0 to 4, 4 to 8, 8 to 16, ..."""
    ends = [0]
    while ends[-1] < number:
        ends.append(min(number, max(FIRST_CHECK, 2 * ends[-1])))
    return [range(start, stop) for start, stop in pairwise(ends)]


def padded(count: int, rows: int) -> int:
    """Return the size of the batch that `count` of `rows` rows are filled up to."""
    size = rows
    for halvings in range(max(1, rows).bit_length()):
        for share in SIZES:
            one = math.ceil(rows * share / 2**halvings)
            size = one if count <= one < size else size
    return size


def predict_until(
    run: Run, x: Inputs, rows: int, number: int, unit: int, tolerance: float, likelihood: Likelihood
) -> Prediction:
    """Predict with at most `number` draws for each row of x."""
    left, state = torch.arange(rows, device="cpu"), _State(likelihood, unit)
    parts: list[tuple[Tensor, Decomposition, int]] = []
    for stage in stages(number):
        some = x if len(left) == rows else _take(x, rows, left)
        for means, owns in run(some, stage):
            state.add(means[:, : len(left)], owns[:, : len(left)])
        stops = state.change(number) <= tolerance
        if stage.stop == number:
            stops = torch.ones_like(stops)
        parts.append((left[stops.cpu()], state.result(stops), stage.stop))
        left = left[~stops.cpu()]
        if not len(left):
            break
        state.keep(~stops)
    return _joined(parts, likelihood)


def _take(x: Inputs, rows: int, left: Tensor) -> Inputs:
    """Return the rows that are left, filled up with the first of them."""
    fill = left[:1].expand(padded(len(left), rows) - len(left))
    chosen = torch.cat((left, fill))
    found: Inputs = map_rows(x, rows, lambda tensor: tensor[chosen.to(tensor.device)])
    return found


class _State:
    """Sums over the draws of the rows that are left."""

    def __init__(self, likelihood: Likelihood, unit: int) -> None:
        self.likelihood, self.unit = likelihood, unit
        self.draws = RunningUncertainty(likelihood.measure)
        self.units = RunningUncertainty("variance")
        self.waiting: list[Tensor] = []  # draws of an unfinished unit

    def add(self, means: Tensor, owns: Tensor) -> None:
        self.draws.add_all(means, owns)
        self.waiting += means.unbind()
        whole = len(self.waiting) // self.unit * self.unit
        if whole:
            first = torch.stack(self.waiting[:whole])
            units = first.view(-1, self.unit, *first.shape[1:]).mean(1)
            self.waiting = self.waiting[whole:]
            self.units.add_all(units, units)

    def change(self, number: int) -> Tensor:
        """Return the divergence in nats that the draws up to `number` are expected to make, for each row."""
        count = self.units.count
        if count < 2:
            return torch.full_like(_by_row(self.draws.mean)[:, 0], torch.inf)
        variance = self.units.squares / (count - 1) * self.unit  # of a draw
        mean = self.draws.mean
        if self.likelihood.measure == "variance":
            relative = variance / self.draws.result().total
            per_position = _by_row(relative).sum(1)
        elif isinstance(self.likelihood, Bernoulli):
            floor = SMALLEST_PROBABILITY
            per_position = _by_row(variance / (mean + floor) + variance / (1 - mean + floor)).mean(1)
        else:
            per_position = (variance / (mean + SMALLEST_PROBABILITY)).sum(1).flatten(1 if mean.dim() > 2 else 0)
            per_position = per_position.mean(1) if mean.dim() > 2 else per_position
        change = 0.5 * (1 / self.draws.count - 1 / number) * per_position
        return change.masked_fill(_by_row(variance).amax(1) == 0, torch.inf)

    def result(self, rows: Tensor) -> Decomposition:
        return Decomposition(*(part[rows] for part in self.draws.result()))

    def keep(self, rows: Tensor) -> None:
        """Drop the rows that have stopped."""
        for running in (self.draws, self.units):
            if running.count:
                running.mean, running.own, running.squares = (
                    part[rows] for part in (running.mean, running.own, running.squares)
                )
        self.waiting = [one[rows] for one in self.waiting]


def _by_row(values: Tensor) -> Tensor:
    """Return values as (rows, values of a row); answers of yes or no may be one number for each row."""
    return values.reshape(len(values), -1)


def _joined(parts: list[tuple[Tensor, Decomposition, int]], likelihood: Likelihood) -> Prediction:
    """Return the prediction of all rows in their order."""
    order = torch.cat([rows for rows, _, _ in parts]).argsort()
    device = parts[0][1].mean.device
    draws = torch.cat([torch.full((len(rows),), count, device="cpu") for rows, _, count in parts])[order]
    columns = zip(*(found for _, found, _ in parts), strict=True)
    mean, total, aleatoric, epistemic = (torch.cat(column)[order.to(device)] for column in columns)
    return Prediction(mean, total, aleatoric, epistemic, None, None, likelihood, draws=draws.to(device))
