"""Opinions of segmentation networks on test images, and how near they are to those of the annotators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.core.norm import update_norm
from leanbayes.core.plain import mean
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import predict
from leanbayes.data import AnnotatedImages
from leanbayes.data.annotated.ambiguous import AmbiguousImages, mode_frequencies, optimal_energy_distance
from leanbayes.generative import ProbabilisticUNet
from leanbayes.generative.codes import gaussian_kl
from leanbayes.methods.ensemble import Ensemble
from leanbayes.metrics.segmentation import energy_distance, iou, matched_iou, pixel_calibration
from leanbayes.slim import narrow
from leanbayes_papers.segmenters import DIMENSIONS
from leanbayes_papers.study import Numbers

SAMPLES = (1, 4, 8, 16)
WIDTHS = (0.25, 0.5, 1.0)
LENGTHS = {"1/3": DIMENSIONS // 3, "full": DIMENSIONS, "as drawn": None}
"""Code lengths at which VND-PUNet is judged: a third, all, and as long as its prior draws them."""

NORM_ROWS = 256
"""Training images over which the norms of BN3 collect their statistics at every width."""

THRESHOLD_SAMPLES = 4
"""Draws of which a threshold is taken."""

THIRDS = ("faint", "middle", "bright")


class Opinions(NamedTuple):
    """What a model says of all test images.

    Attributes:
        prediction: of every pixel, over the largest number of samples, which are kept.
        parameters: of what predicts, at the width it has.
        threshold: probability from which on as many pixels are marked as annotators mark, on validation images; None
            where the law of the masks is known, and one half is right.
    """

    prediction: Prediction
    parameters: int
    threshold: float | None = None

    @property
    def masks(self) -> Tensor:
        """Masks (S, B, H, W): the likeliest class of every pixel, draw by draw."""
        return _marked(self.prediction) > 0.5

    @property
    def balanced(self) -> Tensor:
        """Masks with as many marked pixels as the annotators', draw by draw."""
        return _marked(self.prediction) > (0.5 if self.threshold is None else self.threshold)


def variants(kind: str, model: nn.Module, images: AnnotatedImages) -> Iterator[tuple[str, Opinions]]:
    """Yield the opinions of a trained model on the test images, at every code length or width it is judged at."""
    device = next(model.parameters()).device
    if isinstance(model, ProbabilisticUNet):
        for name, length in (LENGTHS if model.ordered else {"": None}).items():
            ask = partial(model.predict, samples=max(SAMPLES), length=length)
            yield f"{kind} {name}".strip(), _hear(ask, images, model)
    elif kind == "BN3":
        seen = images.split("train").prepared()[:NORM_ROWS].to(device)
        for width in WIDTHS:
            small = narrow(model, width).to(device).eval()
            update_norm(small, seen)
            yield f"BN3 {width:g}", _hear(partial(predict, small, samples=max(SAMPLES)), images, mean(small))
    else:
        plain = model if isinstance(model, Ensemble) else mean(model)
        yield kind, _hear(partial(predict, model, samples=max(SAMPLES)), images, plain)


def judge(opinions: Opinions, images: AnnotatedImages) -> dict[str, float]:
    """Return the figures of a model: energy distances by samples, matched overlap, calibration of pixels, size.

    Where the law of the annotators is known, also how often each of its modes was sampled, and by how many points that
    differs from the truth at most, over all images and over thirds of them by their brightness. Where it is not, also
    the distances of balanced masks.
    """
    test = images.split("test")
    masks, annotations, counts = opinions.masks, test.annotations.transpose(0, 1).bool(), test.annotators
    found = _distances(masks, test, "ged")
    if isinstance(test, AmbiguousImages):
        found |= _modes(mode_frequencies(masks, test.modes), test.probabilities)
    else:
        found |= _distances(opinions.balanced, test, "balanced ged")
    pixels = pixel_calibration(opinions.prediction.mean, annotations, annotators=counts)
    return found | {
        "matched iou": float(matched_iou(opinions.balanced, annotations, annotators=counts).mean()),
        "ece": float(pixels.ece),
        "vote error": float(pixels.vote_error),
        "marked": float(masks.double().mean()),
        "parameters": opinions.parameters,
    }


