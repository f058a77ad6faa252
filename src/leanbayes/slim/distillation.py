"""Distill a wide stochastic network into a narrow, almost deterministic student (Cui et al., section 3.5, SN3).

For an input x the teacher's draws are points on the simplex of class probabilities. The student returns a distribution
on it, Dirichlet(alpha(x)), and minimises the maximum mean discrepancy between both (eq. 20),

    MMD^2 = E k(p, p') + E k(a, a') - 2 E k(p, a),     p, p' ~ draws,   a, a' ~ Dirichlet(alpha),

which is zero if both distributions are the same, and needs no density of the draws. Both networks are narrowed
together: |v| groups of the teacher go with |v_bar| groups of the student,

    |v| = r |v_bar|,   r = groups of the teacher / groups of the student.                                     (eq. 21)

Both keep the same share of their groups, one share for all layers; the paper does not name its choice. A student starts
with the means and keep probabilities of the teacher's first groups. Only its last layer stays Bayesian (section 6.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributions import Dirichlet

from leanbayes.core.conversion import convert, own_likelihood, unwrap
from leanbayes.core.plain import mean
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.methods._checks import check_at_least_zero, check_choice
from leanbayes.methods.nested.config import NestedDropout
from leanbayes.methods.nested.layer import channels_of, NestedLayer, NestedNorm
from leanbayes.methods.nested.units import LIMIT, OrderingUnit
from leanbayes.runtime.batches import call, Inputs, repeat_rows
from leanbayes.runtime.norm import update_norm
from leanbayes.runtime.passes import draws
from leanbayes.slim.narrowing import narrow
from leanbayes.training.data import Batch, Data, Placement, training_batches
from leanbayes.training.fit import EpochState, fit
from leanbayes.training.recipe import DEFAULT, Recipe

Law = Literal["uniform", "own"]

ROWS_FOR_NORMS = 1024
"""Rows over which norm statistics are collected at a width: two batches of 512 in the paper (C.2)."""

KERNEL_WIDTHS = (0.5, 1.0, 2.0)
"""Around the size of the simplex, sqrt 2. Narrower kernels have no gradient for a student that is far off."""

LOG_PRECISION = 7.0
"""Largest logarithm of the sum of concentrations; a few units more, and gradients of Dirichlet draws overflow."""

SMALLEST_CONCENTRATION = 1e-3
"""Smaller ones give draws that are zero in float32, and gradients that are not finite."""


def distill(
    teacher: nn.Module,
    train: Data,
    *,
    width: float | int = 0.25,
    recipe: Recipe = DEFAULT,
    samples: int = 6,
    labels: float = 0.0,
    law: Law = "uniform",
    **options: Any,
) -> nn.Module:
    """Return a narrower student that is trained to predict like the teacher; the teacher does not change.

    In every step both are narrowed to the same share of their groups. The teacher predicts with a few draws, in eval
    mode and with norm statistics of its width. The student takes a step on

        MMD^2(teacher, Dirichlet(student)) + labels * cross-entropy + beta * KL(last layer) / N.

    The student works with `predict`, `evaluate`, `save` and `lb.slim`. Its norm statistics are those of its full width;
    for others, give `data=` to `lb.slim.extract` or `narrow`. Its keep probabilities stay the teacher's.

    Args:
        teacher: a classifier, converted with `lb.NestedDropout` and trained.
        train: as for `lb.fit`; targets are not used while `labels` is zero.
        width: share or number of the teacher's groups that the student gets; `lb.slim.correlate` helps to choose.
        recipe: of the student's training, neither compiled nor converted late. On a CPU the same recipe gives the same
            student to the last bit.
        samples: draws of the teacher for each row, at least two.
        labels: weight of the cross-entropy with the targets; zero in the paper.
        law: distribution of the student's width: "uniform", or its "own" by its keep probabilities. The paper has the
            latter, which seldom trains narrow students.
        options: of `lb.fit`: folder, resume, progress, callbacks (with the student in `state.model.student`).

    Example:
        >>> small = lb.slim.distill(bnn, (x, y), width=0.25, recipe=lb.Recipe(epochs=30, lr=0.02))
        >>> lb.slim.widths(small, (x_test, y_test), [0.25, 0.5, 1.0], data=x[:1024])
    """
    _check(teacher, recipe, samples, labels, law)
    lesson = Lesson(student(teacher, width), teacher, samples, law, _some(train, recipe), recipe.seed)
    units = ordering_units(lesson.student)
    for unit in units:  # widths are given, so no gradient would reach the units
        unit.requires_grad_(False)
    fit(lesson, train, recipe, likelihood=partial(lesson_loss, labels=labels), **options)
    for unit in units:
        unit.requires_grad_(True)
    with draws(lesson.student, seed=recipe.seed, width=1.0, shared=False):
        update_norm(lesson.student, lesson.some)
    return lesson.student


class Lesson(nn.Module):
    """A student and its teacher as one network, which `fit` can train.

    Its output (B, 1 + S, C) holds the student's logits, then the teacher's probabilities.

    Attributes:
        student: the only part that is trained.
        law: probabilities of 1, 2, ... groups of the student.
        teachers: the teacher at the width for each number of groups, cut on first use. They are no submodules, since
            training, divergence and checkpoints are those of the student.
        some: batches over which their norm statistics are collected.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, samples: int, law: Law, some: list[Batch], seed: int
    ) -> None:
        super().__init__()
        self.student, self.samples, self.some, self.seed = student, samples, some, seed
        self.whole = (unwrap(teacher),)  # in a tuple, so that torch does not register it
        self.teachers: dict[int, nn.Module] = {}
        self.law = _law(student, law)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw a width and call both."""
        return self.at(1 + int(torch.multinomial(self.law, 1)), kwargs or args)

    def at(self, groups: int, x: Inputs) -> Tensor:
        """Call the student with a number of groups, and the teacher with the same share of its own."""
        share = groups / len(self.law)
        with draws(self.student, width=share, shared=False):
            logits = call(self.student, x).float()
        if groups not in self.teachers:
            self.teachers[groups] = self._teacher(share, logits.device)
        rows = len(logits)
        with torch.no_grad():  # one pass for all draws: each row has its own noise on weights
            beliefs = call(self.teachers[groups], repeat_rows(x, rows, self.samples)).float().softmax(1)
        return torch.cat([logits[:, None], beliefs.view(self.samples, rows, -1).transpose(0, 1)], 1)

    def _teacher(self, share: float, device: torch.device) -> nn.Module:
        """Cut the teacher with its own generator: a resumed training cuts it at another step."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            small = narrow(self.whole[0], share).to(device)
            update_norm(small, self.some)
        return small.eval()


