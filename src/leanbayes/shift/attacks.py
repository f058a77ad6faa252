"""Adversarial inputs: small changes along the gradient of the predictive probability that make a model err.

An attack lowers the probability of the true class, or raises that of a target. With z_s the logits of draw s,
    p(c) = (1/S) sum_s p_s(c),       m_s = z_s(c) - log sum_{k != c} exp z_s(k),       p_s(c) = sigmoid(m_s),
    grad log p(c) = sum_s p_s (1 - p_s) grad m_s / sum_s p_s;
"through a draw" has S = 1. Steps have one length, so only the direction of the gradient counts: it is computed as the
mean of grad m_s with weights p_s (1 - p_s), in logarithms, since 1 - p_s is rounded to zero where a network is sure;
draw by draw, in memory that does not grow with S. `steps` says how attacks move. The variance paper (section 6.3,
Figure 2) follows success and entropy step by step, as `Attacked.curve` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.core.conversion import own_likelihood, unwrap
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import distinct_draws, FrozenDraws, NoiseOf, predict, Predictor, RowDraws
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._checks import check_choice, check_positive
from leanbayes.runtime.batches import Output
from leanbayes.shift.corruptions._random import Streams

# -------------------- steps
# How an attack moves: steps of one length, the ball it stays in, valid inputs, and the units all three are given in.
#
# With direction(g) the change of unit length that raises g . change most,
#     linf:  direction(g) = sign(g),          l2:  direction(g) = g / |g|,
# a step is x <- x + step_size direction(g); then x is brought back into the ball around the clean inputs, if there is
# one, and into the bounds. FGSM is one step (Goodfellow et al., 2015), the iterative fast sign method several without a
# ball (the variance paper, section 6.3), PGD several with a ball and a random start in it (Madry et al., 2018).


Norm = Literal["linf", "l2"]
Start = Literal["image", "random"]
Through = Literal["expectation", "draw"]

ROUNDING = 1e-4
"""Share of the range by which clean inputs may miss the bounds: standardised pixels are rounded."""


@dataclass(frozen=True, eq=False)
class Units:
    """The units u of an attack's numbers: inputs are x = origin + scale u. By default those of the inputs.

    Attributes:
        scale: one unit, in inputs; positive, broadcast against one row.
        origin: where zero lies, in inputs; for bounds.
    """

    scale: Tensor | float = 1.0
    origin: Tensor | float = 0.0

    def change(self, amount: float | Tensor, like: Tensor) -> Tensor:
        """Return a change given in units as a change of inputs."""
        return torch.as_tensor(self.scale).to(like) * amount

    def place(self, value: float, like: Tensor) -> Tensor:
        """Return a value given in units as an input."""
        return torch.as_tensor(self.origin).to(like) + self.change(value, like)


INPUT_UNITS = Units()


def pixel_units(mean: Tensor | Sequence[float], std: Tensor | Sequence[float], *, levels: float = 255) -> Units:
    """Return the units of pixels from 0 to `levels`, for networks that see (pixels / levels - mean) / std.

    Args:
        mean: of each channel, pixels between 0 and 1; `dataset.mean`.
        std: of each channel, likewise; `dataset.std`.
        levels: 255, or 1 for pixels between 0 and 1.

    Example:
        >>> lb.shift.fast_sign(20, 0.5, units=lb.shift.pixel_units(cifar.mean, cifar.std), bounds=(0, 255))
    """
    centre, spread = (torch.as_tensor(moment).view(-1, 1, 1) for moment in (mean, std))
    return Units(scale=1 / (levels * spread), origin=-centre / spread)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack: how far its steps go, and through which draws it looks for the way.

    Attributes:
        steps: number of steps.
        step_size: length of a step, in `units`.
        epsilon: radius of the ball around the clean inputs, in `units`; None: no ball.
        norm: in which lengths are measured, "linf" or "l2" (over a row).
        start: at the clean inputs ("image"), or anywhere in the ball ("random").
        bounds: lowest and highest valid input, in `units`; None: any number.
        units: of the lengths and bounds above; default those of the network's inputs as given.
        through: the gradient of log p averaged over `samples` draws ("expectation"), or of one draw a step ("draw").
        fresh: take other draws in every step; False attacks the same ones again and again.
        samples: draws of an averaged gradient, and of the predictions by which success is judged.
        noise: what a draw is, as in `lb.predict`.
        seed: of the draws, the start and random targets; predictions are judged with the draws of `seed + 1`.
        batch_size: rows whose gradient is computed at a time.
    """

    steps: int
    step_size: float
    epsilon: float | None = None
    norm: Norm = "linf"
    start: Start = "image"
    bounds: tuple[float, float] | None = None
    units: Units = INPUT_UNITS
    through: Through = "expectation"
    fresh: bool = True
    samples: int = 10
    noise: NoiseOf = "function"
    seed: int = 0
    batch_size: int = 128

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("steps", "samples", "batch_size"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"expected {name} to be a whole number of at least 1, got {value!r}")
        check_positive(step_size=self.step_size)
        check_choice("norm", self.norm, ("linf", "l2"))
        check_choice("start", self.start, ("image", "random"))
        check_choice("through", self.through, ("expectation", "draw"))
        check_choice("noise", self.noise, ("function", "activation"))
        self._check_region()

    def indices(self, step: int, samples: int) -> range:
        """Return the numbers of the draws whose gradient step 0, 1, ... follows, out of `samples` different ones."""
        count = 1 if self.through == "draw" else samples
        first = step * count if self.fresh else 0
        return range(first, first + count)

    def begin(self, clean: Tensor) -> Tensor:
        """Return where the attack starts; row i depends on (seed, i) and itself, whatever the other rows are."""
        if self.start == "image" or self.epsilon is None:
            return clean
        streams = Streams(self.seed, "attack", range(len(clean)), clean.device)
        if self.norm == "linf":
            change = self.epsilon * streams.uniform(*clean.shape[1:], low=-1.0, high=1.0)
        else:  # uniform in the ball: the share of it within radius r grows as r to the number of dimensions
            radius = self.epsilon * streams.uniform() ** (1 / clean[0].numel())
            change = per_row(radius, clean) * direction(streams.normal(*clean.shape[1:]), self.norm)
        return self._valid(clean + self.units.change(change.to(clean), clean))

    def move(self, x: Tensor, clean: Tensor, gradient: Tensor) -> Tensor:
        """Return the inputs after one step that raises what `gradient` is the gradient of."""
        unit = self.units.change(1.0, x)
        x = x + unit * self.step_size * direction(unit * gradient, self.norm)
        if self.epsilon is not None:
            x = clean + unit * shortened((x - clean) / unit, self.epsilon, self.norm)
        return self._valid(x)

    def distance(self, x: Tensor, clean: Tensor) -> Tensor:
        """Return how far each row has moved (N,), in `norm` and `units`."""
        return length((x - clean) / self.units.change(1.0, x), self.norm)

    def check_valid(self, clean: Tensor) -> None:
        """Raise unless clean inputs lie within the bounds."""
        slack = 0.0 if self.bounds is None else ROUNDING * (self.bounds[1] - self.bounds[0])
        unit = self.units.change(1.0, clean)
        missed = ((self._valid(clean) - clean) / unit).abs().max().item()
        if missed > slack:
            raise ValueError(
                f"expected clean inputs within the bounds {self.bounds}, got some {missed:g} units outside. Give "
                "bounds in the units of the attack: units=lb.shift.pixel_units(mean, std) for standardised pixels."
            )

    def _valid(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return x
        low, high = (self.units.place(bound, x) for bound in self.bounds)
        return x.clamp(low, high)

    def _check_region(self) -> None:
        if self.epsilon is not None:
            check_positive(epsilon=self.epsilon)
        elif self.start == "random":
            raise ValueError("a random start lies within a ball: expected epsilon to be a positive number, got None")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"expected bounds (lowest, highest) with the first below the second, got {self.bounds}")


