"""The autoencoders of the nested paper's section 6.2, and the evaluation of their images.

All share encoder, decoder and recipe and differ in their codes. Pixels between 0 and 1 are read as probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.data import DataSet, Split
from leanbayes.generative import Autoencoder, explained, JointVAE, SlicedWassersteinAutoencoder, VAE, VNDAutoencoder
from leanbayes.generative.autoencoder import ConvDecoder, ConvEncoder
from leanbayes.metrics import classifier_features, compare_images
from leanbayes_papers.harness import Record, Run, TrainingSpec
from leanbayes_papers.harness.spec import evenly

DATA = {"quick": ("digits",), "short": ("mnist", "fashion-mnist", "cifar10"), "full": ("cifar10",)}
# Classifiers in whose features images are compared.
NETS = {"digits": "small", "mnist": "lenet5-bn", "fashion-mnist": "lenet5-bn", "cifar10": "vgg11-bn"}
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
}  # models by the paper's names
# The prior keeps 1 / (1 - keep) dimensions on average: more than images need, or codes end too soon.
PRIOR_KEEP = {"digits": 0.9, "mnist": 0.98, "fashion-mnist": 0.98, "cifar10": 0.98}


def dimensions(run: Run, data: str) -> int:
    """Return the full length of a code."""
    return {"digits": 8, "cifar10": run.pick(quick=64, short=64, full=128)}.get(data, 32)


def coder(run: Run, data: str, model: str, length: int) -> TrainingSpec:
    """Return an autoencoder of the suite."""
    widths = {"digits": (32, 64), "cifar10": (32, 64, 128, 256, 512)}.get(data, (16, 32, 64, 128, 256))
    epochs = {"digits": 30, "cifar10": run.pick(quick=30, short=30, full=100)}.get(data, 8)
    batch, rate = {"digits": (50, 5e-3), "cifar10": (256, 2e-3)}.get(data, (128, 2e-3))
    recipe = lb.Recipe(epochs=epochs, batch_size=batch, optimizer="adam", lr=rate, weight_decay=0.0)
    fields = {ORDERED: {"prior_keep": PRIOR_KEEP[data]}, "BetaVAE": {"beta": 4.0}}.get(model, {})
    options = {"dimensions": length, "widths": widths, "fields": fields}
    parts: dict[str, Any] = {"build": build, "rows": lambda sets, seed: pixels(sets.train), "options": options}
    return run.spec(f"{data}-{model.lower()}-{length}", data, model, recipe, quick_rows=1000, **parts)


def build(spec: TrainingSpec, data: DataSet) -> Autoencoder:
    """Return the untrained autoencoder."""
    shape, widths = data.input_shape, spec.options["widths"]
    encoder = ConvEncoder(shape, widths)
    fields = spec.options["fields"]
    model = MODELS[spec.net](shape, dimensions=spec.options["dimensions"], encoder=encoder, **fields)
    model.decoder = ConvDecoder(model.code_dimensions, shape, widths)
    return model


def classifier(run: Run, data: str) -> TrainingSpec:
    """Return the network in whose features images are compared."""
    recipe = run.recipe_of("nested", f"classifier {data}")
    return run.spec(f"{data}-classifier", data, NETS[data], recipe, quick_rows=1000)


class Evaluation:
    """Evaluates autoencoders of one data set alike, on test images: one classifier for all of them and all seeds."""

    def __init__(self, run: Run, data: str) -> None:
        """Train the classifier, or read it, and prepare test images."""
        spec = classifier(run, data)
        model, sets, _ = run.train(spec, 0)
        self.real, labels = evenly((pixels(sets.test), sets.test.y), MOST_ROWS)
        self.train = evenly((pixels(sets.train), sets.train.y), len(self.real))[0]
        name = f"{spec.net}, trained here on {data}, input of its last linear layer"
        self.network = classifier_features(model, name=name, prepare=sets.inputs)
        self.accuracy = 100 * float((self.network(self.real).probabilities.argmax(1).cpu() == labels).double().mean())

    def __call__(self, model: Autoencoder, length: int) -> Record:
        """Return the measures of a model at a code length."""
        (error,) = explained(model, self.real, [length])
        return {"reconstruction": error, **self.likeness(samples(model, len(self.real), length))}

    def likeness(self, images: Tensor) -> Record:
        """Compare images with test images."""
        found = compare_images(self.real, images, self.network)
        return {
            "frechet": float(found.frechet),
            "inception": float(found.inception.mean),
            "diversity": float(found.diversity.pairwise),
        }

    def order(self, model: Autoencoder) -> list[float]:
        """Return the reconstruction error at every code length, of 2,000 test images at most."""
        rows = evenly((self.real, self.real), ORDER_ROWS)[0]
        return explained(model, rows, range(1, model.dimensions + 1))


def samples(model: Autoencoder, count: int, length: int) -> Tensor:
    """Draw new images of a code length; the same noise for every model and every length."""
    sizes = [min(BATCH, count - start) for start in range(0, count, BATCH)]
    return torch.cat([model.sample(size, length=length, seed=k).cpu() for k, size in enumerate(sizes)])


def pixels(split: Split) -> Tensor:
    """Return images as numbers between 0 and 1."""
    return split.x.float() / 255


def lengths(whole: int, percents: Sequence[int] = PERCENTS) -> dict[int, int]:
    """Return code lengths by their share of the full one, in percent."""
    return {percent: max(1, whole * percent // 100) for percent in percents}
