"""Convolutions as most of the networks use them: no bias, since a batch norm stands near."""

from __future__ import annotations

from torch import nn, Tensor


def conv(channels: int, outputs: int, kernel: int = 3, stride: int = 1, *, groups: int = 1) -> nn.Conv2d:
    """Make a bias-free convolution that keeps the image size up to its stride."""
    return nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def conv_norm(channels: int, outputs: int, kernel: int = 3, stride: int = 1, *, groups: int = 1) -> nn.Sequential:
    """Make a bias-free convolution followed by its batch norm."""
    return nn.Sequential(conv(channels, outputs, kernel, stride, groups=groups), nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """One step ``relu(body(x) + shortcut(x))``; the shortcut is a normalised 1x1 projection where the shape changes."""

    def __init__(self, body: nn.Module, channels: int, outputs: int, stride: int) -> None:
        """Take the body, and add a shortcut around it."""
        super().__init__()
        self.body = body
        same = stride == 1 and channels == outputs
        self.shortcut = nn.Identity() if same else conv_norm(channels, outputs, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(body(x) + shortcut(x))``."""
        output: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return output


def bottleneck(channels: int, inner: int, outputs: int, stride: int, *, groups: int = 1) -> nn.Sequential:
    """Make 1x1, 3x3 and 1x1 convolutions with norms; the 3x3 one takes the stride and works in groups."""
    return nn.Sequential(
        *conv_norm(channels, inner, 1),
        nn.ReLU(),
        *conv_norm(inner, inner, 3, stride, groups=groups),
        nn.ReLU(),
        *conv_norm(inner, outputs, 1),
    )


def init_convolutions(network: nn.Module) -> None:
    """Draw convolution weights from ``N(0, 2 / fan_out)`` (He et al., 2015), biases at zero."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
