"""Many small regression networks as one: the networks of ensemble model patching for all splits of a data set.

Networks that share nothing are stacked on an axis of their own, so that one batched product does for all of them what
`leanbayes.models.RegressionNet` does for one. Activations are (S, T, F, B): draws, networks, features, rows. In
training there is one draw (S = 1), at test the draws of a chunk stand beside each other. Features come before rows
because then all features of all networks are the channels of a single batch norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn, Tensor

MOMENTUM, EPS = 0.1, 1e-5
"""Those of `nn.BatchNorm1d`."""

Noise = tuple[Tensor, Tensor]
"""What was drawn for the two places of a network; the first axis counts draws, or steps of a training."""


class Place(nn.Module, ABC):
    """What stands in front of a linear layer: a norm with copies, a mask, or nothing."""

    @abstractmethod
    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        """Draw for so many draws or steps, and so many rows where rows have noise of their own; one is for all rows."""

    @abstractmethod
    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Map (S, T, F, B) to the same shape; one draw of `x` or of `noise` serves for all of the other."""


class Nothing(Place):
    """The places of the networks of an explicit ensemble."""

    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        """Draw nothing."""
        return torch.empty(count, 0, device=generator.device)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return `x`."""
        return x


class Mask(Place):
    """Dropout: every feature is kept with probability 1 - rate, and is then divided by it."""

    def __init__(self, nets: int, features: int, *, rate: float) -> None:
        """Note the sizes."""
        super().__init__()
        self.nets, self.features, self.rate = nets, features, rate

    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        """Draw masks (count, T, F, rows) of zeros and 1 / (1 - rate)."""
        chances = torch.rand(count, self.nets, self.features, rows, generator=generator, device=generator.device)
        return (chances >= self.rate).to(chances.dtype).div_(1 - self.rate)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Multiply."""
        return x * noise


class PatchedNorm(Place):
    """A batch norm with K copies of its scale and shift, and one pair of running statistics for all of them.

    The draw z chooses the copies: one for a whole norm, scale and shift together (EMP), or one for every element of
    scale and of shift (ECMP, `crossed`). With the chosen ones, y = scale (x - mean) / sqrt(variance + eps) + shift,
    where mean and variance are those of the rows in training, the running ones otherwise.

    Copies start at scale (1 + spread n) and scale spread n, n standard normal.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, shape: tuple[int, int, int], *, crossed: bool, scale: float, spread: float) -> None:
        """Make the copies (K, 2, T, F), scales before shifts, from torch's global generator; `shape` is (K, T, F)."""
        super().__init__()
        copies, nets, features = shape
        start = scale * spread * torch.randn(copies, 2, nets, features)
        start[:, 0] += scale
        self.copies = nn.Parameter(start)
        self.crossed = crossed
        self.register_buffer("running_mean", torch.zeros(nets, features))
        self.register_buffer("running_var", torch.ones(nets, features))

    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        """Choose a copy for every element, (count, 2, T, F), the same for all rows."""
        copies, _, nets, features = self.copies.shape
        drawn = (count, 2, nets, features) if self.crossed else (count, 1, nets, 1)
        choice = torch.randint(copies, drawn, generator=generator, device=generator.device)
        return choice.expand(count, 2, nets, features)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Normalise with the chosen copies."""
        scale, shift = self.copies.gather(0, noise).unbind(1)
        if self.training:
            return self._of_the_rows(x, scale, shift)
        mean, std = self.running_mean.unsqueeze(-1), (self.running_var + EPS).sqrt().unsqueeze(-1)
        return (x - mean) / std * scale.unsqueeze(-1) + shift.unsqueeze(-1)

    def _of_the_rows(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Normalise one draw by the statistics of its rows, and move the running ones."""
        channels = x.view(1, -1, x.shape[-1])
        mean, var = self.running_mean.view(-1), self.running_var.view(-1)
        normed = F.batch_norm(channels, mean, var, scale.view(-1), shift.view(-1), True, MOMENTUM, EPS)
        return normed.view_as(x)


class BatchedRegression(nn.Module):
    """T networks place, linear, ReLU, place, linear; weights start as torch's linear layers do.

    Args:
        first: what stands in front of the first linear layer, for `inputs` features.
        second: what stands in front of the second, for `hidden` features.
        nets: the number of networks T.
        inputs: number of features.
        hidden: number of hidden units.
    """

    def __init__(self, first: Place, second: Place, *, nets: int, inputs: int, hidden: int) -> None:
        """Build the layers from torch's global generator."""
        super().__init__()
        self.first, self.second = first, second
        self.hidden_weight, self.hidden_bias = _linear(nets, inputs, hidden)
        self.output_weight, self.output_bias = _linear(nets, hidden, 1)

    def noise(self, count: int, rows: int, generator: torch.Generator) -> Noise:
        """Draw what a pass needs, for so many draws or steps."""
        return self.first.noise(count, rows, generator), self.second.noise(count, rows, generator)

    def forward(self, x: Tensor, noise: Noise) -> Tensor:
        """Map inputs (1, T, d, B) to outputs (S, T, 1, B)."""
        x = self.first(x, noise[0])
        x = torch.relu(self.hidden_weight @ x + self.hidden_bias)
        x = self.second(x, noise[1])
        return self.output_weight @ x + self.output_bias


def _linear(nets: int, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return weights (1, T, out, in) and biases (1, T, out, 1), both uniform within 1 / sqrt(in) of zero.

    The axis of draws is there so that nothing has to be expanded, and its gradient summed, in training.
    """
    edge = inputs**-0.5
    weight = torch.empty(1, nets, outputs, inputs).uniform_(-edge, edge)
    bias = torch.empty(1, nets, outputs, 1).uniform_(-edge, edge)
    return nn.Parameter(weight), nn.Parameter(bias)