def lesson_loss(outputs: Tensor, y: Tensor, *, labels: float) -> Tensor:
    """Return the student's loss from the outputs of a lesson (B, 1 + S, C)."""
    logits, beliefs = outputs[:, 0], outputs[:, 1:].detach().transpose(0, 1)
    found = mmd(beliefs, concentration_of(logits))
    return found + labels * F.cross_entropy(logits, y) if labels else found


def _law(student: nn.Module, law: Law) -> Tensor:
    """Return the probabilities of 1, 2, ... groups of the student; "own" averages over its units."""
    widest, *others = ordering_units(student)
    found = torch.zeros(widest.groups, device="cpu")
    if law == "uniform":
        found[widest.always_on - 1 :] = 1 / (widest.groups - widest.always_on + 1)
        return found
    for unit in (widest, *others):
        shares = torch.arange(1, unit.groups + 1, device="cpu") / unit.groups
        places = (shares * widest.groups).ceil().long() - 1
        found.index_add_(0, places, unit.log_tails.detach().exp().cpu() / (1 + len(others)))
    return found


def _some(train: Data, recipe: Recipe) -> list[Batch]:
    """Return the first training batches, with enough rows for norm statistics."""
    found: list[Batch] = []
    for batch in training_batches(train, Placement(torch.device("cpu"), 0, 1, recipe)).epoch(0):
        found.append(batch)
        if sum(len(y) for _, y in found) >= ROWS_FOR_NORMS:
            break
    return found


