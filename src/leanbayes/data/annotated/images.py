"""`AnnotatedImages`: images, each with masks by several people. `OneAnnotator`: pairs for training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanbayes.data.dataset import moments, normalised

# N images, C channels, H height, W width, A largest number of annotators

Item = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class AnnotatedImages(Dataset[Item]):
    """Images and the masks of their annotators.

    The rows of a split are contiguous, in the order of `splits`; ``split("train")`` is a view of its rows. The inputs
    of a network are ``inputs(x) = (x - mean) / std`` with the moments of each channel of the training images (pixels
    in [0, 1]), in every split. A constant channel is only centred. As a torch `Dataset` it yields (input, annotations,
    annotators) of each image.

    Attributes:
        name: name of the set.
        images: raw, (N, C, H, W), uint8 or float32 in [0, 1].
        annotations: class of each pixel, (N, A, H, W) uint8 or bool; the masks of image i are
            ``annotations[i, :annotators[i]]``, the rest is zero.
        annotators: number of annotators of each image, (N,) int64.
        classes: names of the classes.
        splits: number of images of each split, in the order of the rows.
        sha256: digest of the files; empty if there are none.
        whole: the whole set, if this is a split.
    """

    name: str
    images: Tensor = field(repr=False)
    annotations: Tensor = field(repr=False)
    annotators: Tensor = field(repr=False)
    classes: tuple[str, ...]
    splits: Mapping[str, int]
    sha256: str = ""
    whole: Self | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.whole is None:
            _check_images(self)
            _check_annotations(self)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return self.inputs(self.images[index][None])[0], self.annotations[index], self.annotators[index]

    def split(self, name: str) -> Self:
        """Return the rows of a split, as a view; they keep the moments of the training images."""
        rows = self._rows(name)
        # Every tensor field, also of a subclass, has a row for each image.
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        parts: dict[str, Any] = {key: value[rows] for key, value in values.items() if isinstance(value, Tensor)}
        return replace(self, splits={name: self.splits[name]}, whole=self.whole or self, **parts)

    @property
    def mean(self) -> Tensor:
        """Return the mean of every channel of the training images in [0, 1], (C,)."""
        return (self.whole or self)._moments[0]

    @property
    def std(self) -> Tensor:
        """Return the standard deviation of every channel of the training images, 1 if it is constant."""
        return (self.whole or self)._moments[1]

    def inputs(self, x: Tensor) -> Tensor:
        """Return normalised float32 network inputs of raw images (B, C, H, W), on the device of `x`."""
        if x.dim() != 4 or x.shape[1] != self.images.shape[1]:
            raise ValueError(
                f"{self.name} expected images (rows, {self.images.shape[1]}, height, width), got shape "
                f"{tuple(x.shape)}. Give as many channels."
            )
        return normalised(x, self.mean, self.std)

    def prepared(self) -> Tensor:
        """Return the network inputs of all images, (N, C, H, W) float32."""
        return self.inputs(self.images)

    def draw_targets(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one annotator for each image, uniformly, and return their masks, (N, H, W) int64."""
        chosen = draw_annotators(self.annotators, generator)
        return self.annotations[torch.arange(len(self), device=chosen.device), chosen].long()

    def _rows(self, name: str) -> slice:
        if name not in self.splits:
            raise ValueError(f"{self.name} has the splits {', '.join(self.splits)}, got {name!r}. Pick one of them.")
        before = takewhile(lambda known: known != name, self.splits)
        start = sum(self.splits[known] for known in before)
        return slice(start, start + self.splits[name])

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and std of the training images, of all images if no split is called "train"."""
        return moments(self.images[self._rows("train")] if "train" in self.splits else self.images)


def draw_annotators(annotators: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw a number from 0 to n - 1 for each count n, (N,) int64."""
    uniform = torch.rand(len(annotators), dtype=torch.float64, generator=generator, device=annotators.device)
    return (uniform * annotators).long().minimum(annotators - 1)  # rounding may reach n


def _check_images(data: AnnotatedImages) -> None:
    images, sizes = data.images, data.splits.values()
    if images.dim() != 4 or 0 in images.shape:
        raise ValueError(
            f"{data.name}: images have shape {tuple(images.shape)}; expected (rows, channels, height, width), none of "
            "them zero. Reshape them."
        )
    if images.dtype not in (torch.uint8, torch.float32):
        raise ValueError(
            f"{data.name}: images are {images.dtype}; expected uint8, or float32 from 0 to 1. Convert them."
        )
    if images.dtype == torch.float32 and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"{data.name}: images have pixels from {images.min():g} to {images.max():g}; expected uint8, or float32 "
            "from 0 to 1. Divide them by their largest value."
        )
    if sum(sizes) != len(images) or min(sizes, default=0) < 1:
        raise ValueError(
            f"{data.name}: splits {dict(data.splits)} for {len(images)} images; expected positive sizes that add up to "
            "that number. Correct them."
        )


def _check_annotations(data: AnnotatedImages) -> None:
    images, masks, counts = data.images, data.annotations, data.annotators
    wanted = (len(images), *images.shape[2:])
    if masks.dim() != 4 or (len(masks), *masks.shape[2:]) != wanted or masks.shape[1] < 1:
        raise ValueError(
            f"{data.name}: annotations have shape {tuple(masks.shape)}; expected (rows, annotators, height, width) of "
            f"images with shape {tuple(images.shape)}. Pad missing annotators with zeros."
        )
    if masks.dtype not in (torch.uint8, torch.bool):
        raise ValueError(f"{data.name}: annotations are {masks.dtype}; expected uint8 or bool. Convert them.")
    if int(masks.max()) >= len(data.classes):
        raise ValueError(
            f"{data.name}: annotations have the class {int(masks.max())}; expected numbers below {len(data.classes)}, "
            f"as there are names ({', '.join(data.classes)}). Name every class."
        )
    if counts.shape != (len(images),) or counts.dtype != torch.int64:
        raise ValueError(
            f"{data.name}: annotators are {counts.dtype} of shape {tuple(counts.shape)}; expected an int64 count for "
            f"each of {len(images)} images. Convert them."
        )
    if not (counts.min() >= 1 and counts.max() <= masks.shape[1]):
        raise ValueError(
            f"{data.name}: {counts.min()} to {counts.max()} annotators an image; expected 1 to {masks.shape[1]}, as "
            "many as there are masks. Correct the counts, or drop images without annotators."
        )


class OneAnnotator(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a network input and the mask of one annotator, who is drawn again in every epoch.

    The choice depends on seed, epoch and image only, not on the order of the batches. Every process must call
    `set_epoch`; a loader does not forward it to persistent workers.

    Example:
        >>> pairs = OneAnnotator(images.split("train"), seed=0)
        >>> lb.fit(net, pairs, recipe, callbacks=[lambda state: pairs.set_epoch(state.epoch)])
    """

    def __init__(self, images: AnnotatedImages, *, seed: int = 0) -> None:
        self.images, self.seed = images, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the annotators of an epoch."""
        digest = hashlib.blake2b(f"annotators/{self.seed}/{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        self.chosen = draw_annotators(self.images.annotators, generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, annotations, _ = self.images[index]
        return x, annotations[self.chosen[index]].long()
