"""Parts that the reference networks share: chains, convolutions with norms, dropout before norms, checks of sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import nn, Tensor

Scale = Literal["cifar", "imagenet"]

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""`_NormBase` is the base of batch norms and instance norms."""

_SMALL_IMAGE = 64


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


class DropoutNorm(nn.Module):
    """A norm after a dropout: ``norm(dropout(x))``; in eval mode the norm alone.

    Other attributes (``weight``, ``eps``, ...) are those of the norm. A state dict of the plain network loads:
    ``PATH.weight`` is read as ``PATH.norm.weight``.
    """

    def __init__(self, norm: nn.Module, rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)
        self.norm = norm
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.dropout(x))
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            norm = self._modules.get("norm")
            if norm is None or name.startswith("_"):
                raise
            return getattr(norm, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = tuple(f"{prefix}{name}." for name in self._modules)
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(own)]:
            state_dict[f"{prefix}norm.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def dropout_before_norms(net: nn.Module, rate: float = 0.005) -> nn.Module:
    """Return a copy of a network with a dropout in front of every batch, layer, group and instance norm.

    An entry of the input of a norm is dropped with probability `rate`. ``lb.convert(copy, lb.MCDropout())`` keeps these
    dropouts active in predictions, and the network's own. In eval mode the copy equals the network. Norms of
    ``nn.TransformerEncoderLayer`` are skipped: it may read their weights without calling them.

    Example:
        >>> bnn = lb.convert(lb.models.dropout_before_norms(net), lb.MCDropout())
    """
    if not 0 < rate < 1:
        raise ValueError(f"expected a dropout rate between 0 and 1, got {rate!r}. Pass a share such as 0.005.")
    holder = nn.ModuleDict({"root": copy.deepcopy(net)})  # a norm may be the whole network
    parents = (m for m in holder.modules() if not isinstance(m, (DropoutNorm, nn.TransformerEncoderLayer)))
    places = [(m, name, child) for m in parents for name, child in m._modules.items() if isinstance(child, NORMS)]
    done: dict[int, DropoutNorm] = {}  # a shared norm stays shared
    for parent, name, norm in places:
        parent._modules[name] = done.setdefault(id(norm), DropoutNorm(norm, rate))
    if not done:
        raise ValueError(
            f"expected a network with norms that have no dropout in front of them, got {type(net).__name__} without "
            "any. Choose another network, or convert this one with lb.MCDropout(), which needs no norms."
        )
    return holder["root"]


def check_positive(network: str, **sizes: int) -> None:
    """Raise ``ValueError`` when one of the named sizes is below one."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{network} expected {name} >= 1, got {size}. Pass a positive whole number.")


def scaled(channels: int, factor: float) -> int:
    """Return a width times a factor, rounded, at least 1."""
    return max(1, round(channels * factor))


def check_factor(network: str, **factors: float) -> None:
    """Raise ``ValueError`` when one of the named factors is not above zero."""
    for name, factor in factors.items():
        if not factor > 0:
            raise ValueError(f"{network} expected {name} > 0, got {factor}. Pass a positive number.")


def check_depth(network: str, depth: int, *, per_block: int, extra: int) -> int:
    """Return n for ``depth = per_block * n + extra``; raise ``ValueError`` if there is no such n >= 1."""
    blocks, rest = divmod(depth - extra, per_block)
    if rest or blocks < 1:
        examples = ", ".join(str(per_block * n + extra) for n in range(1, 5))
        raise ValueError(
            f"{network} expected depth = {per_block}n + {extra} with n >= 1 ({examples}, ...), got {depth}. "
            f"Try depth={per_block * max(blocks, 1) + extra}."
        )
    return blocks


def check_features(network: str, inputs: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one example, given as a shape or a number of features; raise ``ValueError`` if empty."""
    shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
    check_positive(network, inputs=min(shape, default=0))
    return shape


def check_image(
    network: str, num_outputs: int, input_shape: tuple[int, ...], *, smallest: int = 1
) -> tuple[int, int, int]:
    """Return ``(channels, height, width)``; raise ``ValueError`` if the network cannot be built for such images.

    The least height and width, in pixels, that survive the pooling is `smallest`.
    """
    check_positive(network, num_outputs=num_outputs)
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(
            f"{network} expected input_shape (channels, height, width) of positive sizes, "
            f"got {input_shape}. Leave out the batch axis; grey images have one channel."
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(
            f"{network} expected images of at least {smallest} x {smallest} pixels, "
            f"got {height} x {width}. Enlarge or pad the images, or choose a shallower network."
        )
    return channels, height, width


def choose_scale(network: str, choice: str | None, input_shape: tuple[int, ...]) -> Scale:
    """Return the chosen scale; for None, ``"cifar"`` for images of at most 64 pixels, else ``"imagenet"``."""
    match choice:
        case "cifar" | "imagenet":
            return choice
        case None:
            return "cifar" if max(input_shape[1:]) <= _SMALL_IMAGE else "imagenet"
    raise ValueError(
        f"{network} expected 'cifar' or 'imagenet' (or None, to choose by image size), "
        f"got {choice!r}. Pass one of them."
    )