def fgsm(epsilon: float, **options: Any) -> Attack:
    """Return the fast gradient sign method: one step of length `epsilon`; options are those of `Attack`."""
    return Attack(steps=1, step_size=epsilon, **options)


def fast_sign(steps: int, step_size: float, **options: Any) -> Attack:
    """Return the iterative fast sign method: steps of a fixed length, no ball; options are those of `Attack`.

    The variance paper takes steps of 0.5, in units that it does not name, and 10 samples. Among pixels from 0 to 255 a
    step is half a grey level; among standardised ones (CIFAR-10) it is about 32 of them.
    """
    return Attack(steps=steps, step_size=step_size, **options)


def pgd(epsilon: float, steps: int = 10, step_size: float | None = None, **options: Any) -> Attack:
    """Return projected gradient descent: a random start in the ball, and steps that stay in it.

    Steps of 2.5 epsilon / steps, the default, can reach any point of the ball and turn back; options are those of
    `Attack`.
    """
    length = 2.5 * epsilon / steps if step_size is None else step_size
    return Attack(steps=steps, step_size=length, epsilon=epsilon, **{"start": "random", **options})


def direction(gradient: Tensor, norm: Norm) -> Tensor:
    """Return the change of unit length along which each row rises most; zero where the gradient is zero."""
    if norm == "linf":
        return gradient.sign()
    largest = per_row(length(gradient, "linf"), gradient)
    scaled = gradient / largest.where(largest > 0, 1.0)  # the squares of small gradients are rounded to zero
    return scaled / per_row(length(scaled, "l2"), gradient).clamp(min=1.0)


