"""Checks of sizes that every reference network shares, with errors that say what to do."""

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
    """Return the width of a layer that has been made wider or narrower, at least one channel."""
    return max(1, round(channels * factor))


def check_factor(network: str, **factors: float) -> None:
    """Raise ``ValueError`` when one of the named factors on widths is not above zero."""
    for name, factor in factors.items():
        if not factor > 0:
            raise ValueError(f"{network} expected {name} > 0, got {factor}. Pass a positive number.")


def check_features(network: str, inputs: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one example, given as such or as a number of features; raise ``ValueError`` if empty."""
    shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
    check_positive(network, inputs=min(shape, default=0))
    return shape


def check_image(network: str, input_shape: tuple[int, ...], *, smallest: int = 1) -> tuple[int, int, int]:
    """Return ``(channels, height, width)``, or say why the network cannot take such images.

    Args:
        network: Name of the network, for the error message.
        input_shape: Shape of one image, without the batch axis.
        smallest: Least height and width, in pixels, that survive the pooling.

    Raises:
        ValueError: The shape has not three positive sizes, or the image is too small.
    """
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
    """Return the wanted scale; without a wish, ``"cifar"`` for images of at most 64 pixels."""
    match choice:
        case "cifar" | "imagenet":
            return choice
        case None:
            return "cifar" if max(input_shape[1:]) <= _SMALL_IMAGE else "imagenet"
    raise ValueError(
        f"{network} expected 'cifar' or 'imagenet' (or None, to choose by image size), "
        f"got {choice!r}. Pass one of them."
    )
