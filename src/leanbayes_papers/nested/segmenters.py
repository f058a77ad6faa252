"""The segmentation networks of `nested-annotators`, trained on one random annotator for each image and epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import Dataset

import leanbayes as lb
from leanbayes.compare.job import DataSpec
from leanbayes.data import AnnotatedImages, OneAnnotator
from leanbayes.generative import ProbabilisticUNet
from leanbayes.models import UNet
from leanbayes.training.data import seeded
from leanbayes_papers.harness import Run, TrainingSpec
from leanbayes_papers.nested.networks import ANNEALED

KINDS = ("deterministic", "dropout", "ensemble", "P-UNet", "VND-PUNet", "BN3")
DIMENSIONS = 6  # dimensions of the codes, as in Kohl et al. (2018).
# Rate of BN3's keep probabilities and noise, in units of the weights' rate: steps of Adam are small for them.
POSTERIOR_RATE = 10.0
DROPOUT = 0.5  # share of channels that the dropout U-Net drops after every level but the finest


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of networks and training."""

    widths: tuple[int, ...]  # of the levels of all U-Nets and of the code networks
    epochs: int
    batch_size: int
    lr: float
    members: int  # of the ensemble
    images: tuple[int, int] | None = None  # training and test images of the made-up set; None for its usual ones
    flip: bool = False  # mirror half of the training images together with their masks; others in every epoch


def segmenter(run: Run, kind: str, data: str, scale: Scale) -> TrainingSpec:
    """Return a segmentation network and its training."""
    recipe = lb.Recipe(
        optimizer="adam", weight_decay=0.0, epochs=scale.epochs, batch_size=scale.batch_size, lr=scale.lr
    )
    if kind == "BN3":
        annealed = round(ANNEALED * scale.epochs)
        recipe = replace(recipe, posterior_lr=POSTERIOR_RATE * scale.lr, anneal_epochs=annealed)
        recipe = replace(recipe, compile=run.torch_device.type == "cuda")  # many small operations, else

    def rows(images: AnnotatedImages, seed: int) -> Dataset[tuple[Tensor, Tensor]]:
        pairs = OneAnnotator(images.split("train"), seed=seed)
        return Mirrored(pairs) if scale.flip else pairs

    return TrainingSpec(
        name=f"{data}-{kind.lower()}",
        source=DataSpec(name=data, root=run.root),
        net=kind,
        recipe=run.recipe(recipe),
        options={"scale": scale},
        load=lambda source: images_of(source.name, scale.images, source.root),
        build=build,
        rows=rows,
    )


@lru_cache(maxsize=1)
def images_of(name: str, images: tuple[int, int] | None, root: str | None) -> AnnotatedImages:
    """Return a set, all splits; the last one is cached, because all networks share it."""
    if images is None:
        return lb.data.load_annotated(name, root)
    return lb.data.ambiguous_images(train=images[0], val=1, test=images[1])


def build(spec: TrainingSpec, images: AnnotatedImages) -> nn.Module:
    """Return the untrained network of a kind."""
    scale: Scale = spec.options["scale"]
    classes, kind = len(images.classes), spec.net
    size: dict[str, Any] = {"input_shape": tuple(images.images.shape[1:]), "widths": scale.widths}
    if kind in ("P-UNet", "VND-PUNet"):
        return ProbabilisticUNet(classes, dimensions=DIMENSIONS, ordered=kind == "VND-PUNet", **size)
    if kind == "ensemble":
        return lb.Ensemble([UNet(classes, **size) for _ in range(scale.members)])
    net = UNet(classes, **size)
    if kind == "dropout":
        for level in (*net.encoder[1:], *net.decoder[:-1]):
            level.append(nn.Dropout2d(DROPOUT))
        return lb.convert(net, lb.MCDropout(), likelihood=lb.Categorical())
    if kind == "BN3":
        return lb.convert(net, lb.NestedDropout(groups=min(32, *scale.widths)), likelihood=lb.Categorical())
    return net


class Mirrored(Dataset[tuple[Tensor, Tensor]]):
    """Pairs, half of them mirrored, image and mask together; the choice depends on seed, epoch and image alone."""

    def __init__(self, pairs: OneAnnotator) -> None:
        """Begin with the first epoch."""
        self.pairs = pairs
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the annotators and the mirrored images of an epoch."""
        self.pairs.set_epoch(epoch)
        coins = seeded(torch.device("cpu"), self.pairs.seed, "mirror", epoch)
        self.chosen = torch.rand(len(self.pairs), generator=coins, device=coins.device) < 0.5

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a network input and the classes of its pixels, both mirrored or neither."""
        x, y = self.pairs[index]
        return (x.flip(-1), y.flip(-1)) if self.chosen[index] else (x, y)