@torch.no_grad()
def code_use(model: ProbabilisticUNet, images: AnnotatedImages) -> Numbers:
    """Return what every dimension of the code tells of an annotation, in nats, and how often prior codes use it."""
    test = images.split("test")
    device = next(model.parameters()).device
    x, y = test.prepared().to(device), test.draw_targets(torch.Generator().manual_seed(0)).to(device)
    prior = model.prior(x)
    planes = F.one_hot(y, model.num_classes).movedim(-1, 1).float()
    told = gaussian_kl(model.posterior(torch.cat([x, planes], 1)), prior)
    return {"nats": told.mean(0).tolist(), "used": prior.keep.mean(0).tolist()}


def truth(images: AnnotatedImages) -> Numbers:
    """Return what a perfect network would have; where no law is known, an estimate from what annotators say.

    With D the distance of two annotators of an image, its expected energy distance is D (1 / annotators + 1 / samples):
    `optimal_energy_distance` has D from the law, here it is the mean over pairs. Beside it stands, as a measure of how
    strict the distance is, that of a mask to itself one pixel to the right.
    """
    test = images.split("test")
    found: Numbers = {"marked": _share(test), "images": len(test)}
    if isinstance(test, AmbiguousImages):
        people = int(test.annotators[0])
        for count in SAMPLES:
            best = optimal_energy_distance(test.modes, test.probabilities, annotators=people, samples=count)
            found[f"ged {count}"] = float(best.mean())
        return found | _modes(test.probabilities, test.probabilities)
    each = [masks[:people].bool() for masks, people in zip(test.annotations, test.annotators.tolist(), strict=True)]
    apart = torch.stack([_apart(masks) for masks in each])
    for count in SAMPLES:
        found[f"ged {count}"] = float((apart * (1 / test.annotators + 1 / count)).mean())
    found["apart"] = float(apart.mean())
    found["one pixel"] = float(torch.stack([1 - iou(m, F.pad(m, (1, 0))[..., :-1]).mean() for m in each]).mean())
    return found


def _apart(masks: Tensor) -> Tensor:
    """Return the mean distance 1 - IoU of two different masks (A, H, W) of one image; zero if there is but one."""
    people = len(masks)
    return (1 - iou(masks[:, None], masks[None])).sum() / max(1, people * (people - 1))


def _modes(frequencies: Tensor, probabilities: Tensor) -> dict[str, float]:
    """Compare frequencies of modes (N, M) with their probabilities: the first mode is the likelier the brighter."""
    apart = 100 * (frequencies - probabilities)
    found = {f"mode {number}": float(share) for number, share in enumerate(frequencies.mean(0))}
    thirds = zip(THIRDS, probabilities[:, 0].argsort().tensor_split(len(THIRDS)), strict=True)
    by_third = {f"points off, {name}": float(apart[rows].mean(0).abs().max()) for name, rows in thirds}
    return found | {"points off": float(apart.mean(0).abs().max())} | by_third


def _hear(ask: Callable[[Tensor], Prediction], images: AnnotatedImages, counted: nn.Module) -> Opinions:
    """Ask a model about the test images, and where no law is known, about the validation images for a threshold."""
    prediction = ask(images.split("test").prepared()).to("cpu")
    parameters = sum(parameter.numel() for parameter in counted.parameters())
    if isinstance(images, AmbiguousImages):
        return Opinions(prediction, parameters)
    held_out = images.split("val")
    marked = _marked(ask(held_out.prepared()).to("cpu"))[:THRESHOLD_SAMPLES].flatten().sort().values
    return Opinions(prediction, parameters, float(marked[int((1 - _share(held_out)) * (len(marked) - 1))]))


def _marked(prediction: Prediction) -> Tensor:
    """Return the probabilities of the second of two classes, draw by draw (S, B, H, W)."""
    if prediction.samples is None or prediction.samples.shape[2] != 2:
        raise ValueError("expected a prediction of two classes with its samples, got another; keep the samples")
    return prediction.samples[:, :, 1]


def _share(images: AnnotatedImages) -> float:
    """Return the share of pixels that annotators mark."""
    exist = torch.arange(images.annotations.shape[1]) < images.annotators[:, None]
    return float(images.annotations[exist].double().mean())


def _distances(masks: Tensor, images: AnnotatedImages, name: str) -> dict[str, float]:
    """Return the mean energy distance of the first few samples, for each number of them."""
    annotations = images.annotations.transpose(0, 1).bool()
    distances = {n: energy_distance(masks[:n], annotations, annotators=images.annotators) for n in SAMPLES}
    return {f"{name} {count}": float(distance.mean()) for count, distance in distances.items()}