def shortened(change: Tensor, radius: float, norm: Norm) -> Tensor:
    """Return the nearest change of at most the given length, for each row."""
    if norm == "linf":
        return change.clamp(-radius, radius)
    return change * per_row(radius / length(change, "l2").clamp(min=radius), change)


def length(change: Tensor, norm: Norm) -> Tensor:
    """Return the length of each row (N,)."""
    lengths: Tensor = torch.linalg.vector_norm(change.flatten(1), 2.0 if norm == "l2" else float("inf"), dim=1)
    return lengths


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Return one number per row (N,) in a shape that goes with the rows."""
    return values.view(-1, *[1] * (like.dim() - 1))


# N rows, C classes

Target = Literal["random", "least_likely"]


class Iteration(NamedTuple):
    """What the model says after some steps, judged with draws that the attack has not seen.

    Attributes:
        step: number of steps taken; 0 is clean.
        success: share of rows now predicted as the target, or as any class but the true one; of the rows for which
            that was not so when clean (nan if there is none).
        accuracy: share of rows predicted right.
        entropy: mean entropy of the predictions, in nats.
        epistemic: mean epistemic part of it.
        distance: mean distance from the clean inputs, in the norm and units of the attack.
    """

    step: int
    success: float
    accuracy: float
    entropy: float
    epistemic: float
    distance: float


@dataclass(frozen=True, eq=False)
class Attacked:
    """What an attack made, and what it did.

    Attributes:
        inputs: the adversarial inputs after the last step (N, ...), where the clean ones were.
        target: the class each row was driven to (N,), None if it was driven away from the true one.
        prediction: what the model says of `inputs`.
        history: one entry before the first step and one after each.
    """

    inputs: Tensor = field(repr=False)
    target: Tensor | None = field(repr=False)
    prediction: Prediction = field(repr=False)
    history: tuple[Iteration, ...]

    def curve(self, name: str) -> list[float]:
        """Return one figure of `Iteration` step by step, as in Figure 2 of the variance paper."""
        return [entry._asdict()[name] for entry in self.history]


def attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    how: Attack,
    *,
    target: Tensor | Target | None = None,
    likelihood: Likelihood | None = None,
    output: Output | None = None,
) -> Attacked:
    """Attack a model through its draws, and follow its predictions step by step.

    The model is evaluated in eval mode and left as it was, with its modes, gradients and `requires_grad`.

    Args:
        model: converted, plain (its one draw is itself), or an `lb.Ensemble` of either.
        x: clean inputs of the network (N, ...), floating point.
        y: true classes (N,).
        how: the attack: `fgsm`, `fast_sign`, `pgd` or an `Attack` of your own.
        target: classes to drive the rows to (N,), "random" ones other than y, or the "least_likely" other than y;
            None: away from y.
        likelihood: how to read outputs; default the model's own, else `Categorical`.
        output: picks the tensor out of what the model returns.

    Example:
        >>> found = lb.shift.attack(bnn, x, y, lb.shift.fast_sign(20, 0.02), target="random")
        >>> found.curve("success"), found.curve("entropy")
    """
    model = unwrap(model)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    _check(x, likelihood)
    samples = min(how.samples, distinct_draws(model) or how.samples)

    def judged(inputs: Tensor) -> Prediction:
        seed = how.seed + 1  # draws that the attack does not see
        return predict(
            model, inputs, likelihood, samples=samples, seed=seed, keep_samples=False, noise=how.noise, output=output
        )

    at_first = judged(x.detach())
    clean = x.detach().to(at_first.mean.device)
    how.check_valid(clean)
    y = _classes(y, at_first, "y")
    goal = _goal(target, y, at_first, how.seed)
    scores = _Scores(how, clean, y, goal, at_first)
    ascent = _Ascent(Predictor(model, likelihood, seed=how.seed, noise=how.noise, output=output), how)
    moved, prediction, history = how.begin(clean), at_first, [scores(0, clean, at_first)]
    for step in range(how.steps):
        draws = how.indices(step, samples)
        gradient = -ascent.gradient(moved, y, draws) if goal is None else ascent.gradient(moved, goal, draws)
        moved = how.move(moved, clean, gradient)
        prediction = judged(moved)
        history.append(scores(step + 1, moved, prediction))
    driven_to = None if goal is None else goal.to(x.device)
    return Attacked(moved.to(x.device), driven_to, prediction, tuple(history))


class _Ascent:
    """Directions in which log mean_s p_s(class) rises most, over named draws."""

    def __init__(self, predictor: Predictor, how: Attack) -> None:
        self.predictor, self.how = predictor, how

    def gradient(self, x: Tensor, classes: Tensor, indices: range) -> Tensor:
        """Return the gradient, but for a positive factor per row: draws are folded once, rows go through in batches."""
        total = torch.zeros_like(x)
        log_sum = torch.full((len(x),), -math.inf, dtype=_at_least_float32(x), device=x.device)
        for index in indices:
            with torch.no_grad():
                draws = self.predictor.select(index).draws
            for start in range(0, len(x), self.how.batch_size):
                rows = slice(start, start + self.how.batch_size)
                margin, gradient = self._of_draw(draws, x[rows], classes[rows], start)
                log_factor = F.logsigmoid(margin) + F.logsigmoid(-margin)  # of p (1 - p)
                log_sum[rows] = torch.logaddexp(log_sum[rows], log_factor)
                share = per_row((log_factor - log_sum[rows]).exp(), gradient).to(gradient)
                total[rows] = total[rows].lerp(gradient, share)
        return total

    def _of_draw(self, draws: FrozenDraws | RowDraws, x: Tensor, classes: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the margin of the class in each row (n,) under the selected draw, and its gradient."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            outputs = draws.run(leaf, (start, start + len(x)), self.predictor.output)
            draws.forget_outputs()  # they belong to a graph that is used once
            logits, at = outputs.to(_at_least_float32(outputs)), classes[:, None]
            margin = logits.gather(1, at)[:, 0] - logits.scatter(1, at, -math.inf).logsumexp(1)
            (gradient,) = torch.autograd.grad(margin.sum(), leaf)
        return margin.detach(), gradient


@dataclass(frozen=True, eq=False)
class _Scores:
    """Figures of one step against the clean inputs."""

    how: Attack
    clean: Tensor
    y: Tensor
    goal: Tensor | None
    at_first: Prediction

    def __call__(self, step: int, x: Tensor, p: Prediction) -> Iteration:
        undecided = ~self._won(self.at_first)
        return Iteration(
            step=step,
            success=self._won(p)[undecided].float().mean().item(),
            accuracy=(p.mean.argmax(1) == self.y).float().mean().item(),
            entropy=p.total.mean().item(),
            epistemic=p.epistemic.mean().item(),
            distance=self.how.distance(x, self.clean).mean().item(),
        )

    def _won(self, p: Prediction) -> Tensor:
        """Say which rows are where the attack wants them."""
        found = p.mean.argmax(1)
        return found != self.y if self.goal is None else found == self.goal


def _goal(target: Tensor | Target | None, y: Tensor, clean: Prediction, seed: int) -> Tensor | None:
    """Return the class each row is driven to, None if away from y."""
    count = clean.mean.shape[1]
    if target is None:
        return None
    if isinstance(target, Tensor):
        return _classes(target, clean, "target")
    if target == "least_likely":
        return clean.mean.scatter(1, y[:, None], math.inf).argmin(1)
    if target == "random":
        shares = Streams(seed, "target", range(len(y)), y.device).uniform()
        return (y + 1 + (shares * (count - 1)).long().clamp(max=count - 2)) % count
    raise ValueError(f"expected target to be classes, 'random', 'least_likely' or None, got {target!r}")


def _classes(y: Tensor, p: Prediction, name: str) -> Tensor:
    """Return classes on the device of the prediction, one for each row."""
    rows, count = p.mean.shape[:2]
    whole = not (y.is_floating_point() or y.is_complex())
    if p.mean.dim() != 2 or y.shape != (rows,) or not whole or not bool(((y >= 0) & (y < count)).all()):
        raise ValueError(
            f"expected {name} to be one class from 0 to {count - 1} for each of {rows} rows, got {y.dtype} of shape "
            f"{tuple(y.shape)} for predictions of shape {tuple(p.mean.shape)}. Attacks need one class for each row."
        )
    return y.long().to(p.mean.device)


def _check(x: object, likelihood: Likelihood) -> None:
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2):
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"expected x to be the floating-point inputs of the network (N, ...), got {got}. Give `dataset.inputs(x)`."
        )
    if not isinstance(likelihood, Categorical):
        raise TypeError(f"expected a likelihood over classes, lb.Categorical(), got {type(likelihood).__name__}.")


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
