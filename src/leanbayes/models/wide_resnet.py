"""Wide residual networks with pre-activation (Zagoruyko & Komodakis, 2016)."""

from __future__ import annotations

from torch import nn, Tensor

from leanbayes.models._checks import check_factor, check_image, check_positive, scaled
from leanbayes.models._conv import conv, init_convolutions


class PreactBlock(nn.Module):
    """One pre-activation step: with ``a = relu(norm(x))``, ``body(a) + x``.

    Where the shape changes, a 1x1 convolution of ``a`` takes the place of ``x``.

    Args:
        channels: Number of input channels.
        width: Number of output channels.
        stride: Factor by which the image shrinks.
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        """Build the layers."""
        super().__init__()
        same = stride == 1 and channels == width
        self.activate = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.body = nn.Sequential(
            conv(channels, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            conv(width, width),
        )
        self.shortcut = None if same else conv(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual step."""
        activated = self.activate(x)
        skipped = x if self.shortcut is None else self.shortcut(activated)
        output: Tensor = self.body(activated) + skipped
        return output


class WideResNet(nn.Module):
    """WRN-depth-widen: three stages of ``(depth - 4) / 6`` blocks, 16, 32 and 64 times ``widen``.

    Args:
        depth: Number of convolutions along the longest path, plus the linear layer; ``6n + 4``.
        widen: Factor on the width of the three stages; the products are rounded.
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image.
    """

    def __init__(
        self,
        depth: int = 28,
        widen: float = 10,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (3, 32, 32),
    ) -> None:
        """Build the layers."""
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            suggestion = 6 * max(blocks, 1) + 4
            raise ValueError(
                f"WideResNet expected depth = 6n + 4 with n >= 1 (10, 16, 22, 28, ...), "
                f"got {depth}. Try depth={suggestion}."
            )
        check_positive("WideResNet", num_outputs=num_outputs)
        check_factor("WideResNet", widen=widen)
        image_channels, _, _ = check_image("WideResNet", input_shape)
        channels = 16
        self.stem = conv(image_channels, channels)
        self.stages = nn.Sequential()
        for width, stride in ((scaled(16, widen), 1), (scaled(32, widen), 2), (scaled(64, widen), 2)):
            stage = nn.Sequential(PreactBlock(channels, width, stride=stride))
            stage.extend(PreactBlock(width, width, stride=1) for _ in range(blocks - 1))
            self.stages.append(stage)
            channels = width
        self.activate = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(-3))
        self.head = nn.Linear(channels, num_outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` of any size to ``(B, num_outputs)``."""
        features = self.activate(self.stages(self.stem(x)))
        output: Tensor = self.head(self.pool(features))
        return output
