"""Networks whose channels are hard to follow, each small, with the shape of one row of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods.nested.units import OrderingUnit
from leanbayes.models.resnet import ResidualBlock


class Joined(nn.Module):
    """A dense block: the input is concatenated with the output, and a norm sees both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.entry = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)
        self.first_norm, self.first = nn.BatchNorm2d(11), nn.Conv2d(11, 4, 3, padding=1)
        self.second_norm, self.second = nn.BatchNorm2d(15), nn.Conv2d(15, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        held = self.stem(x)  # the stream of the first layer is not ordered: a norm has ordered and other channels
        x = torch.cat([held, self.entry(F.relu(held))], 1)
        x = torch.cat([x, self.first(F.relu(self.first_norm(x)))], 1)
        return self.head(self.second(F.relu(self.second_norm(x))).mean((2, 3)))


class Doubled(nn.Module):
    """A layer that is called twice, once in front of a norm, and a stream that is joined to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.enter, self.norm, self.head = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.enter(F.relu(self.stem(x))))
        x = self.norm(self.shared(torch.tanh(self.shared(x))))
        return self.head(torch.cat([x, x.relu()], 1)).flatten(1)


class Residual(nn.Module):
    """A sum of two branches, a norm after it, and an inner stream with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.skip = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 1)
        self.inner, self.norm, self.outer = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, padding=2)
        self.last, self.head = nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.skip(x) + self.outer(F.relu(self.norm(self.inner(x))))
        return self.head(F.relu(self.last(x)).mean((2, 3)))


class Gated(nn.Module):
    """Two branches that are multiplied, a sum over both, and lanes that one of them begins."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 1)
        self.left, self.right = nn.Conv2d(6, 12, 3, padding=1), nn.Conv2d(6, 12, 3, padding=1, groups=3)
        self.grouped, self.norm = nn.Conv2d(12, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        left, right = self.left(x), self.right(x)
        x = left * right.tanh() * 0.5 + left
        return self.head(F.elu(self.norm(self.grouped(x))).view(x.size(0), -1))


def norm_twice() -> nn.Module:
    """One norm after two layers, registered under two names."""
    norm = nn.BatchNorm2d(8)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), norm, nn.ReLU(),
        nn.Conv2d(8, 8, 1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def resnet18(width: int = 8) -> nn.Module:
    """ResNet-18 as in leanbayes.models, of another width."""
    stages, channels = nn.Sequential(), width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        first = ResidualBlock(channels, outputs, stride=stride, bottleneck=False)
        stages.append(nn.Sequential(first, ResidualBlock(outputs, outputs, stride=1, bottleneck=False)))
        channels = outputs
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(stem, stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


@dataclass(frozen=True)
class Case:
    """A network and the shape of one row of its input."""

    make: Callable[[], nn.Module]
    row: tuple[int, ...]

    def inputs(self, rows: int = 3) -> Tensor:
        return torch.randn(rows, *self.row, generator=torch.Generator().manual_seed(5))


X = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(3))
"""Inputs of `residual`."""

CASES = {
    "mlp": Case(lambda: nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.BatchNorm1d(7), nn.ReLU(),
        nn.Linear(7, 3)), (4,)),
    "tokens": Case(lambda: nn.Sequential(
        nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (5, 4)),
    "pixels": Case(lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(6 * 9, 8), nn.ReLU(), nn.Linear(8, 3)), (2, 10, 10)),
    "norm_of_pixels": Case(lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.BatchNorm1d(6 * 4), nn.PReLU(6 * 4),
        nn.Linear(6 * 4, 3)), (2, 6, 6)),
    "conv1d": Case(lambda: nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 8, 3, groups=2), nn.InstanceNorm1d(8, affine=True), nn.ReLU(),
        nn.Conv1d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 3)), (2, 10)),
    "conv3d": Case(lambda: nn.Sequential(
        nn.Conv3d(1, 3, 2), nn.ReLU(), nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(4, 3)), (1, 4, 4, 4)),
    "transposed": Case(lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 8, 2, groups=2), nn.LeakyReLU(), nn.ConvTranspose2d(8, 8, 2, groups=8), nn.ReLU(),
        nn.Conv2d(8, 3, 1)), (2, 5, 5)),
    "depthwise": Case(lambda: nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 10, 1), nn.Conv2d(10, 10, 3, groups=10), nn.ReLU(),
        nn.Conv2d(10, 6, 1), nn.ReLU(), nn.Conv2d(6, 12, 3, groups=6), nn.ReLU(), nn.Conv2d(12, 3, 1)), (2, 6, 6)),
    "slopes": Case(lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.PReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 6, 1),
        nn.PReLU(6), nn.Conv2d(6, 3, 1)), (2, 6, 6)),
    "joined": Case(Joined, (2, 4, 4)),
    "residual": Case(Residual, (2, 6, 6)),
    "doubled": Case(Doubled, (2, 4, 4)),
    "gated": Case(Gated, (2, 4, 4)),
    "norm_twice": Case(norm_twice, (2, 4, 4)),
}  # fmt: skip


def unsettle(model: nn.Module) -> nn.Module:
    """Give keep probabilities, norms, slopes and biases values that hide no mistake; then eval mode."""
    generator = torch.Generator().manual_seed(11)

    def uniform(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("keep_logits"):
                uniform(tensor, -1.0, 3.0)
            elif name.endswith("log_alpha"):
                uniform(tensor, -4.0, 0.0)
            elif tensor.dim() == 1 and tensor.is_floating_point():  # of norms, slopes and biases
                uniform(tensor, 0.3, 1.5)
    return model.eval()


def residual(**fields) -> nn.Module:
    """Convert the residual network: two ordered streams, one of them with a sum."""
    torch.manual_seed(0)
    return lb.convert(Residual(), lb.NestedDropout(**({"groups": 4} | fields)))


def units_of(model: nn.Module) -> list[OrderingUnit]:
    return [module for module in model.modules() if isinstance(module, OrderingUnit)]


def set_keep_logits(model: nn.Module, low: float = -1.5, high: float = 2.5) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for unit in units_of(model):
            unit.keep_logits.copy_(torch.rand(unit.keep_logits.shape, generator=generator) * (high - low) + low)


def converted(name: str, **fields) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    method = lb.NestedDropout(**({"groups": 3} | fields))
    return unsettle(lb.convert(CASES[name].make(), method)), CASES[name].inputs()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def masked(model: nn.Module, x: Tensor, width: float | int) -> Tensor:
    with torch.no_grad(), lb.draws(model, mean=True, width=width):
        return model(x)
