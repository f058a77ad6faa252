"""`distill`: train a plain network to give the answer of many draws in one pass (`core/student.py`).

The teacher predicts with S draws for every row of a pool: the training rows, and perturbed versions of them, which keep
the student unsure far from the data. The student starts as the mean network and learns these predictions,

    classes        -sum_c p_c log q_c                               + weight * (e / e' - 1 - log(e / e'))
    real targets   (m - m')^2 / (2 total) + (log a - log a')^2 / 4  + weight * (e / e' - 1 - log(e / e'))

with the teacher's p, m, a (aleatoric), e (epistemic) and total, and the student's numbers primed or q. The first parts
are divergences of the predictive distributions. The last one moves the epistemic part, not the mean. Only the ratio of
e and e' counts, so small parts count like large ones, and the best e' is the mean of e where the student cannot tell
rows apart: squares of log(e / e') would aim at the geometric mean, too low far from the data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils import _pytree

from leanbayes.core.conversion import is_stochastic, own_likelihood, unwrap
from leanbayes.core.plain import mean
from leanbayes.core.prediction import Decomposition, over_classes, Prediction
from leanbayes.core.predictor import Predictor
from leanbayes.core.student import Student, student_of
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._checks import check_at_least_zero, whole_number
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime.batches import (
    call,
    device_of,
    Inputs,
    leading_rows,
    map_rows,
    Output,
    slice_rows,
    tensors_in,
    to_device,
)
from leanbayes.runtime.passes import components_of
from leanbayes.training.data import batches_of, Data, Placement, ROWS_AT_ONCE, seeded, training_batches
from leanbayes.training.fit import fit
from leanbayes.training.recipe import DEFAULT, Recipe

PERTURBED = 1
"""Perturbed versions of every row, by default."""

FEWEST_EPOCHS, FEWEST_STEPS = 3, 3000
"""Of the default training: a student starts near its aim, but its further outputs at zero."""

SMALLEST = 1e-4
"""Share of the mean epistemic part below which differences do not matter."""

STEEPEST = 3.0
"""Log-ratio of epistemic parts from which on the loss is a straight line."""

HELD_OUT = 0.1
"""Share of the rows that the student is not trained on; its report is made of them."""

ROUNDING = 1e-6
"""Share of the total uncertainty that rounding may leave: as the epistemic part of equal draws, or as the rest."""

COARSE = (4, 7, 14)
"""Points a side of coarse noise."""

ENLARGED = {3: "linear", 4: "bilinear", 5: "trilinear"}
"""How noise is enlarged, by the number of axes of the inputs."""

FEWEST_ROWS = 20
"""Rows of the data: fewer leave too few to hold out."""

START_ROWS = 512
"""Rows that decide which network the student starts from."""


def distill(  # noqa: PLR0913
    model: nn.Module,
    data: Data,
    *,
    recipe: Recipe | None = None,
    likelihood: Likelihood | None = None,
    samples: int = 16,
    seed: int = 0,
    perturbed: int = PERTURBED,
    weight: float = 0.06,
    output: Output | None = None,
    **options: Any,
) -> Student:
    """Return a student: a plain network whose single pass gives the mean and the uncertainties of many draws.

    `lb.predict(student, x)`, `lb.evaluate`, `lb.save`, `lb.load` and the ONNX export take it like a converted model. It
    starts as the mean network (of component 0 where that is closer to the teacher, and for ensembles). One layer is
    wider: the last linear layer or convolution, whose outputs the network must return. It is trained in eval mode, so
    that norm statistics stay those of the teacher. The teacher does not change.

    `student.report` has its agreement with the teacher on a tenth of the rows, which it is not trained on: `spearman`,
    the rank correlation of the epistemic parts; `divergence` KL(teacher || student) of the predictions in nats;
    `epistemic`, the mean epistemic part of the student divided by that of the teacher; and `rows`.
    `student.history` is that of its training; its seconds include the teacher's predictions.

    Args:
        model: a trained, converted model, or an ensemble.
        data: as for `lb.fit`; targets are not used. All rows are kept in memory, with their perturbed versions: of a
            larger set, give a part.
        recipe: of the student's training; default Adam at 1e-3 for 3,000 steps, at least three epochs. Its `augment`
            also changes the rows that the teacher sees.
        likelihood: default the model's own, else `Categorical`.
        samples: draws of the teacher; at least two, whose difference the student learns.
        seed: of the teacher's draws.
        perturbed: versions of every row off the data (`perturb`), where inputs are real. They keep the student unsure
            far from the data.
        weight: of the epistemic part in the loss.
        output: picks the tensor from the model's result; give it to `lb.predict`, too.
        options: of `lb.fit`: folder, resume, progress, callbacks, loggers.

    Raises:
        ValueError: if no layer of the network can get further outputs, or the model has no uncertainty to learn.

    Example:
        >>> student = lb.distill(bnn, (x, y))
        >>> p = lb.predict(student, x_test)  # one pass: p.mean, p.total, p.aleatoric, p.epistemic
        >>> student.report["spearman"]
    """
    model = unwrap(model)
    recipe = default_recipe(_count(data), perturbed) if recipe is None else recipe
    _check(model, recipe, samples, perturbed, weight)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    teacher = Predictor(model, likelihood, samples=samples, seed=seed, keep_samples=False, output=output)
    clock = time.perf_counter()
    rows, held = _split(_all_rows(data, recipe), recipe)
    pool = _pool(rows, recipe, perturbed)
    known = teacher(iter(_blocks(pool))).to("cpu")
    student = _start(model, likelihood, pool, known, output)
    scale = _fill_bias(student, known)
    clock = time.perf_counter() - clock
    # The pool is augmented already: a row that changes again would not fit its answer.
    own, aim = replace(recipe, augment="none"), partial(loss, student, weight, SMALLEST * scale)
    history = fit(Lesson(student, output), (pool, packed(known)), own, likelihood=aim, **options)
    history[0]["seconds"] += clock
    student.history = history
    answers = Predictor(student, output=output)(iter(_blocks(held))).to("cpu")
    student.report = report_of(teacher(iter(_blocks(held))).to("cpu"), answers)
    return student


class Lesson(nn.Module):
    """A student in training: `fit` trains its network, with all further outputs, in eval mode."""

    def __init__(self, student: Student, output: Output | None) -> None:
        super().__init__()
        self.student, self.output = student, output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return call(self.student.network, kwargs or args, self.output)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: perturbed rows would change norm statistics, and dropout would blur the answers."""
        return super().train(False)


