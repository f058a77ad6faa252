"""Networks put together at random: whatever is ordered in them is cut exactly, and every draw can be frozen."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb

from .networks import masked, parameters, units_of, unsettle

FUNCTIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,  # holds what it reads, as the next does
    "shift": lambda x: x + 1,
    "sum": torch.add,
    "product": lambda x, y: x * y * 0.1,
    "join": lambda x, y: torch.cat([x, y], 1),
}


class Random(nn.Module):
    """A program over images of 3 x 3 pixels: each step reads one or two of the values before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.layers, self.program, self.sizes = nn.ModuleList(), [], [3]
        for _ in range(self.random.randint(4, 14)):
            step = self.random.choice(
                [self.convolve, self.convolve, self.per_channel, self.apply, self.combine, self.repeat]
            )
            step(self.random.randrange(len(self.sizes)))
        self.flat = self.random.random() < 0.5
        self.head = nn.Linear(self.sizes[-1] * (9 if self.flat else 1), 3)

    def add(self, layer: nn.Module, value: int, size: int) -> None:
        self.layers.append(layer)
        self.program.append((len(self.layers) - 1, [value]))
        self.sizes.append(size)

    def convolve(self, value: int) -> None:
        inputs, outputs = self.sizes[value], self.random.choice([4, 6, 8, 12])
        groups = self.random.choice([k for k in (1, 1, 2, 3, 4) if inputs % k == outputs % k == 0])
        layer = nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=self.random.random() < 0.7)
        self.add(self.random.choice([layer, nn.ConvTranspose2d(inputs, outputs, 1, groups=groups)]), value, outputs)

    def per_channel(self, value: int) -> None:
        n = self.sizes[value]
        layers = [nn.BatchNorm2d(n), nn.InstanceNorm2d(n, affine=True), nn.PReLU(), nn.PReLU(n)]
        self.add(self.random.choice([*layers, nn.Conv2d(n, n, 3, padding=1, groups=n)]), value, n)

    def apply(self, value: int) -> None:
        self.program.append((self.random.choice(["relu", "relu", "tanh", "sigmoid", "shift"]), [value]))
        self.sizes.append(self.sizes[value])

    def combine(self, value: int) -> None:
        kind, n = self.random.choice(["sum", "product", "join"]), self.sizes[value]
        others = [k for k, size in enumerate(self.sizes) if size == n or kind == "join"]
        other = self.random.choice(others)
        self.program.append((kind, [value, other]))
        self.sizes.append(n + self.sizes[other] if kind == "join" else n)

    def repeat(self, value: int) -> None:
        """Call a layer once more, on a value that has as many channels as the one it was made for."""
        for index, (what, (first, *_)) in enumerate(self.program):
            if isinstance(what, int) and self.sizes[first] == self.sizes[value]:
                self.program.append((what, [value]))
                self.sizes.append(self.sizes[index + 1])
                return

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for what, read in self.program:
            function = self.layers[what] if isinstance(what, int) else FUNCTIONS[what]
            values.append(function(*(values[index] for index in read)))
        return self.head(values[-1].flatten(1) if self.flat else values[-1].mean((2, 3)))


@pytest.mark.parametrize("seed", range(40))
def test_random_networks_are_cut_exactly(seed):
    torch.manual_seed(seed)
    method = lb.NestedDropout(min_cut=0, groups=2 + seed % 4, first=seed % 2 == 0, hard=seed % 5 > 0)
    bnn = unsettle(lb.convert(Random(seed), method))
    x = torch.randn(2, 3, 3, 3)
    with torch.no_grad(), lb.draws(bnn, seed=1):
        torch.testing.assert_close(lb.draw(bnn, seed=1)(x), bnn(x), atol=1e-4, rtol=1e-4)
    if not units_of(bnn):  # every stream is held
        return
    sizes = []
    for width in (0.2, 0.5, 1.0):
        small = lb.slim.extract(bnn, width)
        torch.testing.assert_close(small(x), masked(bnn, x, width), atol=1e-4, rtol=1e-4)
        sizes.append(parameters(small))
    assert sizes == sorted(sizes)
    assert sizes[-1] == parameters(lb.mean(bnn))
