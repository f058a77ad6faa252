"""Teach a narrow, almost deterministic network what a wide stochastic one believes (Cui et al., section 3.5, SN3).

For an input x the teacher's draws are points on the simplex of class probabilities. The student answers with a whole
distribution on it, Dirichlet(alpha(x)), and learns to make both alike in maximum mean discrepancy (eq. 20). The two are
narrowed together: |v| groups of the teacher go with |v_bar| groups of the student,

    |v| = r |v_bar|,   r = groups of the teacher / groups of the student                                      (eq. 21)

in other words both keep the same share of their groups. That share is one for all layers, as it is when a network is
cut; the paper does not say whether it draws one for each.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.core.conversion import own_likelihood, unwrap
from leanbayes.core.norm import update_norm
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.methods._checks import check_at_least_zero, check_choice
from leanbayes.methods.nested.units import OrderingUnit
from leanbayes.runtime.batches import call, Inputs, repeat_rows
from leanbayes.runtime.passes import draws
from leanbayes.slim.discrepancy import concentration_of, mmd
from leanbayes.slim.narrow import narrow
from leanbayes.slim.student import ordering_units, student
from leanbayes.training.data import Batch, Data, Placement, training_batches
from leanbayes.training.fit import fit
from leanbayes.training.recipe import DEFAULT, Recipe

Law = Literal["uniform", "own"]

ROWS_FOR_NORMS = 1024
"""Rows over which the statistics of norms are collected at a width: two batches of 512 in the paper (C.2)."""


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
    """Return a student of a width, trained to answer as the teacher does; the teacher stays as it is.

    In every step both are narrowed to the same share of their groups. The teacher answers with a few draws, in eval
    mode and with statistics of norms that belong to its width; the student takes a step on

        MMD^2(teacher, Dirichlet(student)) + labels * cross-entropy + beta * KL(last layer) / N.

    The student works with `predict`, `evaluate`, `save` and `lb.slim`. The statistics of its norms are those of its
    full width; for others, give `data=` to `lb.slim.extract` or `narrow`. Its keep probabilities stay the teacher's.

    Args:
        teacher: a classifier, converted with `lb.NestedDropout` and trained.
        train: as for `lb.fit`; targets are not looked at while `labels` is zero.
        width: the share or number of the teacher's groups that the student gets; `lb.slim.correlate` helps to choose.
        recipe: how to train the student, neither compiled nor converted late. On a CPU the same recipe gives the same
            student to the last bit.
        samples: draws of the teacher for each row, two at least.
        labels: weight of the cross-entropy with the targets; the paper has none.
        law: of the student's width: "uniform", or its "own", as its keep probabilities say. The paper draws from the
            latter, which seldom trains narrow students.
        options: of `lb.fit`: folder, resume, progress, callbacks (which find the student in `state.model.student`).

    Raises:
        ValueError: if the teacher is not nested or does not tell classes apart, or an argument does not fit.

    Example:
        >>> small = lb.slim.distill(bnn, (x, y), width=0.25, recipe=lb.Recipe(epochs=30, lr=0.02))
        >>> lb.slim.widths(small, (x_test, y_test), [0.25, 0.5, 1.0], data=x[:1024])
    """
    _check(teacher, recipe, samples, labels, law)
    lesson = Lesson(student(teacher, width), teacher, samples, law, _some(train, recipe), recipe.seed)
    units = ordering_units(lesson.student)
    for unit in units:  # a width is given, not drawn by the units: no gradient would reach them
        unit.requires_grad_(False)
    fit(lesson, train, recipe, likelihood=partial(lesson_loss, labels=labels), **options)
    for unit in units:
        unit.requires_grad_(True)
    with draws(lesson.student, seed=recipe.seed, width=1.0, shared=False):
        update_norm(lesson.student, lesson.some)
    return lesson.student


class Lesson(nn.Module):
    """A student and its teacher as one network, so that `fit` can train it.

    Its output (B, 1 + S, C) is what the loss compares: the student's logits, then the teacher's probabilities.

    Attributes:
        student: the only part that is trained.
        law: probabilities of 1, 2, ... groups of the student.
        teachers: the teacher, cut to what goes with each number of groups. They are no submodules, since training,
            divergence and checkpoints are the student's alone.
        some: batches over which the statistics of their norms are collected.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, samples: int, law: Law, some: list[Batch], seed: int
    ) -> None:
        """Cut no teacher before it is needed, on the device of the training."""
        super().__init__()
        self.student, self.samples, self.some, self.seed = student, samples, some, seed
        self.whole = (unwrap(teacher),)  # in a tuple, where torch does not look for submodules
        self.teachers: dict[int, nn.Module] = {}
        self.law = _law(student, law)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw a width and let both answer."""
        return self.at(1 + int(torch.multinomial(self.law, 1)), kwargs or args)

    def at(self, groups: int, x: Inputs) -> Tensor:
        """Let both answer: the student with so many groups, the teacher with the same share of its own."""
        share = groups / len(self.law)
        with draws(self.student, width=share, shared=False):
            logits = call(self.student, x).float()
        if groups not in self.teachers:
            self.teachers[groups] = self._teacher(share, logits.device)
        rows = len(logits)
        with torch.no_grad():  # one pass for all draws: the noise on weights is another in every row
            beliefs = call(self.teachers[groups], repeat_rows(x, rows, self.samples)).float().softmax(1)
        return torch.cat([logits[:, None], beliefs.view(self.samples, rows, -1).transpose(0, 1)], 1)

    def _teacher(self, share: float, device: torch.device) -> nn.Module:
        """Cut the teacher, with randomness of its own: a resumed training cuts it at another step."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            small = narrow(self.whole[0], share).to(device)
            update_norm(small, self.some)
        return small.eval()


