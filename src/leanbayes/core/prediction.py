"""`Prediction`: one record for every method and every task."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import distributed, Tensor

from leanbayes.distributions.likelihoods import (
    Bernoulli,
    binary_entropy,
    Categorical,
    entropy,
    Gaussian,
    Likelihood,
    Measure,
)
from leanbayes.runtime import display
from leanbayes.runtime.batches import Inputs, map_rows
from leanbayes.runtime.display import counted
from leanbayes.runtime.distributed import rank_and_world

# S draws, B rows, C classes, D targets

SHOWN = 8
"""Examples that a notebook shows."""
KINDS = ("total", "aleatoric", "epistemic")


@dataclass(frozen=True)
class Prediction:
    """Predictions of a model, with their uncertainty split into aleatoric and epistemic.

    Attributes:
        mean: class probabilities (B, C, ...), probabilities of yes, or means of targets (B, D).
        total: predictive entropy in nats (B, ...), or variance (B, D); aleatoric + epistemic.
        aleatoric: noise of the data: mean entropy (variance) of the draws.
        epistemic: uncertainty of the model: mutual information, or variance between the draws.
        samples: predictions of the draws (S, B, ...), None if not kept.
        variances: variances of the draws (S, B, D), for Gaussian likelihoods.
        likelihood: the likelihood of the outputs.
        weights: shares of the draws (S,), at least zero, with sum one; None for equal shares.
        draws: number of draws that each row took (B,), if `predict` had a tolerance; else None.
    """

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    samples: Tensor | None
    variances: Tensor | None
    likelihood: Likelihood
    weights: Tensor | None = None
    draws: Tensor | None = None

    def __post_init__(self) -> None:
        draws = 0 if self.samples is None else len(self.samples)
        if self.weights is not None and self.weights.shape != (draws,):
            raise ValueError(
                f"expected one weight for each of the {draws} draws, got weights of shape {tuple(self.weights.shape)}"
            )

    @property
    def std(self) -> Tensor:
        """Standard deviation of the prediction: of the target (regression), of each probability between draws."""
        if isinstance(self.likelihood, Gaussian):
            return self.total.sqrt()
        draws = self._draws("the spread of probabilities")
        if self.weights is None:
            return draws.std(0, correction=0)
        return average((draws - self.mean).square(), self.weights).sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y) = log sum_s w_s p(y | draw s) for every target; w_s = 1 / S without weights."""
        if not isinstance(y, Tensor):
            raise TypeError(f"expected y as a tensor of targets, got {type(y).__name__}; torch.as_tensor(y) makes one")
        if self.weights is None:
            return self.likelihood.log_prob_of_mixture(self.mean, self.samples, self.variances, y)
        draws = self._draws("a likelihood under weights")
        noise = [None] * len(draws) if self.variances is None else self.variances.unsqueeze(1)
        of_one = self.likelihood.log_prob_of_mixture
        each = zip(draws, noise, self.weights.log(), strict=True)
        return torch.stack([share + of_one(m, m[None], v, y) for m, v, share in each]).logsumexp(0)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval that holds a real target with probability `level`.

        Its ends are quantiles of the mixture of the draws' Gaussians; without samples, of one Gaussian.
        """
        if not isinstance(self.likelihood, Gaussian):
            raise TypeError("an interval needs real targets (lb.Gaussian); this prediction is over classes")
        if not 0 < level < 1:
            raise ValueError(f"expected a level between 0 and 1, got {level!r}")
        tails = ((1 - level) / 2, (1 + level) / 2)
        low, high = (self._quantile(tail) for tail in tails)
        return low, high

    def reject(self, coverage: float) -> Tensor:
        """Return which rows to reject (B,): all but the `coverage` share with the least uncertainty."""
        if not 0 <= coverage <= 1:
            raise ValueError(f"expected a coverage between 0 and 1, got {coverage!r}")
        per_row = self.total.flatten(1).mean(1) if self.total.dim() > 1 else self.total
        rejected = torch.ones_like(per_row, dtype=torch.bool)
        rejected[per_row.argsort(stable=True)[: round(coverage * len(per_row))]] = False
        return rejected

    def to(self, device: torch.device | str) -> Prediction:
        """Return the same prediction on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def __repr__(self) -> str:
        means = ", ".join(f"{kind} {display.average(getattr(self, kind))}" for kind in KINDS)
        unit = "nats on average" if self.likelihood.measure == "entropy" else "on average, variances"
        return f"Prediction({_contents(self)}; {means} {unit})"

    def _repr_html_(self) -> str:
        """Return the line and, for one class or one real target per row, a table of the first examples."""
        flat = self.mean.dim() == 2 and self.total.numel() == len(self.mean) and not self.mean.is_meta
        if not flat or isinstance(self.likelihood, Bernoulli):
            return display.html_table(repr(self), (), ())
        some = [getattr(self, kind)[:SHOWN].detach().float().flatten().tolist() for kind in KINDS]
        first = self.mean[:SHOWN].detach().float()
        if self.likelihood.measure == "variance":
            heads, said = ("mean", "std"), (first.flatten().tolist(), [math.sqrt(max(t, 0.0)) for t in some[0]])
        else:
            heads, said = ("class", "probability"), (first.argmax(1).tolist(), first.amax(1).tolist())
        rows = [[str(i), *(f"{each:.3g}" for each in row)] for i, row in enumerate(zip(*said, *some, strict=True))]
        left = f"and {len(self.mean) - len(rows):,} more" if len(self.mean) > len(rows) else ""
        return display.html_table(repr(self), ("example", *heads, *KINDS), rows, left)

    def _draws(self, what: str) -> Tensor:
        if self.samples is None:
            raise ValueError(f"{what} needs the draws; call predict with keep_samples=True")
        return self.samples

    def _quantile(self, level: float) -> Tensor:
        """Return the quantile of the predictive distribution, by bisection between the draws' quantiles."""
        means = self.mean[None] if self.samples is None else self.samples
        stds = self.total[None].sqrt() if self.variances is None else self.variances.sqrt()
        z = math.sqrt(2) * torch.erfinv(torch.tensor(2 * level - 1, dtype=torch.float64, device="cpu")).item()
        each = means + z * stds
        low, high = each.amin(0), each.amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            below = average(torch.special.ndtr((middle - means) / stds), self.weights) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


