"""How an attack moves: steps of one length, the ball it stays in, valid inputs, and the units all three are given in.

With direction(g) the change of unit length that raises g . change most,
    linf:  direction(g) = sign(g),          l2:  direction(g) = g / |g|,
a step is x <- x + step_size direction(g); then x is brought back into the ball around the clean inputs, if there is
one, and into the bounds. FGSM is one step (Goodfellow et al., 2015), the iterative fast sign method several without a
ball (the variance paper, section 6.3), PGD several with a ball and a random start in it (Madry et al., 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from leanbayes.methods.checks import check_choice, check_positive
from leanbayes.predict import Noise
from leanbayes.shift.streams import Streams

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
    noise: Noise = "function"
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
