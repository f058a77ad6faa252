"""Deep pyramidal residual networks: every block is a little wider than the last (Han et al., 2017)."""

from __future__ import annotations

from itertools import pairwise

from torch import nn, Tensor
from torch.nn.functional import pad

from leanbayes.models._checks import check_factor, check_image, check_positive
from leanbayes.models._conv import conv_norm, init_convolutions

_STEM = 16
_STAGES = 3


class PyramidBlock(nn.Module):
    """One step ``body(x) + shortcut(x)``, with a norm before each convolution and after the last, and a single ReLU.

    The shortcut has no parameters: it averages where the image shrinks, and fills the new channels with zeros.

    Args:
        channels: Number of input channels.
        width: Number of output channels, at least as many.
        stride: Factor by which the image shrinks.
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        """Build the layers."""
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            *conv_norm(channels, width, 3, stride),
            nn.ReLU(),
            *conv_norm(width, width),
        )
        # Images of an odd size round up, as the convolution does.
        self.shortcut = nn.Identity() if stride == 1 else nn.AvgPool2d(stride, ceil_mode=True)
        self.new_channels = width - channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual step."""
        widened = pad(self.shortcut(x), (0, 0, 0, 0, 0, self.new_channels))
        output: Tensor = self.body(x) + widened
        return output


class PyramidNet(nn.Module):
    """PyramidNet-depth(alpha) of basic blocks, whose widths grow in equal steps from 16 to 16 + alpha.

    With ``N = (depth - 2) / 2`` blocks in three equal stages, block ``k = 1..N`` has ``16 + alpha k / N`` channels,
    rounded. The second and the third stage halve the image.

    Args:
        depth: Number of convolutions along the longest path, plus the linear layer; ``6n + 2``.
        alpha: Number of channels that the last block has above the 16 of the first convolution.
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image.
    """

    def __init__(
        self,
        depth: int = 110,
        alpha: float = 270,
        *,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (3, 32, 32),
    ) -> None:
        """Build the layers."""
        super().__init__()
        stage_blocks, rest = divmod(depth - 2, 2 * _STAGES)
        if rest or stage_blocks < 1:
            suggestion = 2 * _STAGES * max(stage_blocks, 1) + 2
            raise ValueError(
                f"PyramidNet expected depth = 6n + 2 with n >= 1 (8, 14, 20, 26, ...), "
                f"got {depth}. Try depth={suggestion}."
            )
        check_positive("PyramidNet", num_outputs=num_outputs)
        check_factor("PyramidNet", alpha=alpha)
        channels, _, _ = check_image("PyramidNet", input_shape)
        blocks = _STAGES * stage_blocks
        widths = [round(_STEM + alpha * k / blocks) for k in range(blocks + 1)]
        self.stem = conv_norm(channels, _STEM)
        self.stages = nn.Sequential()
        for first in range(0, blocks, stage_blocks):
            self.stages.append(_stage(widths[first : first + stage_blocks + 1], stride=1 if first == 0 else 2))
        self.activate = nn.Sequential(nn.BatchNorm2d(widths[-1]), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(-3))
        self.head = nn.Linear(widths[-1], num_outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` of any size to ``(B, num_outputs)``."""
        features = self.activate(self.stages(self.stem(x)))
        output: Tensor = self.head(self.pool(features))
        return output


def _stage(widths: list[int], *, stride: int) -> nn.Sequential:
    """Make a block between each two widths, the first of which shrinks the image."""
    first, *rest = pairwise(widths)
    return nn.Sequential(PyramidBlock(*first, stride=stride), *(PyramidBlock(*pair, stride=1) for pair in rest))
