"""Adversarial attacks: FGSM, iterative fast sign and PGD, through the draws of a stochastic network.

An attack lowers the probability of the true class, or raises that of a target. With z_s the logits of draw s,
    p(c) = (1/S) sum_s p_s(c),       m_s = z_s(c) - log sum_{k != c} exp z_s(k),       p_s(c) = sigmoid(m_s),
    grad log p(c) = sum_s p_s (1 - p_s) grad m_s / sum_s p_s.
Steps have a fixed length, so only the direction counts: the mean of grad m_s with weights p_s (1 - p_s). Weights are
computed in logarithms, since 1 - p_s rounds to zero for confident networks, and draw by draw, to save memory.

With direction(g) the change of unit length that raises g . change most,
    linf:  direction(g) = sign(g),          l2:  direction(g) = g / |g|,
a step is x <- x + step_size direction(g), followed by a projection into the ball around the clean inputs and into the
bounds. FGSM is one step (Goodfellow et al., 2015); the iterative fast sign method has several and no ball (the variance
paper, section 6.3); PGD has several, a ball and a random start (Madry et al., 2018).
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
from leanbayes.core.frozen import FrozenDraws, RowDraws
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import distinct_draws, NoiseOf, predict, Predictor
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._checks import check_choice, check_positive
from leanbayes.metrics._validate import check_whole, finite
from leanbayes.runtime.batches import Output
from leanbayes.shift._pixels import Streams

# N rows, C classes

Norm = Literal["linf", "l2"]
Start = Literal["image", "random"]
Through = Literal["expectation", "draw"]
Target = Literal["random", "least_likely"]

ROUNDING = 1e-4
"""Share of the range by which clean inputs may miss the bounds: standardised pixels are rounded."""


@dataclass(frozen=True, eq=False)
class Units:
    """The units u of an attack's numbers: inputs are x = origin + scale u. Default: those of the inputs.

    Attributes:
        scale: one unit, in inputs; positive, broadcast against one row.
        origin: the input at u = 0; for bounds.
    """

    scale: Tensor | float = 1.0
    origin: Tensor | float = 0.0

    def change(self, amount: float | Tensor, like: Tensor) -> Tensor:
        """Return a change in units as a change of inputs."""
        return torch.as_tensor(self.scale, dtype=like.dtype, device=like.device) * amount

    def place(self, value: float, like: Tensor) -> Tensor:
        """Return a value in units as an input."""
        return torch.as_tensor(self.origin, dtype=like.dtype, device=like.device) + self.change(value, like)


INPUT_UNITS = Units()


def pixel_units(mean: Tensor | Sequence[float], std: Tensor | Sequence[float], *, levels: float = 255) -> Units:
    """Return the units of pixels from 0 to `levels`, for networks with inputs (pixels / levels - mean) / std.

    The moments are those of each channel for pixels between 0 and 1: `dataset.mean`, `dataset.std`.

    Example:
        >>> lb.shift.fast_sign(20, 0.5, units=lb.shift.pixel_units(cifar.mean, cifar.std), bounds=(0, 255))
    """
    centre, width = (torch.as_tensor(moment, device="cpu").view(-1, 1, 1) for moment in (mean, std))
    return Units(scale=1 / (levels * width), origin=-centre / width)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Step lengths of an attack, its region, and the draws that its gradient uses.

    Attributes:
        steps: number of steps.
        step_size: length of a step, in `units`.
        epsilon: radius of the ball around the clean inputs, in `units`; None: no ball.
        norm: of all lengths, "linf" or "l2" (over a row).
        start: the clean inputs ("image"), or a "random" point of the ball.
        bounds: lowest and highest valid input, in `units`; None: any number.
        units: of the lengths and bounds above; default those of the network's inputs.
        through: the gradient of log p averaged over `samples` draws ("expectation"), or of one draw a step ("draw").
        fresh: use new draws in every step; False uses the same ones.
        samples: draws of an averaged gradient, and of the predictions that measure success.
        noise: as in `lb.predict`.
        seed: of the draws, the start and random targets; success is measured with the draws of `seed + 1`.
        batch_size: rows in one gradient computation.
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
        for name in ("steps", "samples", "batch_size"):
            check_whole(getattr(self, name), name)
        check_positive(step_size=self.step_size)
        check_choice("norm", self.norm, ("linf", "l2"))
        check_choice("start", self.start, ("image", "random"))
        check_choice("through", self.through, ("expectation", "draw"))
        check_choice("noise", self.noise, ("function", "activation"))
        if self.epsilon is not None:
            check_positive(epsilon=self.epsilon)
        elif self.start == "random":
            raise ValueError("a random start needs a ball: expected epsilon to be a positive number, got None")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"expected bounds (lowest, highest) with the first below the second, got {self.bounds}")

    def indices(self, step: int, samples: int) -> range:
        """Return the draws in the gradient of step 0, 1, ..., out of `samples` different ones."""
        count = 1 if self.through == "draw" else samples
        first = step * count if self.fresh else 0
        return range(first, first + count)

    def begin(self, clean: Tensor) -> Tensor:
        """Return the start; row i depends on (seed, i) and itself, not on other rows."""
        if self.start == "image" or self.epsilon is None:
            return clean
        streams = Streams(self.seed, "attack", range(len(clean)), clean.device)
        if self.norm == "linf":
            change = self.epsilon * streams.uniform(*clean.shape[1:], low=-1.0, high=1.0)
        else:  # uniform in the ball: the share within radius r is r to the number of dimensions
            radius = self.epsilon * streams.uniform() ** (1 / clean[0].numel())
            change = per_row(radius, clean) * direction(streams.normal(*clean.shape[1:]), self.norm)
        return self._valid(clean + self.units.change(change.to(clean), clean))

    def move(self, x: Tensor, clean: Tensor, gradient: Tensor) -> Tensor:
        """Return the inputs after one step along `gradient`."""
        unit = self.units.change(1.0, x)
        x = x + unit * self.step_size * direction(unit * gradient, self.norm)
        if self.epsilon is not None:
            x = clean + unit * shortened((x - clean) / unit, self.epsilon, self.norm)
        return self._valid(x)

    def distance(self, x: Tensor, clean: Tensor) -> Tensor:
        """Return the distance of each row from the clean one (N,), in `norm` and `units`."""
        return length((x - clean) / self.units.change(1.0, x), self.norm)

    def check_valid(self, clean: Tensor) -> None:
        """Raise unless clean inputs are within the bounds."""
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


def fgsm(epsilon: float, **options: Any) -> Attack:
    """Return the fast gradient sign method: one step of length `epsilon`; options are those of `Attack`."""
    return Attack(steps=1, step_size=epsilon, **options)


def fast_sign(steps: int, step_size: float, **options: Any) -> Attack:
    """Return the iterative fast sign method: steps of a fixed length, no ball; options are those of `Attack`.

    The variance paper has steps of 0.5 without naming the unit, and 10 samples. For pixels from 0 to 255 a step is
    half a grey level; for standardised ones (CIFAR-10) it is about 32 levels.
    """
    return Attack(steps=steps, step_size=step_size, **options)


def pgd(epsilon: float, steps: int = 10, step_size: float | None = None, **options: Any) -> Attack:
    """Return projected gradient descent: a random start in the ball, and steps that stay in it.

    Steps of 2.5 epsilon / steps, the default, can reach any point of the ball. Options are those of `Attack`.
    """
    check_whole(steps, "steps")
    length = 2.5 * epsilon / steps if step_size is None else step_size
    return Attack(steps=steps, step_size=length, epsilon=epsilon, **{"start": "random", **options})


def direction(gradient: Tensor, norm: Norm) -> Tensor:
    """Return the change of unit length along which each row rises most; zero for a zero gradient."""
    if norm == "linf":
        return gradient.sign()
    largest = per_row(length(gradient, "linf"), gradient)
    scaled = gradient / largest.where(largest > 0, 1.0)  # squares of small gradients round to zero
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
    """Return one number per row (N,) in a shape that broadcasts over the rows."""
    return values.view(-1, *[1] * (like.dim() - 1))


class Iteration(NamedTuple):
    """The model's predictions after some steps, with draws that the attack has not used.

    Attributes:
        step: number of steps taken; 0 is clean.
        success: share of rows predicted as the target, or as any class except the true one. Only rows count for which
            this was not so when clean; nan if there are none.
        accuracy: share of rows with the correct class.
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
    """Adversarial inputs, and the course of the attack.

    Attributes:
        inputs: adversarial inputs after the last step (N, ...), on the device of the clean ones.
        target: the target class of each row (N,); None if any wrong class is a success.
        prediction: the model's prediction for `inputs`.
        history: one entry before the first step and one after each.
    """

    inputs: Tensor = field(repr=False)
    target: Tensor | None = field(repr=False)
    prediction: Prediction = field(repr=False)
    history: tuple[Iteration, ...]

    def curve(self, name: str) -> list[float]:
        """Return one field of `Iteration` step by step, as in Figure 2 of the variance paper."""
        return [entry._asdict()[name] for entry in self.history]


def attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    *,
    target: Tensor | Target | None = None,
    likelihood: Likelihood | None = None,
    output: Output | None = None,
) -> Attacked:
    """Attack a model through its draws, and record its predictions step by step.

    The model runs in eval mode; its modes, gradients and `requires_grad` do not change.

    Args:
        model: converted, plain (its one draw is itself), or an `lb.Ensemble` of either.
        x: clean inputs of the network (N, ...), floating point.
        y: true classes (N,).
        attack: `fgsm`, `fast_sign`, `pgd` or an `Attack` of your own.
        target: target classes (N,), "random" ones other than y, or the "least_likely" other than y; None: any class
            other than y.
        likelihood: default the model's own, else `Categorical`.
        output: picks the tensor out of the model's output.

    Example:
        >>> found = lb.shift.attack(bnn, x, y, lb.shift.fast_sign(20, 0.02), target="random")
        >>> found.curve("success"), found.curve("entropy")
    """
    model = unwrap(model)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    _check(x, likelihood)
    samples = min(attack.samples, distinct_draws(model) or attack.samples)

    def predicted(inputs: Tensor) -> Prediction:
        seed = attack.seed + 1  # draws that the attack does not use
        p = predict(
            model, inputs, likelihood, samples=samples, seed=seed, keep_samples=False, noise=attack.noise, output=output
        )
        finite(p.mean, "predictions")  # NaN would count as the first class
        return p

    at_first = predicted(x.detach())
    clean = x.detach().to(at_first.mean.device)
    attack.check_valid(clean)
    y = _classes(y, at_first, "y")
    goal = _goal(target, y, at_first, attack.seed)

    def won(p: Prediction) -> Tensor:
        return p.mean.argmax(1) != y if goal is None else p.mean.argmax(1) == goal

    def scored(step: int, inputs: Tensor, p: Prediction) -> Iteration:
        return Iteration(
            step=step,
            success=won(p)[~won(at_first)].float().mean().item(),
            accuracy=(p.mean.argmax(1) == y).float().mean().item(),
            entropy=p.total.mean().item(),
            epistemic=p.epistemic.mean().item(),
            distance=attack.distance(inputs, clean).mean().item(),
        )

    predictor = Predictor(model, likelihood, seed=attack.seed, noise=attack.noise, output=output)
    sign, classes = (-1, y) if goal is None else (1, goal)
    moved, prediction, history = attack.begin(clean), at_first, [scored(0, clean, at_first)]
    for step in range(attack.steps):
        gradient = _gradient(predictor, moved, classes, attack.indices(step, samples), attack.batch_size)
        moved = attack.move(moved, clean, sign * gradient)
        prediction = predicted(moved)
        history.append(scored(step + 1, moved, prediction))
    return Attacked(moved.to(x.device), None if goal is None else goal.to(x.device), prediction, tuple(history))


