"""The segmentation networks of `nested-annotators`, trained on one random annotator an image and epoch.

A training that was killed goes on where it was, and a finished one is only read: `OUT/trained/NAME-DIGEST/seedK`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import Dataset

from leanbayes import data
from leanbayes.compare.experiment import pick_device
from leanbayes.core.conversion import convert
from leanbayes.data import AnnotatedImages, OneAnnotator
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.generative import fit as fit_generative
from leanbayes.generative import ProbabilisticUNet
from leanbayes.methods.ensemble import Ensemble
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.nested.config import NestedDropout
from leanbayes.models import UNet
from leanbayes.training import Recipe
from leanbayes.training.data import seeded
from leanbayes.training.fit import fit
from leanbayes_papers.nested_settings import ANNEALED
from leanbayes_papers.study import Case
from leanbayes_papers.trained import FOLDER

KINDS = ("deterministic", "dropout", "ensemble", "P-UNet", "VND-PUNet", "BN3")
DIMENSIONS = 6
"""Of the codes, as Kohl et al. (2018) have it."""

POSTERIOR_RATE = 10.0
"""Of BN3's keep probabilities and noise, in units of the weights' rate: steps of Adam are small beside them."""

DROPOUT = 0.5
"""Share of channels that the dropout U-Net drops behind every level but the finest."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is.

    Attributes:
        widths: of the levels of all U-Nets and of the code networks.
        epochs: of the training, the same for all kinds.
        batch_size: of the training.
        lr: of Adam.
        members: of the ensemble.
        images: training and test images of the made-up set; None takes its usual ones.
        flip: mirror half of the training images, left to right, together with their masks; others in every epoch.
    """

    widths: tuple[int, ...]
    epochs: int
    batch_size: int
    lr: float
    members: int
    images: tuple[int, int] | None = None
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class Segmenter:
    """A segmentation network and how it is trained.

    Attributes:
        kind: one of `KINDS`.
        data: a name of `leanbayes.data.load_annotated`.
        scale: sizes and epochs.
        recipe: optimiser, device and precision; the scale and the kind say the rest.
        root: folder of the data.
    """

    kind: str
    data: str
    scale: Scale
    recipe: Recipe
    root: str | None = None

    def images(self) -> AnnotatedImages:
        """Return its data, all splits."""
        return images_of(self.data, self.scale.images, self.root)

    def make(self, seed: int) -> nn.Module:
        """Return the untrained model."""
        images = self.images()
        size: dict[str, Any] = {"input_shape": tuple(images.images.shape[1:]), "widths": self.scale.widths}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _build(self.kind, len(images.classes), size, self.scale)

    def plan(self, seed: int) -> Recipe:
        """Return the whole recipe."""
        scale = self.scale
        whole = replace(self.recipe, epochs=scale.epochs, batch_size=scale.batch_size, lr=scale.lr, seed=seed)
        if self.kind == "BN3":
            return replace(
                whole,
                posterior_lr=POSTERIOR_RATE * scale.lr,
                anneal_epochs=round(ANNEALED * scale.epochs),
                compile=pick_device(self.recipe.accelerator).type == "cuda",  # many small operations, else
            )
        return whole

    def folder(self, out: Path, seed: int) -> Path:
        """Return where its training is kept; other settings have another folder."""
        digest = hashlib.sha256(repr(replace(self, root=None)).encode()).hexdigest()[:12]
        return out / FOLDER / f"{self.data}-{self.kind.lower()}-{digest}" / f"seed{seed}"


class Mirrored(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of which half are mirrored, image and mask together; which depends on seed, epoch and image alone."""

    def __init__(self, pairs: OneAnnotator) -> None:
        """Begin with the first epoch."""
        self.pairs = pairs
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the annotators of an epoch, and who is mirrored in it."""
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


def train(plan: Segmenter, case: Case, seed: int) -> nn.Module:
    """Train a network, go on with its training, or read it if it is finished; in eval mode, on the case's device."""
    model = plan.make(seed)
    pairs = OneAnnotator(plan.images().split("train"), seed=seed)
    rows = Mirrored(pairs) if plan.scale.flip else pairs
    options: dict[str, Any] = {
        "folder": plan.folder(case.out, seed),
        "resume": not case.fresh,
        "progress": case.budget != "quick",
    }
    if isinstance(model, ProbabilisticUNet):
        fit_generative(model, rows, plan.plan(seed), **options)
    else:
        fit(model, rows, plan.plan(seed), likelihood=Categorical(), **options)
    return model.to(pick_device(case.device)).eval()


@lru_cache(maxsize=1)
def images_of(name: str, images: tuple[int, int] | None, root: str | None) -> AnnotatedImages:
    """Return a set; the last one is kept, since all networks share it."""
    if images is None:
        return data.load_annotated(name, root)
    return data.ambiguous_images(train=images[0], val=1, test=images[1])


def _build(kind: str, classes: int, size: dict[str, Any], scale: Scale) -> nn.Module:
    if kind in ("P-UNet", "VND-PUNet"):
        return ProbabilisticUNet(classes, dimensions=DIMENSIONS, ordered=kind == "VND-PUNet", **size)
    if kind == "ensemble":
        return Ensemble([UNet(classes, **size) for _ in range(scale.members)])
    net = UNet(classes, **size)
    if kind == "dropout":
        return convert(_with_dropout(net), MCDropout(), likelihood=Categorical())
    if kind == "BN3":
        return convert(net, NestedDropout(groups=min(32, *scale.widths)), likelihood=Categorical())
    return net


def _with_dropout(net: UNet) -> UNet:
    """Drop channels behind every level but the finest of encoder and decoder."""
    for level in (*net.encoder[1:], *net.decoder[:-1]):
        level.append(nn.Dropout2d(DROPOUT))
    return net