def _contents(p: Prediction) -> str:
    """Return the contents of a prediction in words: examples, classes or targets, draws."""
    examples, *inner = p.mean.shape
    what = f"{counted(math.prod(inner), 'target')}"
    if isinstance(p.likelihood, Categorical):
        classes, *inner = inner
        what = counted(classes, "class")
    elif isinstance(p.likelihood, Bernoulli):
        what = "yes or no" if math.prod(inner) == 1 else f"{math.prod(inner):,} times yes or no"
    space = f" of {' x '.join(map(str, inner))}" if inner and isinstance(p.likelihood, Categorical) else ""
    draws = "draws not kept" if p.draws is None else f"{p.draws.double().mean():.3g} draws an example"
    if p.samples is not None:
        draws = counted(len(p.samples), "draw" if p.weights is None else "weighted draw")
    return f"{counted(examples, 'example')}{space}, {what}, {draws}"


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    """Average values (S, ...) over the draws, by their weights (S,) if given."""
    if weights is None:
        return values.mean(0)
    # A product and a sum: a matrix product would be rounded to ten bits under TF32.
    return (weights.view(-1, *[1] * (values.dim() - 1)) * values).sum(0)


def over_classes(probabilities: Tensor, prediction: Prediction) -> Tensor:
    """Return probabilities with classes on axis 1; a probability of yes (B, ...) becomes no and yes (B, 2, ...)."""
    if isinstance(prediction.likelihood, Categorical):
        return probabilities
    if isinstance(prediction.likelihood, Bernoulli):
        # Near one, 1 - p is rounded to zero in float32.
        return torch.stack(((1 - probabilities).clamp(min=2**-25), probabilities), 1)
    raise TypeError(
        f"expected a prediction with Categorical, Bernoulli or Gaussian, got {type(prediction.likelihood).__name__}"
    )


def concatenate(parts: list[Prediction]) -> Prediction:
    """Join predictions of consecutive rows into one."""
    first = parts[0]
    variances = [part.variances for part in parts if part.variances is not None]
    return Prediction(
        mean=torch.cat([part.mean for part in parts]),
        total=torch.cat([part.total for part in parts]),
        aleatoric=torch.cat([part.aleatoric for part in parts]),
        epistemic=torch.cat([part.epistemic for part in parts]),
        samples=None if first.samples is None else torch.cat([part._draws("joining") for part in parts], 1),
        variances=torch.cat(variances, 1) if variances else None,
        likelihood=first.likelihood,
        weights=first.weights,
        draws=None if first.draws is None else torch.cat([part.draws for part in parts if part.draws is not None]),
    )


