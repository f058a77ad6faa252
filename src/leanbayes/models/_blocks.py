"""Parts that the reference networks share: chains, convolutions with norms, stages, He's initialisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import nn, Tensor


class Chain(nn.Module):
    """Network that calls its parts in turn: images ``(B, C, H, W)`` to outputs ``(B, num_outputs)``.

    Attributes:
        parts: names of the modules, in the order of the calls.
    """

    parts: ClassVar[tuple[str, ...]] = ("features", "head")

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = getattr(self, part)(x)
        return x


class PooledChain(Chain):
    """Chain that ends with a global average and a linear layer, for images of any size."""

    parts: ClassVar[tuple[str, ...]] = ("stem", "stages", "pool", "head")

    def add_head(self, channels: int, num_outputs: int) -> None:
        """Add the global average ``pool`` and the linear layer ``head``, and initialise all convolutions."""
        self.pool = global_average()
        self.head = nn.Linear(channels, num_outputs)
        init_convolutions(self)


def conv(channels: int, outputs: int, kernel: int = 3, stride: int = 1, *, groups: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the image size up to its stride."""
    return nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def conv_norm(channels: int, outputs: int, kernel: int = 3, stride: int = 1, *, groups: int = 1) -> nn.Sequential:
    """Return a convolution without bias, followed by a batch norm."""
    return nn.Sequential(conv(channels, outputs, kernel, stride, groups=groups), nn.BatchNorm2d(outputs))


def norm_relu(channels: int) -> nn.Sequential:
    """Return a batch norm, followed by a ReLU."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


def stage(block: Callable[..., nn.Module], channels: int, outputs: int, *, depth: int, stride: int) -> nn.Sequential:
    """Return `depth` blocks. The first takes the stride and changes the number of channels."""
    return nn.Sequential(block(channels, stride=stride), *(block(outputs, stride=1) for _ in range(depth - 1)))


def global_average() -> nn.Sequential:
    """Return the average over all pixels: ``(B, C, H, W)`` to ``(B, C)``."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(-3))


def init_convolutions(network: nn.Module) -> None:
    """Draw convolution weights from ``N(0, 2 / fan_out)`` (He et al., 2015); set biases to zero."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