def _check(teacher: nn.Module, recipe: Recipe, samples: int, labels: float, law: str) -> None:
    likelihood = own_likelihood(teacher) or Categorical()
    if not isinstance(likelihood, Categorical):
        raise ValueError(f"expected a teacher that predicts classes, got one with {type(likelihood).__name__}")
    if recipe.compile or recipe.convert_at_epoch:
        raise ValueError("expected a recipe with compile=False and convert_at_epoch=0: every step has another width")
    if samples < 2:
        raise ValueError(f"expected samples of at least 2, since the student learns how they scatter, got {samples}")
    check_at_least_zero(labels=labels)
    check_choice("law", law, ("uniform", "own"))


def student(model: nn.Module, width: float | int) -> nn.Module:
    """Return an untrained student: the teacher's means at a width, in their order.

    Its full width is the function of `lb.slim.extract(model, width)`, with the teacher's noise on the weights of the
    last layer, if any. It is nested itself, and `lb.slim` cuts it further: its groups are the first groups of the
    teacher, with their keep probabilities. Its fixed widths are not rescaled by keep probabilities, unlike those of the
    teacher, since a student learns at its widths of use. The width is a share or a number of the teacher's groups.

    Example:
        >>> small = lb.slim.student(bnn, width=0.25)
    """
    model = unwrap(model)
    small = narrow(model, width)
    plain = mean(small)
    ordered = _ordered(model)
    units = {path: layer.posterior.order for path, layer in ordered.items() if isinstance(layer, NestedLayer)}
    method = _narrower(ordered[next(iter(units))].method, list(units.values()), width)
    last = [path for path in channels_of(plain, method.inputs).makers if path not in ordered][-1]
    pupil = convert(plain, method, where=list(ordered), likelihood=own_likelihood(model), copy=False)
    for path, unit in units.items():
        if isinstance(layer := _layer(pupil, path), NestedLayer):  # one channel for each group of a convolution stays
            _inherit(layer.posterior.order, unit)
    noisy = _layer(small, last)
    if isinstance(noisy, NestedLayer):
        pupil = convert(pupil, replace(method, weight_noise=True), where=last, copy=False)
        _layer(pupil, last).posterior.log_alpha = noisy.posterior.log_alpha
    return pupil.to(noisy.weight.device)


def ordering_units(model: nn.Module) -> list[OrderingUnit]:
    """Return the ordering units of a model, the one with most groups first."""
    found = [module for module in model.modules() if isinstance(module, OrderingUnit)]
    return sorted(found, key=lambda unit: -unit.groups)


def _ordered(model: nn.Module) -> dict[str, Any]:
    """Return the layers and norms with ordered channels, by path."""
    layers = {p: layer for p, layer in model.named_modules() if isinstance(layer, (NestedLayer, NestedNorm))}
    return {path: layer for path, layer in layers.items() if layer.ordered}


def _layer(model: nn.Module, path: str) -> Any:
    return model.get_submodule(path)


def _narrower(method: NestedDropout, units: Sequence[OrderingUnit], width: float | int) -> NestedDropout:
    """Return the method of a student: the groups of the width, with the same share of them always on.

    It has no divergence: its tails are the teacher's, and its weights have no noise.
    """
    widest = max(units, key=lambda unit: unit.groups)
    groups = widest.count(width)
    return replace(
        method,
        groups=groups,
        always_on=math.ceil(widest.always_on * groups / widest.groups),
        rescale=False,
        weight_noise=False,
        weight_cost=0.0,
        order_prior=False,
    )


def _inherit(unit: OrderingUnit, teacher: OrderingUnit) -> None:
    """Copy the temperature, and the conditional keep probabilities of the teacher's first groups."""
    with torch.no_grad():
        unit.temperature.copy_(teacher.temperature)
        if teacher.learned:  # groups that are always on in the teacher are almost always on in the student
            logits = F.pad(teacher.keep_logits, (teacher.always_on, 0), value=LIMIT)
            unit.keep_logits.copy_(logits[unit.always_on : unit.groups])


