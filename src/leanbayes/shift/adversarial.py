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
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.convert import own_likelihood, unwrap
from leanbayes.inputs import Output
from leanbayes.likelihoods import Categorical, Likelihood
from leanbayes.predict import distinct_draws, predict, Source, source_of
from leanbayes.prediction import Prediction
from leanbayes.shift.steps import Attack, per_row
from leanbayes.shift.streams import Streams

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
    with torch.no_grad():
        source = source_of(model, how.noise)
    ascent = _Ascent(source, how, output)
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

    def __init__(self, source: Source, how: Attack, output: Output | None) -> None:
        self.source, self.how, self.output = source, how, output

    def gradient(self, x: Tensor, classes: Tensor, indices: range) -> Tensor:
        """Return the gradient, but for a positive factor per row: draws are folded once, rows go through in batches."""
        total = torch.zeros_like(x)
        log_sum = torch.full((len(x),), -math.inf, dtype=_at_least_float32(x), device=x.device)
        for index in indices:
            with torch.no_grad():
                self.source.select(self.how.seed, index, None, None)
            for start in range(0, len(x), self.how.batch_size):
                rows = slice(start, start + self.how.batch_size)
                margin, gradient = self._of_draw(x[rows], classes[rows], start)
                log_factor = F.logsigmoid(margin) + F.logsigmoid(-margin)  # of p (1 - p)
                log_sum[rows] = torch.logaddexp(log_sum[rows], log_factor)
                share = per_row((log_factor - log_sum[rows]).exp(), gradient).to(gradient)
                total[rows] = total[rows].lerp(gradient, share)
        return total

    def _of_draw(self, x: Tensor, classes: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the margin of the class in each row (n,) under the selected draw, and its gradient."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            outputs = self.source.run(leaf, (start, start + len(x)), self.output)
            self.source.forget()  # what was kept belongs to a graph that is used once
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
