"""Metrics of generated images: Fréchet distance, inception score, diversity, reconstruction error.

Distances are measured between *features* that a named network computes. Only values of the same network and the same
number of images compare: `Features` carries the name, and `compare_images` returns it. torchvision's Inception is
customary; a classifier trained on the same data knows the images better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from leanbayes.metrics._validate import check_whole, finite, flatten

# N rows or images, D features, C classes

LARGEST_CHUNK = 2**22
"""Number of distances in memory at a time, 32 MiB in float64."""


class Seen(NamedTuple):
    """Features (N, D) and class probabilities (N, C) of images."""

    features: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class Features:
    """A network that looks at images, and its name: `Features("mine", lambda images: (features, probabilities))`.

    Attributes:
        name: identifies the network in results.
        look: maps a batch of images to features (B, D) and class probabilities (B, C).
        batch_size: images at a time.
    """

    name: str
    look: Callable[[Tensor], tuple[Tensor, Tensor]]
    batch_size: int = 256

    def __call__(self, images: Tensor) -> Seen:
        """Return features and probabilities of images (N, ...), without gradients."""
        check_whole(self.batch_size, "batch_size")
        if images.dim() < 2 or len(images) == 0:
            raise ValueError(f"expected at least one image, (N, ...), got shape {tuple(images.shape)}")
        with torch.no_grad():
            seen = [self.look(images[i : i + self.batch_size]) for i in range(0, len(images), self.batch_size)]
        features, probabilities = (torch.cat(parts) for parts in zip(*seen, strict=True))
        if features.dim() != 2 or probabilities.dim() != 2 or not len(features) == len(probabilities) == len(images):
            raise ValueError(
                f"expected features (N, D) and probabilities (N, C) of {len(images)} images from {self.name}, got "
                f"{tuple(features.shape)} and {tuple(probabilities.shape)}"
            )
        return Seen(features, probabilities)


def classifier_features(
    model: nn.Module,
    layer: str | None = None,
    *,
    name: str | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 256,
) -> Features:
    """Return features of a trained classifier: the input of its last linear layer, and the softmax of its outputs.

    Args:
        model: a plain network that returns logits (B, C), run in eval mode; of a converted one take `lb.mean(model)`.
        layer: path of the layer whose flattened inputs are the features; default the last `nn.Linear`.
        name: its name in results; default its class and the layer. Add the data on which it was trained.
        prepare: turns images into inputs of the network, such as `dataset.inputs`.
        batch_size: images at a time.
    """
    layers = dict(model.named_modules())
    path = layer or next((path for path, each in reversed(layers.items()) if isinstance(each, nn.Linear)), None)
    if path is None or path not in layers:
        raise ValueError(
            f"expected a linear layer in {type(model).__name__}, or the path of one of its layers, got "
            f"layer={layer!r}; it has {', '.join(each for each in layers if each) or 'none'}"
        )
    chosen = layers[path]

    def look(images: Tensor) -> tuple[Tensor, Tensor]:
        inputs = images if prepare is None else prepare(images)
        device = next((parameter.device for parameter in model.parameters()), inputs.device)
        outputs, entered = _run(model, inputs.to(device), chosen)
        return entered.flatten(1), outputs.softmax(1)

    return Features(name or f"{type(model).__name__}, input of {path or 'the network'}", look, batch_size)


def inception_features(*, device: torch.device | str = "cpu", batch_size: int = 64) -> Features:
    """Return the 2048 features of torchvision's Inception v3, trained on ImageNet.

    Images are (N, 3, H, W) or grey (N, 1, H, W), uint8 or floats between 0 and 1, resized to 299 x 299 pixels.
    Published values mostly come from another training of this network: do not compare with them.

    Raises:
        RuntimeError: if torchvision cannot be imported, or the weights are not on this machine. Nothing is downloaded.
    """
    models = _torchvision()
    weights = models.Inception_V3_Weights.IMAGENET1K_V1
    file = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    if not file.is_file():
        raise RuntimeError(
            f"expected the weights of torchvision's Inception at {file}, found no file; put it there, or use "
            f"classifier_features with a classifier trained on the same data"
        )
    network = models.inception_v3(weights=weights).to(device)
    name = "torchvision Inception v3 (ImageNet), input of fc"
    return classifier_features(network, "fc", name=name, prepare=_for_inception, batch_size=batch_size)


def reconstruction_error(x: Tensor, y: Tensor, per: Literal["pixel", "image"] = "pixel") -> Tensor:
    """Return the mean squared difference of images x (N, ...) and their reconstructions y; less is better.

    `per="pixel"` averages over all channels and pixels; `per="image"` sums them and averages over images. The paper on
    variational nested dropout does not name the convention of its Table 6; only ratios compare with it.
    """
    if x.shape != y.shape or x.dim() < 2:
        raise ValueError(
            f"expected images (N, ...) and as many reconstructions of the same shape, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    if per not in ("pixel", "image"):
        raise ValueError(f"expected per to be pixel or image, got {per!r}")
    squares = (finite(x, "images") - finite(y, "reconstructions").to(x.device)).square()
    return squares.mean() if per == "pixel" else squares.flatten(1).sum(1).mean()


def frechet_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the Fréchet distance of the Gaussians with the moments of two sets of features (Heusel et al., 2017).

    |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), a squared distance, of features (N, D) and (M, D). Covariances
    have N - 1 in the denominator. Fewer rows give larger values: compare sets of the same size, well above D.

    With C = R^T R from QR decompositions of the centred rows, the last trace is the sum of the singular values of
    R_a R_b^T: real and accurate for every rank, unlike a matrix root.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(
            f"expected features (N, D) and (M, D) of at least two rows each, for a covariance, got {tuple(a.shape)} "
            f"and {tuple(b.shape)}"
        )
    (mean_a, root_a), (mean_b, root_b) = _moments(a), _moments(b.to(a.device))
    common: Tensor = torch.linalg.svdvals(root_a @ root_b.mT).sum()
    traces = root_a.square().sum() + root_b.square().sum() - 2 * common
    return (mean_a - mean_b).square().sum() + traces.clamp(min=0)


class InceptionScore(NamedTuple):
    """Mean and standard deviation of the scores of several parts of the rows."""

    mean: Tensor
    std: Tensor


def inception_score(probabilities: Tensor, splits: int = 10) -> InceptionScore:
    """Return exp(E KL(p(y | x) || p(y))) of class probabilities (N, C), between 1 and C (Salimans et al., 2016).

    The score is high if every image has a clear class and all classes are equally frequent. The rows are cut in their
    order into `splits` equal parts, each with its own p(y): shuffle rows that are sorted by class. The standard
    deviation has the number of parts in the denominator.
    """
    check_whole(splits, "splits")
    if probabilities.dim() != 2 or len(probabilities) < splits:
        raise ValueError(
            f"expected probabilities (N, C) of at least one row for each of {splits} splits, got "
            f"{tuple(probabilities.shape)}"
        )
    # `flatten` checks that rows are distributions; the targets are not used.
    rows, _ = flatten(probabilities, torch.zeros(len(probabilities), dtype=torch.long, device=probabilities.device))
    scores = []
    for part in rows.double().tensor_split(splits):
        divergence = torch.xlogy(part, part) - torch.xlogy(part, part.mean(0))
        scores.append(divergence.sum(1).mean().exp())
    return InceptionScore(torch.stack(scores).mean(), torch.stack(scores).std(correction=0))


class Diversity(NamedTuple):
    """Mean Euclidean distance between two different rows, and from a row to its nearest neighbour."""

    pairwise: Tensor
    nearest: Tensor


def sample_diversity(rows: Tensor, *, most: int = 2000, seed: int = 0) -> Diversity:
    """Return the distances between generated rows (N, ...), features or images; zero if all are the same.

    Distances to the nearest neighbour shrink with the number of rows: compare sets of the same size. Of more than
    `most` rows, `most` are drawn without replacement by the seed.
    """
    check_whole(most, "most", least=2)
    if rows.dim() < 2 or len(rows) < 2:
        raise ValueError(f"expected at least two rows, (N, ...), got shape {tuple(rows.shape)}")
    if len(rows) > most:
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")[:most]
        rows = rows[chosen.to(rows.device)]
    points = finite(rows.detach(), "rows").flatten(1)
    points = points - points.mean(0)  # cdist subtracts squares: a common offset would cost digits
    total, nearest = [], []
    step = max(1, LARGEST_CHUNK // len(points))
    for start in range(0, len(points), step):
        distances = torch.cdist(points[start : start + step], points)
        itself = distances.diagonal(start)
        total.append(distances.sum() - itself.sum())
        itself.fill_(math.inf)
        nearest.append(distances.min(1).values)
    pairs = len(points) * (len(points) - 1)
    return Diversity(torch.stack(total).sum() / pairs, torch.cat(nearest).mean())


class Generation(NamedTuple):
    """Metrics of generated images against real ones, by the features of one network."""

    network: str
    frechet: Tensor
    inception: InceptionScore
    diversity: Diversity


def compare_images(real: Tensor, generated: Tensor, network: Features, splits: int = 10) -> Generation:
    """Return Fréchet distance, inception score and diversity of features, and the name of the network.

    Compare the same number of real (N, ...) and generated images. `splits` is that of the inception score.
    """
    seen = network(generated)
    return Generation(
        network=network.name,
        frechet=frechet_distance(network(real).features, seen.features),
        inception=inception_score(seen.probabilities, splits),
        diversity=sample_diversity(seen.features),
    )


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) of rows (N, D) and a root R of their covariance, C = R^T R."""
    rows = finite(features, "features")
    mean = rows.mean(0)
    return mean, torch.linalg.qr(rows - mean, mode="r").R / math.sqrt(len(rows) - 1)