ROW_AXES = {"mean": 0, "total": 0, "aleatoric": 0, "epistemic": 0, "samples": 1, "variances": 1, "draws": 0}
"""The axis of the rows in each tensor of a prediction."""


def my_share(x: Inputs, rows: int) -> Inputs:
    """Return the rows of this process: every `world`-th, from its rank on."""
    rank, world = rank_and_world()
    if world == 1:
        return x
    share: Inputs = map_rows(x, rows, lambda tensor: tensor[rank::world])
    return share


def of_all_processes(mine: Prediction, rows: int) -> Prediction:
    """Join the shares of all processes in the order of the rows."""
    world = rank_and_world()[1]
    if world == 1:
        return mine
    tensors = {name: getattr(mine, name) for name in ROW_AXES if getattr(mine, name) is not None}
    shares: list[Any] = [None] * world
    distributed.all_gather_object(shares, tensors)
    order = torch.cat([torch.arange(rank, rows, world) for rank in range(world)]).argsort()
    whole: dict[str, Any] = {
        name: _joined([share[name] for share in shares], order, ROW_AXES[name]) for name in tensors
    }
    return replace(mine, **whole)


def _joined(parts: list[Tensor], order: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, axis).index_select(axis, order)


class Decomposition(NamedTuple):
    """The mean prediction and its uncertainties; total = aleatoric + epistemic, all at least zero.

    Entropies (classification; Depeweg et al., 2018, eq. 26-27 of the implicit paper):
        total = H(mean_s p_s),     aleatoric = mean_s H(p_s),     epistemic = total - aleatoric, a mutual information.
    Variances (regression):
        aleatoric = mean_s var_s,  epistemic = var_s(mean_s),     total = aleatoric + epistemic.
    """

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class RunningUncertainty:
    """Decompose uncertainty draw by draw, in constant memory."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.count = 0

    def add(self, mean: Tensor, own: Tensor) -> None:
        """Add one draw: its prediction, and its own uncertainty (entropy or variance).

        Welford's update has no difference of large sums, so it keeps small epistemic variances.
        """
        self.count += 1
        if self.count == 1:
            self.mean, self.own, self.squares = mean.clone(), own.clone(), torch.zeros_like(mean)
            return
        gap = mean - self.mean
        self.mean += gap / self.count
        self.own += (own - self.own) / self.count
        if self.measure == "variance":
            self.squares += gap * (mean - self.mean)

    def add_all(self, means: Tensor, own: Tensor) -> None:
        """Add several draws at once: predictions (G, B, ...) and their own uncertainties."""
        count = len(means)
        if count == 1:
            self.add(means[0], own[0])
            return
        mean, average_own = means.mean(0), own.mean(0)
        squares = (means - mean).square().sum(0) if self.measure == "variance" else torch.zeros_like(mean)
        if self.count == 0:
            self.count, self.mean, self.own, self.squares = count, mean, average_own, squares
            return
        # The parallel form of Welford's update (Chan, Golub, LeVeque, 1979).
        self.count += count
        gap, share = mean - self.mean, count / self.count
        self.squares += squares + gap.square() * (share * (self.count - count))
        self.mean += gap * share
        self.own += (average_own - self.own) * share

    def result(self) -> Decomposition:
        """Return the decomposition over the added draws."""
        if self.count == 0:
            raise ValueError("expected at least one draw, got none")
        if self.measure == "variance":
            epistemic = self.squares / self.count
        else:
            # The entropy over classes has no class axis; that of a single probability has the same shape.
            of_mean = binary_entropy(self.mean) if self.own.shape == self.mean.shape else entropy(self.mean)
            epistemic = (of_mean - self.own).clamp(min=0)  # rounding may leave -1e-8
        return Decomposition(self.mean, self.own + epistemic, self.own, epistemic)


def decompose(means: Tensor, own: Tensor, measure: Measure) -> Decomposition:
    """Decompose the uncertainty of S draws at once: predictions (S, B, ...) and their own uncertainties."""
    running = RunningUncertainty(measure)
    for mean, uncertainty in zip(means, own, strict=True):
        running.add(mean, uncertainty)
    return running.result()
