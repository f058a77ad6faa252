"""`OneAnnotator`: what a probabilistic segmentation network is trained on, one random opinion an image and epoch."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanbayes.data.annotated import AnnotatedImages, draw_annotators


class OneAnnotator(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a network input and the mask of one annotator, who is drawn anew in every epoch.

    Whose mask it is depends on seed, epoch and image alone: not on the order of the batches, nor on how often an image
    is read. Every process must be told the epoch; a loader with persistent workers does not tell its own.

    Example:
        >>> pairs = OneAnnotator(images.split("train"), seed=0)
        >>> lb.fit(net, pairs, recipe, callbacks=[lambda state: pairs.set_epoch(state.epoch)])
    """

    def __init__(self, images: AnnotatedImages, *, seed: int = 0) -> None:
        """Begin with the first epoch, number 0."""
        self.images, self.seed = images, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the annotators of an epoch."""
        digest = hashlib.blake2b(f"annotators/{self.seed}/{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        self.chosen = draw_annotators(self.images.annotators, generator)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the network input (C, H, W) and the classes of its pixels, (H, W) int64."""
        x, annotations, _ = self.images[index]
        return x, annotations[self.chosen[index]].long()
