"""Opinions of segmentation networks on test images, and how near they are to those of the annotators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn, Tensor
from torch.nn.functional import one_hot

from leanbayes.convert import mean
from leanbayes.data import AnnotatedImages
from leanbayes.data.ambiguous import AmbiguousImages
from leanbayes.data.mask_law import mode_frequencies, optimal_energy_distance
from leanbayes.experiments.suites.segmenters import DIMENSIONS
from leanbayes.experiments.suites.study import Numbers
from leanbayes.generative import ProbabilisticUNet
from leanbayes.generative.codes import gaussian_kl
from leanbayes.methods.ensemble import Ensemble
from leanbayes.metrics.segmentation import energy_distance, matched_iou, pixel_calibration
from leanbayes.norm import update_norm
from leanbayes.predict import predict
from leanbayes.prediction import Prediction
from leanbayes.slim import narrow

SAMPLES = (1, 4, 8, 16)
WIDTHS = (0.25, 0.5, 1.0)
LENGTHS = {"1/3": DIMENSIONS // 3, "full": DIMENSIONS, "as drawn": None}
"""Code lengths at which VND-PUNet is judged: a third, all, and as long as its prior draws them."""

NORM_ROWS = 256
"""Training images over which the norms of BN3 collect their statistics at every width."""

THIRDS = ("faint", "middle", "bright")


class Opinions(NamedTuple):
    """What a model says of all test images.

    Attributes:
        prediction: of every pixel, over the largest number of samples.
        parameters: of what predicts, at the width it has.
    """

    prediction: Prediction
    parameters: int

    @property
    def masks(self) -> Tensor:
        """Masks (S, B, H, W): the likeliest class of every pixel, draw by draw."""
        samples = self.prediction.samples
        if samples is None:
            raise ValueError("expected a prediction with its samples, got one without; keep them")
        return samples.argmax(2)


def variants(kind: str, model: nn.Module, images: AnnotatedImages) -> Iterator[tuple[str, Opinions]]:
    """Yield the opinions of a trained model on the test images, at every code length or width it is judged at."""
    x = images.split("test").prepared().to(next(model.parameters()).device)
    if isinstance(model, ProbabilisticUNet):
        lengths = LENGTHS if model.ordered else {"": None}
        for name, length in lengths.items():
            prediction = model.predict(x, samples=max(SAMPLES), length=length)
            yield f"{kind} {name}".strip(), Opinions(prediction.to("cpu"), _count(model))
    elif kind == "BN3":
        seen = images.split("train").prepared()[:NORM_ROWS].to(x.device)
        for width in WIDTHS:
            small = narrow(model, width).to(x.device).eval()
            update_norm(small, seen)
            yield f"BN3 {width:g}", Opinions(_predict(small, x), _count(mean(small)))
    else:
        plain = model if isinstance(model, Ensemble) else mean(model)
        yield kind, Opinions(_predict(model, x), _count(plain))


def judge(opinions: Opinions, images: AnnotatedImages) -> dict[str, float]:
    """Return the figures of a model: energy distances by samples, matched overlap, calibration of pixels, size.

    Where the law of the annotators is known, also how often each of its modes was sampled, and by how many points that
    differs from the truth at most, over all images and over thirds of them by their brightness.
    """
    test = images.split("test")
    masks, annotations, counts = opinions.masks.bool(), test.annotations.transpose(0, 1).bool(), test.annotators
    pixels = pixel_calibration(opinions.prediction.mean, annotations, annotators=counts)
    found = {
        f"ged {count}": float(energy_distance(masks[:count], annotations, annotators=counts).mean())
        for count in SAMPLES
    }
    found["matched iou"] = float(matched_iou(masks, annotations, annotators=counts).mean())
    found |= {"ece": float(pixels.ece), "vote error": float(pixels.vote_error)}
    found["marked"] = float(masks.double().mean())
    if isinstance(test, AmbiguousImages):
        found |= _modes(mode_frequencies(masks, test.modes), test.probabilities)
    return found | {"parameters": opinions.parameters}


@torch.no_grad()
def code_use(model: ProbabilisticUNet, images: AnnotatedImages) -> Numbers:
    """Return what every dimension of the code tells of an annotation, in nats, and how often prior codes use it."""
    test = images.split("test")
    device = next(model.parameters()).device
    x, y = test.prepared().to(device), test.draw_targets(torch.Generator().manual_seed(0)).to(device)
    prior = model.prior(x)
    planes = one_hot(y, model.num_classes).movedim(-1, 1).float()
    told = gaussian_kl(model.posterior(torch.cat([x, planes], 1)), prior)
    return {"nats": told.mean(0).tolist(), "used": prior.keep.mean(0).tolist()}


def truth(images: AnnotatedImages) -> Numbers:
    """Return what a perfect network would have: where no law is known, only the share of marked pixels."""
    test = images.split("test")
    exist = torch.arange(test.annotations.shape[1]) < test.annotators[:, None]
    found: Numbers = {"marked": float(test.annotations[exist].double().mean()), "images": len(test)}
    if isinstance(test, AmbiguousImages):
        people = int(test.annotators[0])
        for count in SAMPLES:
            best = optimal_energy_distance(test.modes, test.probabilities, annotators=people, samples=count)
            found[f"ged {count}"] = float(best.mean())
        found |= _modes(test.probabilities, test.probabilities)
    return found


def _modes(frequencies: Tensor, probabilities: Tensor) -> dict[str, float]:
    """Compare frequencies of modes (N, M) with their probabilities: the first mode is the likelier the brighter."""
    apart = 100 * (frequencies - probabilities)
    found = {f"mode {number}": float(share) for number, share in enumerate(frequencies.mean(0))}
    thirds = zip(THIRDS, probabilities[:, 0].argsort().tensor_split(len(THIRDS)), strict=True)
    by_third = {f"points off, {name}": float(apart[rows].mean(0).abs().max()) for name, rows in thirds}
    return found | {"points off": float(apart.mean(0).abs().max())} | by_third


def _predict(model: nn.Module, x: Tensor) -> Prediction:
    return predict(model, x, samples=max(SAMPLES)).to("cpu")


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
