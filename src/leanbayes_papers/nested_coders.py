"""The autoencoders of the nested paper's section 6.2: how large they are, how they are trained, how they are judged.

All share encoder, decoder and recipe and differ in their codes. Pixels lie between 0 and 1 and are read as
probabilities. Trainings are kept as those of `trained`: a killed one goes on, a finished one is only read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from leanbayes.compare.experiment import pick_device
from leanbayes.compare.job import DataSpec
from leanbayes.data import Split
from leanbayes.generative import (
    Autoencoder,
    explained,
    fit,
    JointVAE,
    SlicedWassersteinAutoencoder,
    VAE,
    VNDAutoencoder,
)
from leanbayes.generative.autoencoder import ConvDecoder, ConvEncoder
from leanbayes.metrics import classifier_features, compare_images
from leanbayes.training import Recipe
from leanbayes_papers.study import Case, Numbers
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import FOLDER, loaded, some, train, Trainee

DATA = {"quick": ("digits",), "short": ("mnist", "fashion-mnist", "cifar10"), "full": ("cifar10",)}
NETS = {"digits": "small", "mnist": "lenet5-bn", "fashion-mnist": "lenet5-bn", "cifar10": "vgg11-bn"}
"""Classifiers in whose features images are compared."""

PERCENTS = (25, 50, 75, 100)
MOST_ROWS = 10_000
ORDER_ROWS = 2_000
BATCH = 500

ORDERED = "VND-AE"
MODELS: dict[str, Callable[..., Autoencoder]] = {
    ORDERED: VNDAutoencoder,
    "VAE": VAE,
    "BetaVAE": VAE,
    "JointVAE": JointVAE,
    "SWAE": SlicedWassersteinAutoencoder,
}
"""Under the paper's names."""

PRIOR_KEEP = {"digits": 0.9, "mnist": 0.98, "fashion-mnist": 0.98, "cifar10": 0.98}
"""The prior goes on for 1 / (1 - keep) dimensions on average: more than images need, or codes end too soon."""


@dataclass(frozen=True, kw_only=True)
class Coder:
    """An autoencoder and how it is trained.

    Attributes:
        source: the data.
        model: a name of `MODELS`.
        dimensions: of its code.
        options: what else the model is made with, by name.
        widths: of encoder and decoder.
        recipe: how it is trained; seeds come from the case.
    """

    source: DataSpec
    model: str
    dimensions: int
    options: tuple[tuple[str, float], ...]
    widths: tuple[int, ...]
    recipe: Recipe

    def make(self, shape: tuple[int, ...], seed: int) -> Autoencoder:
        """Return the untrained model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = ConvEncoder(shape, self.widths)
            model = MODELS[self.model](shape, dimensions=self.dimensions, encoder=encoder, **dict(self.options))
            model.decoder = ConvDecoder(model.code_dimensions, shape, self.widths)
            return model

    def folder(self, out: Path, seed: int) -> Path:
        """Return where its training is kept; other settings have another folder."""
        settings = repr(replace(self, source=replace(self.source, root=None)))
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        return out / FOLDER / f"{self.source.name}-{self.model.lower()}-{self.dimensions}-{digest}" / f"seed{seed}"


def dimensions(setting: Setting, data: str) -> int:
    """Return the full length of a code."""
    return {"digits": 8, "cifar10": setting.pick(quick=64, short=64, full=128)}.get(data, 32)


def coder(setting: Setting, data: str, model: str, length: int) -> Coder:
    """Return an autoencoder of the suite."""
    widths = {"digits": (32, 64), "cifar10": (32, 64, 128, 256, 512)}.get(data, (16, 32, 64, 128, 256))
    epochs = {"digits": 30, "cifar10": setting.pick(quick=30, short=30, full=100)}.get(data, 8)
    batch, rate = {"digits": (50, 5e-3), "cifar10": (256, 2e-3)}.get(data, (128, 2e-3))
    recipe = Recipe(epochs=epochs, batch_size=batch, optimizer="adam", lr=rate, weight_decay=0.0)
    options = {ORDERED: (("prior_keep", PRIOR_KEEP[data]),), "BetaVAE": (("beta", 4.0),)}
    return Coder(
        source=setting.source(data, quick_rows=1000),
        model=model,
        dimensions=length,
        options=options.get(model, ()),
        widths=widths,
        recipe=setting.recipe(recipe),
    )


def taught(plan: Coder, case: Case, seed: int) -> Autoencoder:
    """Train an autoencoder, go on with its training, or read it if it is finished."""
    data = loaded(plan.source)
    model = plan.make(data.input_shape, seed)
    fit(
        model,
        pixels(data.train),
        replace(plan.recipe, seed=seed),
        folder=plan.folder(case.out, seed),
        resume=not case.fresh,
        progress=case.budget != "quick",
    )
    return model.to(pick_device(case.device)).eval()


def classifier(setting: Setting, data: str) -> Trainee:
    """Return the network in whose features images are compared."""
    recipe = {
        "digits": Recipe(epochs=20, batch_size=50, lr=0.05),
        "cifar10": Recipe(epochs=30, batch_size=128, lr=0.05, augment="crop_flip"),
    }.get(data, Recipe(epochs=6, batch_size=100, lr=0.05))
    return Trainee(
        name=f"{data}-classifier",
        source=setting.source(data, quick_rows=1000),
        net=NETS[data],
        recipe=setting.recipe(recipe),
    )


class Yardstick:
    """Judges autoencoders of one data set alike, on test images: one classifier for all of them and all seeds."""

    def __init__(self, setting: Setting, data: str, case: Case) -> None:
        """Train the classifier, or read it, and prepare test images."""
        plan = classifier(setting, data)
        trained = train(plan, case, 0)
        real, labels = some((pixels(trained.data.test), trained.data.test.y), MOST_ROWS)
        self.real, self.train = real, some((pixels(trained.data.train), trained.data.train.y), len(real))[0]
        name = f"{plan.net}, trained here on {data}, input of its last linear layer"
        self.network = classifier_features(trained.model, name=name, prepare=trained.data.inputs)
        self.accuracy = 100 * float((self.network(real).probabilities.argmax(1).cpu() == labels).double().mean())

    def __call__(self, model: Autoencoder, length: int) -> Numbers:
        """Return the figures of a model at a code length."""
        (error,) = explained(model, self.real, [length])
        return {"reconstruction": error, **self.likeness(samples(model, len(self.real), length))}

    def likeness(self, images: Tensor) -> Numbers:
        """Return how images compare with test images."""
        found = compare_images(self.real, images, self.network)
        return {
            "frechet": float(found.frechet),
            "inception": float(found.inception.mean),
            "diversity": float(found.diversity.pairwise),
        }

    def order(self, model: Autoencoder) -> list[float]:
        """Return the reconstruction error at every code length, of 2,000 test images at most."""
        rows = some((self.real, self.real), ORDER_ROWS)[0]
        return explained(model, rows, range(1, model.dimensions + 1))


def samples(model: Autoencoder, count: int, length: int) -> Tensor:
    """Draw new images of a code length; the same noise for every model and every length."""
    sizes = [min(BATCH, count - start) for start in range(0, count, BATCH)]
    return torch.cat([model.sample(size, length=length, seed=k).cpu() for k, size in enumerate(sizes)])


def pixels(split: Split) -> Tensor:
    """Return images as numbers between 0 and 1."""
    return split.x.float() / 255


def lengths(whole: int, percents: Sequence[int] = PERCENTS) -> dict[str, int]:
    """Return code lengths by their share of the full one, in percent."""
    return {str(percent): max(1, whole * percent // 100) for percent in percents}