def lesson_loss(outputs: Tensor, y: Tensor, *, labels: float) -> Tensor:
    """Return what a student is trained on, from the outputs of a lesson (B, 1 + S, C)."""
    logits, beliefs = outputs[:, 0], outputs[:, 1:].detach().transpose(0, 1)
    found = mmd(beliefs, concentration_of(logits))
    return found + labels * F.cross_entropy(logits, y) if labels else found


def _law(student: nn.Module, law: Law) -> Tensor:
    """Return the probabilities of 1, 2, ... groups of the student; its own law is that of a unit picked at random."""
    widest, *others = ordering_units(student)
    found = torch.zeros(widest.groups)
    if law == "uniform":
        found[widest.always_on - 1 :] = 1 / (widest.groups - widest.always_on + 1)
        return found
    for unit in (widest, *others):
        shares = torch.arange(1, unit.groups + 1) / unit.groups
        places = (shares * widest.groups).ceil().long() - 1
        found.index_add_(0, places, unit.log_tails.detach().exp().cpu() / (1 + len(others)))
    return found


def _some(train: Data, recipe: Recipe) -> list[Batch]:
    """Return the first batches of the training, rows enough for the statistics of norms."""
    found: list[Batch] = []
    for batch in training_batches(train, Placement(torch.device("cpu"), 0, 1, recipe)).epoch(0):
        found.append(batch)
        if sum(len(y) for _, y in found) >= ROWS_FOR_NORMS:
            break
    return found


def _check(teacher: nn.Module, recipe: Recipe, samples: int, labels: float, law: str) -> None:
    likelihood = own_likelihood(teacher) or Categorical()
    if not isinstance(likelihood, Categorical):
        raise ValueError(f"expected a teacher that tells classes apart, got one with {type(likelihood).__name__}")
    if recipe.compile or recipe.convert_at_epoch:
        raise ValueError("expected a recipe with compile=False and convert_at_epoch=0: every step has another width")
    if samples < 2:
        raise ValueError(f"expected samples of at least 2, since the student learns how they scatter, got {samples}")
    check_at_least_zero(labels=labels)
    check_choice("law", law, ("uniform", "own"))


# -------------------- cooling
# Let the relaxed masks of a nested network harden during training: a callback for `fit`.


class Epoch(Protocol):
    """What `fit` tells a callback: the epochs that are done, and the model in training."""

    epoch: int
    model: nn.Module


class Cooling:
    """Lowers the temperature of every ordering unit from epoch to epoch, by equal factors.

        tau = start (end / start)^(epoch / epochs)

    A training that is resumed goes on where it was: the temperature depends on the epoch alone.

    Args:
        start: the temperature at the beginning; give the same to `lb.NestedDropout`.
        end: the temperature of the last epoch.
        epochs: over how many epochs it falls; afterwards it stays.

    Example:
        >>> bnn = lb.convert(net, lb.NestedDropout(temperature=2.0, hard=False))
        >>> lb.fit(bnn, (x, y), recipe, callbacks=[lb.slim.Cooling(2.0, 0.5, epochs=recipe.epochs)])
    """

    def __init__(self, start: float, end: float, *, epochs: int) -> None:
        """Take the two temperatures."""
        if not (start > 0 and end > 0 and epochs > 0):
            raise ValueError(f"expected positive temperatures and epochs, got {start}, {end} and {epochs}")
        self.start, self.end, self.epochs = start, end, epochs

    def __call__(self, state: Epoch) -> None:
        """Set the temperature of the coming epoch."""
        share = min(1.0, state.epoch / self.epochs)
        temperature = self.start * (self.end / self.start) ** share
        for module in state.model.modules():
            if isinstance(module, OrderingUnit):
                module.temperature.fill_(temperature)
