"""Convolutions as most of the networks use them: no bias, since a batch norm stands near."""

from __future__ import annotations

from torch import nn


def conv(channels: int, outputs: int, kernel: int = 3, stride: int = 1, *, groups: int = 1) -> nn.Conv2d:
    """Make a bias-free convolution that keeps the image size up to its stride."""
    return nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def conv_norm(channels: int, outputs: int, kernel: int = 3, stride: int = 1, *, groups: int = 1) -> nn.Sequential:
    """Make a bias-free convolution followed by its batch norm."""
    return nn.Sequential(conv(channels, outputs, kernel, stride, groups=groups), nn.BatchNorm2d(outputs))


def init_convolutions(network: nn.Module) -> None:
    """Draw convolution weights from ``N(0, 2 / fan_out)`` (He et al., 2015), biases at zero."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