class Cooling:
    """A callback of `fit` that lowers the temperature of relaxed masks in every epoch, by equal factors.

        tau = start (end / start)^(epoch / epochs)

    The temperature depends on the epoch alone, and is part of the stored state: a resumed training continues with it.

    Args:
        start: the first temperature; give the same to `lb.NestedDropout`.
        end: the last temperature.
        epochs: number of epochs over which it falls; afterwards it stays.

    Example:
        >>> bnn = lb.convert(net, lb.NestedDropout(temperature=2.0, hard=False))
        >>> lb.fit(bnn, (x, y), recipe, callbacks=[lb.slim.Cooling(2.0, 0.5, epochs=recipe.epochs)])
    """

    def __init__(self, start: float, end: float, *, epochs: int) -> None:
        if not (start > 0 and end > 0 and epochs > 0):
            raise ValueError(f"expected positive temperatures and epochs, got {start}, {end} and {epochs}")
        self.start, self.end, self.epochs = start, end, epochs

    def __call__(self, state: EpochState) -> None:
        """Set the temperature of the next epoch."""
        share = min(1.0, state.epoch / self.epochs)
        temperature = self.start * (self.end / self.start) ** share
        for unit in ordering_units(state.model):
            unit.temperature.fill_(temperature)


def mmd(samples: Tensor, concentration: Tensor, *, draws: int = 32, widths: Sequence[float] = KERNEL_WIDTHS) -> Tensor:
    """Estimate the squared discrepancy between draws and a Dirichlet in each row, averaged over the rows.

    The estimator is unbiased, hence sometimes below zero, and differentiable by the concentration. The kernel is the
    mean of exp(-|p - a|^2 / (2 w^2)) over its widths w.

    Args:
        samples: probabilities of C classes for B rows in S >= 2 draws (S, B, C).
        concentration: of a Dirichlet for each row (B, C), positive.
        draws: number of draws from each Dirichlet, at least two.
        widths: of the kernel.
    """
    if samples.dim() != 3 or samples.shape[1:] != concentration.shape:
        raise ValueError(
            f"expected samples (S, B, C) and concentrations (B, C), got {tuple(samples.shape)} and "
            f"{tuple(concentration.shape)}"
        )
    if min(len(samples), draws) < 2:
        raise ValueError(f"expected at least two draws of either side, got {len(samples)} samples and draws={draws}")
    given = samples.transpose(0, 1)
    drawn = Dirichlet(concentration, validate_args=False).rsample((draws,)).transpose(0, 1)
    within = _between_others(_kernel(given, given, widths)) + _between_others(_kernel(drawn, drawn, widths))
    return (within - 2 * _kernel(given, drawn, widths).mean((1, 2))).mean()


def concentration_of(logits: Tensor) -> Tensor:
    """Return exp(logits), with their sum, the precision, squeezed between exp(-7) and exp(7).

    The mean of this Dirichlet is softmax(logits), unless a concentration is clamped at 0.001. Its variance depends on
    the common size of the logits, which a softmax ignores. Squeezing, unlike clamping, keeps a gradient for a large
    precision.
    """
    log_precision = logits.logsumexp(1, keepdim=True)
    squeezed = LOG_PRECISION * (log_precision / LOG_PRECISION).tanh()
    return (logits - log_precision + squeezed).exp().clamp(min=SMALLEST_CONCENTRATION)


def _kernel(a: Tensor, b: Tensor, widths: Sequence[float]) -> Tensor:
    """Return the kernel between all points of two sets (B, S, C) and (B, D, C): (B, S, D)."""
    # Scalar products would lose small distances.
    squares = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.stack([(-squares / (2 * width**2)).exp() for width in widths]).mean(0)


def _between_others(kernel: Tensor) -> Tensor:
    """Return the mean over pairs of different points, of each of B matrices."""
    count = kernel.shape[-1]
    return (kernel.sum((1, 2)) - kernel.diagonal(dim1=1, dim2=2).sum(1)) / (count * (count - 1))
