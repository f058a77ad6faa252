"""Checks of sizes that the reference networks share."""

from __future__ import annotations

from typing import Literal

Scale = Literal["cifar", "imagenet"]

_SMALL_IMAGE = 64


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

    Args:
        network: Name of the network, for the error message.
        num_outputs: Number of outputs, at least 1.
        input_shape: Shape of one image, without the batch axis.
        smallest: Least height and width, in pixels, that survive the pooling.
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