def perturb(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Return rows off the data, from near to far: extrapolated, scaled and shifted, with fine and coarse noise.

        s (x + t (x' - x)) + std (b + e z + e' z'),      t ~ U(-1, 2),  log s ~ U(-log 4, log 4),  b ~ U(-1, 1),
                                                         log e, log e' ~ U(log 0.03, log 3),  z ~ Normal(0, 1),

    with another row x' and the standard deviation of all entries. The coarse noise z' of images and series is noise of
    a few pixels, enlarged: shapes of any size. Features have none. Numbers are drawn for each row. Whole numbers, such
    as tokens, stay.
    """
    count = leading_rows(inputs) or 0
    other = torch.randperm(count, generator=generator, device=generator.device)
    numbers = torch.rand(5, count, generator=generator, device=generator.device)

    def change(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        t, s, b, fine, coarse = numbers.to(x.dtype).view(5, -1, *[1] * (x.dim() - 1))
        noise = 0.03 * 100**fine * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device)
        if x.dim() in ENLARGED:
            noise += 0.03 * 100**coarse * _coarse_noise(x, generator)
        moved: Tensor = torch.lerp(x, x[other], 3 * t - 1) * 4 ** (2 * s - 1) + x.std() * (2 * b - 1 + noise)
        return moved

    found: Inputs = map_rows(inputs, count, change)
    return found


def _coarse_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise of unit variance in the shape of x (B, C, ...): each row at 4, 7 or 14 points a side, enlarged."""
    here = generator.device
    sides = torch.tensor(COARSE, device=here)[torch.randint(len(COARSE), (len(x),), generator=generator, device=here)]
    found = torch.empty_like(x)
    for side in COARSE:
        rows = (sides == side).nonzero().flatten()
        size = len(rows), x.shape[1], *[side] * (x.dim() - 2)
        few = torch.randn(size, generator=generator, dtype=x.dtype, device=here)
        found[rows] = (
            F.interpolate(few, x.shape[2:], mode=ENLARGED[x.dim()]) if len(rows) else few.view(0, *x.shape[1:])
        )
    return found / found.square().mean().sqrt().clamp(min=1e-12)


def packed(p: Prediction) -> Tensor:
    """Return the answers of a teacher as targets: (B, C + 1, ...) for classes, else (B, 3, ...)."""
    if isinstance(p.likelihood, Categorical):
        return torch.cat([p.mean, p.epistemic.unsqueeze(1)], 1)
    return torch.stack([p.mean, p.aleatoric, p.epistemic], 1)


def loss(student: Student, weight: float, floor: float, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a student's outputs for packed answers.

    The floor is added to both epistemic parts. That of the student has a gradient by its further outputs alone.
    """
    usual, further = student.split(outputs)
    found = student.read(outputs)
    if student.likelihood.measure == "variance":
        mean, aleatoric, epistemic = y.unbind(1)
        fits: Tensor = ((found.mean - mean).square() / (2 * (aleatoric + epistemic))).mean()
        fits = fits + (found.aleatoric.log() - aleatoric.log()).square().mean() / 4
        there = found.epistemic
    elif isinstance(student.likelihood, Categorical):
        mean, epistemic = y[:, :-1], y[:, -1]
        fits = -(mean * usual.movedim(student.place.axis, 1).log_softmax(1)).sum(1).mean()
        there = further.sigmoid() * found.total.detach()
    else:
        mean, _, epistemic = y.unbind(1)
        fits = F.binary_cross_entropy_with_logits(usual, mean)
        there = further.sigmoid() * found.total.detach()
    ratio = (epistemic + floor).log() - (there + floor).log()
    rise = ratio.clamp(max=STEEPEST)  # then a straight line, since an exponential would overflow
    return fits + weight * (rise.exp() * (1 + ratio - rise) - 1 - ratio).mean()


def report_of(teacher: Prediction, student: Prediction) -> dict[str, float]:
    """Return the agreement of a student with its teacher on the same rows; see `distill`."""
    theirs, own = (p.epistemic.double().flatten() for p in (teacher, student))
    return {
        "spearman": rank_correlation(theirs, own),
        "divergence": divergence(teacher, student),
        "epistemic": float(own.mean() / theirs.mean()) if theirs.any() else 0.0,
        "rows": float(len(teacher.mean)),
    }


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two lists of numbers, with mean ranks of equal ones; 0 if all are equal."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    ranks = torch.stack([torch.from_numpy(rankdata(each.numpy())) for each in (a, b)])
    centred = ranks - ranks.mean(1, keepdim=True)
    sizes = centred.square().sum(1)
    return float((centred[0] * centred[1]).sum() / sizes.prod().sqrt()) if sizes.all() else 0.0


def divergence(p: Prediction, q: Prediction) -> float:
    """Return the mean of KL(p || q) over rows and positions in nats; of real targets, between Gaussians."""
    if p.likelihood.measure == "variance":
        share, gap = p.total / q.total, (p.mean - q.mean).square() / q.total
        return float((share - 1 - share.log() + gap).mean() / 2)
    mine, theirs = over_classes(p.mean, p), over_classes(q.mean, q)
    least = torch.finfo(theirs.dtype).tiny
    return float((torch.xlogy(mine, mine) - torch.xlogy(mine, theirs.clamp(min=least))).sum(1).mean())


def _check(model: nn.Module, recipe: Recipe, samples: int, perturbed: int, weight: float) -> None:
    if isinstance(model, Student):
        raise ValueError("expected a teacher with draws, got a student; distill the model that it learned from")
    if not (is_stochastic(model) or members_of(model)):
        raise ValueError("expected a converted model or an ensemble, got a plain network, which has no draws to learn")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a recipe such as lb.Recipe(epochs=10), got {recipe!r}")
    if whole_number("samples", samples) < 2:
        raise ValueError(f"expected samples of at least 2, since the student learns how they differ, got {samples}")
    check_at_least_zero(weight=weight, perturbed=whole_number("perturbed", perturbed))


def default_recipe(rows: int, perturbed: int = PERTURBED, **fields: Any) -> Recipe:
    """Return the recipe of a student, with enough steps for the number of rows; other fields as given."""
    recipe = Recipe(optimizer="adam", lr=1e-3, weight_decay=0.0, **fields)
    steps = max(1, rows * (1 + perturbed)) / recipe.batch_size
    return replace(recipe, epochs=max(FEWEST_EPOCHS, math.ceil(FEWEST_STEPS / steps)))


def _count(data: Data) -> int:
    return batches_of(data, Placement(torch.device("cpu"), 0, 1, DEFAULT)).rows


def _all_rows(data: Data, recipe: Recipe) -> Inputs:
    batches = training_batches(data, Placement(torch.device("cpu"), 0, 1, recipe))
    rows: Inputs = _joined([x for x, _ in batches.in_order()])
    if (leading_rows(rows) or 0) < FEWEST_ROWS:
        raise ValueError(
            f"expected at least {FEWEST_ROWS} rows to learn from and to hold out, got {leading_rows(rows)}"
        )
    return rows


def _split(rows: Inputs, recipe: Recipe) -> tuple[Inputs, Inputs]:
    """Return the rows to learn from, and those that are held out for the report."""
    count = leading_rows(rows) or 0
    generator = seeded(torch.device("cpu"), recipe.seed, "student", "held out")
    order = torch.randperm(count, generator=generator, device=generator.device)
    out = math.ceil(HELD_OUT * count)
    parts = [map_rows(rows, count, itemgetter(part)) for part in (order[out:], order[:out])]
    return parts[0], parts[1]


def _pool(rows: Inputs, recipe: Recipe, perturbed: int) -> Inputs:
    """Return the rows, augmented as the recipe says, then perturbed versions of them."""
    count = leading_rows(rows) or 0
    generator = seeded(torch.device("cpu"), recipe.seed, "student", "pool")
    real = any(x.is_floating_point() for x in tensors_in(rows))
    here = Placement(torch.device("cpu"), 0, 1, recipe)
    versions = [
        here.put(rows, torch.empty(count, device="cpu"), generator)[0] for _ in range(1 + perturbed if real else 1)
    ]
    pool: Inputs = _joined([versions[0], *(perturb(version, generator) for version in versions[1:])])
    return pool


def _joined(parts: list[Any]) -> Any:
    """Join nested inputs row by row; parts without rows come from the first."""
    rows = [leading_rows(part) or 0 for part in parts]

    def join(*leaves: Any) -> Any:
        whole = all(isinstance(x, Tensor) and x.dim() and len(x) == n for x, n in zip(leaves, rows, strict=True))
        return torch.cat(leaves) if whole else leaves[0]

    return parts[0] if len(parts) == 1 else _pytree.tree_map(join, *parts)


def _blocks(rows: Inputs) -> Iterator[Inputs]:
    count = leading_rows(rows) or 0
    for start in range(0, count, ROWS_AT_ONCE):
        yield slice_rows(rows, count, start, start + ROWS_AT_ONCE)


def _start(model: nn.Module, likelihood: Likelihood, pool: Inputs, known: Prediction, output: Output | None) -> Student:
    """Return the untrained student: of the mean network or of component 0, whichever is closer to the teacher."""
    some = slice_rows(pool, len(known.mean), 0, START_ROWS)
    here = to_device(some, device_of(model))
    networks = [] if members_of(model) else [mean(model)]
    networks += [mean(model, component=0)] if members_of(model) or components_of(model) > 1 else []
    found = [student_of(network, likelihood, slice_rows(here, START_ROWS, 0, 2), output=output) for network in networks]
    near = replace(known, **{name: getattr(known, name)[:START_ROWS] for name in Decomposition._fields})
    gaps = [divergence(near, Predictor(each, output=output)(some).to("cpu")) for each in found]
    return found[gaps.index(min(gaps))]


def _fill_bias(student: Student, known: Prediction) -> float:
    """Let the further outputs give the mean epistemic part of the teacher, and return it."""
    scale, total = float(known.epistemic.double().mean()), float(known.total.double().mean())
    if not scale > ROUNDING * total:
        raise ValueError("expected a teacher whose draws differ, got draws that are all the same; train it first")
    layer: Any = student.network.get_submodule(student.place.path)
    rest = max(total - scale, ROUNDING * total)  # none is left where draws are certain and contradict each other
    value = math.log(scale) if known.likelihood.measure == "variance" else math.log(scale / rest)
    with torch.no_grad():
        layer.bias[student.place.outputs :] = value
    return scale