def _gradient(predictor: Predictor, x: Tensor, classes: Tensor, indices: range, batch_size: int) -> Tensor:
    """Return the gradient of log mean_s p_s(class) over named draws, up to a positive factor per row.

    Each draw is folded once, rows come in batches.
    """
    total = torch.zeros_like(x)
    log_sum = torch.full((len(x),), -math.inf, dtype=_at_least_float32(x), device=x.device)
    for index in indices:
        with torch.no_grad():
            draws = predictor.select(index).draws
        for start in range(0, len(x), batch_size):
            rows = slice(start, min(start + batch_size, len(x)))
            margin, gradient = _margin(predictor, draws, x[rows], classes[rows], (rows.start, rows.stop))
            log_factor = F.logsigmoid(margin) + F.logsigmoid(-margin)  # log p (1 - p)
            log_sum[rows] = torch.logaddexp(log_sum[rows], log_factor)
            share = per_row((log_factor - log_sum[rows]).exp(), gradient).to(gradient)
            total[rows] = total[rows].lerp(gradient, share)
    return total


def _margin(
    predictor: Predictor, draws: FrozenDraws | RowDraws, x: Tensor, classes: Tensor, rows: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the margin m_s of the class in each row (n,), and its gradient."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        outputs = draws.run(leaf, rows, predictor.output)
        draws.forget_outputs()  # cached outputs belong to a graph that is used once
        logits, at = outputs.to(_at_least_float32(outputs)), classes[:, None]
        margin = logits.gather(1, at)[:, 0] - logits.scatter(1, at, -math.inf).logsumexp(1)
        (gradient,) = torch.autograd.grad(margin.sum(), leaf)
    return margin.detach(), gradient


def _goal(target: Tensor | Target | None, y: Tensor, clean: Prediction, seed: int) -> Tensor | None:
    """Return the target class of each row; None if any class other than y is a success."""
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