def _run(model: nn.Module, x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the logits of a model in eval mode, and the input of one of its layers; restore the modes."""
    entered: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(x)
    finally:
        hook.remove()
        for module, training in modes:
            module.training = training
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not entered:
        raise ValueError(
            f"expected a classifier that gives logits (B, C) and runs the layer of its features, got "
            f"{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__} from "
            f"{type(model).__name__}, whose {type(layer).__name__} ran {len(entered)} times"
        )
    return logits, entered[-1]


def _torchvision() -> Any:
    try:
        return import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise RuntimeError(
            f"expected torchvision for its Inception network, could not import it ({error}); install the one that "
            f"fits this torch, or use classifier_features with a classifier trained on the same data"
        ) from error


def _for_inception(images: Tensor) -> Tensor:
    """Return images with three channels, 299 x 299 pixels, standardised by ImageNet's moments."""
    x = images.float() if images.is_floating_point() else images / 255
    if x.dim() != 4 or x.shape[1] not in (1, 3) or x.min() < 0 or x.max() > 1:
        raise ValueError(
            f"expected images (N, 3, H, W) or (N, 1, H, W), uint8 or floats between 0 and 1, got {images.dtype} of "
            f"shape {tuple(images.shape)} between {images.min().item():.6g} and {images.max().item():.6g}"
        )
    x = F.interpolate(x.expand(-1, 3, -1, -1), size=(299, 299), mode="bilinear", antialias=True)
    mean, std = (x.new_tensor(each).view(3, 1, 1) for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return (x - mean) / std
