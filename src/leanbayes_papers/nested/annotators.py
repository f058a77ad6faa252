"""Figure 14 of the nested paper: segmentation where annotators disagree, and a made-up set with known probabilities.

The squared energy distance of samples s and annotators y is 2 E d(s, y) - E d(s, s') - E d(y, y'), with d = 1 - IoU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.data import AnnotatedImages
from leanbayes.data.annotated.ambiguous import AmbiguousImages, mode_frequencies, optimal_energy_distance
from leanbayes.generative import ProbabilisticUNet
from leanbayes.generative.codes import gaussian_kl
from leanbayes.metrics.segmentation import energy_distance, iou, matched_iou, pixel_calibration
from leanbayes_papers.harness import group, plot_rows, Record, Run, Study, Suite, Table
from leanbayes_papers.harness.charts import grid, new_figure, save_figure, show
from leanbayes_papers.nested import PAPER
from leanbayes_papers.nested.segmenters import DIMENSIONS, images_of, KINDS, Scale, segmenter

DATA = {"quick": ("ambiguous",), "short": ("ambiguous", "bsds500"), "full": ("bsds500",)}
USUAL = (32, 64, 128, 192)
SCALES = {
    ("quick", "ambiguous"): Scale(widths=(8, 8, 16), epochs=16, batch_size=10, lr=4e-3, members=2, images=(200, 100)),
    ("short", "ambiguous"): Scale(widths=(16, 32, 64), epochs=60, batch_size=32, lr=1e-3, members=4),
    ("short", "bsds500"): Scale(widths=USUAL, epochs=100, batch_size=10, lr=5e-4, members=4, flip=True),
    ("full", "bsds500"): Scale(widths=USUAL, epochs=400, batch_size=10, lr=5e-4, members=4, flip=True),
}
SAMPLES = (1, 4, 8, 16)
WIDTHS = (0.25, 0.5, 1.0)
# Code lengths of VND-PUNet: a third, all, and as its prior draws them.
LENGTHS = {"1/3": DIMENSIONS // 3, "full": DIMENSIONS, "as drawn": None}
NORM_ROWS = 256  # training images over which the norms of BN3 collect their statistics at every width
THRESHOLD_SAMPLES = 4  # draws from which a threshold is computed
THIRDS = ("faint", "middle", "bright")
TABLE = Table.of("nested", "annotators")
DISTANCES, BALANCED, OTHERS = TABLE.columns[:4], TABLE.columns[4:8], TABLE.columns[8:]
MODES, CODES, APART = (Table.of("nested", name) for name in ("modes", "codes", "apart"))


def nested_annotators(run: Run) -> Suite:
    """Energy distance to several annotators: U-Nets, P-UNet, VND-PUNet and BN3 at every width (Figure 14)."""
    found = [one for data in DATA[run.budget] for one in studies(data, SCALES[run.budget, data])]
    return Suite(paper=PAPER, studies=tuple(found))


def studies(data: str, scale: Scale) -> tuple[Study, Study]:
    """Return both studies of one set."""
    known, words = data == "ambiguous", {"data": data}
    distances = DISTANCES if known else (*DISTANCES, *BALANCED)
    tables = (Table(by=("model",), columns=(*distances, *OTHERS)), MODES if known else APART, CODES)
    plot = partial(plot_rows, table=Table(by=("model",), columns=distances[-len(SAMPLES) :]))
    return (
        Study.of("nested", "annotators", words, measure=partial(measure, scale=scale), tables=tables, plot=plot),
        Study.of("nested", "masks", words, measure=partial(measure_masks, scale=scale), plot=plot_masks),
    )


def measure(run: Run, *, data: str, scale: Scale) -> list[Record]:
    """Train every kind of network and evaluate its opinions; codes are those of the first seed."""
    images = images_of(data, scale.images, run.root)
    records = [{"model": "optimum", "images": len(images.split("test"))} | truth(images)]
    for seed in run.seeds:
        for kind in KINDS:
            model = run.train(segmenter(run, kind, data, scale), seed).model
            records += [
                {"model": name, "seed": seed} | evaluate(found, images) for name, found in variants(kind, model, images)
            ]
            if isinstance(model, ProbabilisticUNet) and seed == run.seeds[0]:
                use = zip(*code_use(model, images).values(), strict=True)
                records += [{"code": kind, "dimension": k, "nats": n, "used": u} for k, (n, u) in enumerate(use, 1)]
    return records


class Opinions(NamedTuple):
    """Predictions of a model for all test images."""

    prediction: lb.Prediction  # of every pixel, with the largest number of samples
    parameters: int  # of the predicting network, at its width
    threshold: float | None = None  # above it, as many pixels are marked as annotators mark; None: one half is right

    @property
    def masks(self) -> Tensor:
        """Masks (S, B, H, W): the likeliest class of every pixel, draw by draw."""
        return _marked(self.prediction) > 0.5

    @property
    def balanced(self) -> Tensor:
        """Masks with as many marked pixels as the annotators', draw by draw."""
        return _marked(self.prediction) > (0.5 if self.threshold is None else self.threshold)


def variants(kind: str, model: nn.Module, images: AnnotatedImages) -> Iterator[tuple[str, Opinions]]:
    """Yield the opinions of a trained model on the test images, at each of its code lengths or widths."""
    device = next(model.parameters()).device
    if isinstance(model, ProbabilisticUNet):
        for name, length in (LENGTHS if model.ordered else {"": None}).items():
            ask = partial(model.predict, samples=max(SAMPLES), length=length)
            yield f"{kind} {name}".strip(), _opinions(ask, images, model)
    elif kind == "BN3":
        seen = images.split("train").prepared()[:NORM_ROWS].to(device)
        for width in WIDTHS:
            small = lb.slim.narrow(model, width).to(device).eval()
            lb.update_norm(small, seen)
            ask = partial(lb.predict, small, samples=max(SAMPLES))
            yield f"BN3 {width:g}", _opinions(ask, images, lb.mean(small))
    else:
        plain = model if kind == "ensemble" else lb.mean(model)
        yield kind, _opinions(partial(lb.predict, model, samples=max(SAMPLES)), images, plain)


def _opinions(ask: Callable[[Tensor], lb.Prediction], images: AnnotatedImages, counted: nn.Module) -> Opinions:
    """Predict the test images; if no probabilities are known, also the validation images for a threshold."""
    prediction = ask(images.split("test").prepared()).to("cpu")
    parameters = sum(parameter.numel() for parameter in counted.parameters())
    if isinstance(images, AmbiguousImages):
        return Opinions(prediction, parameters)
    held_out = images.split("val")
    marked = _marked(ask(held_out.prepared()).to("cpu"))[:THRESHOLD_SAMPLES].flatten().sort().values
    return Opinions(prediction, parameters, float(marked[int((1 - _share(held_out)) * (len(marked) - 1))]))


def evaluate(opinions: Opinions, images: AnnotatedImages) -> dict[str, float]:
    """Return energy distances by samples, matched overlap, calibration of pixels, and size.

    If the probabilities of the opinions are known, also the frequency of each, and its largest distance from the truth
    in points, over all images and over thirds of them by brightness. Else also the distances of balanced masks.
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
def code_use(model: ProbabilisticUNet, images: AnnotatedImages) -> dict[str, list[float]]:
    """Return the information of every code dimension on an annotation, in nats, and how often prior codes use it."""
    test = images.split("test")
    device = next(model.parameters()).device
    x, y = test.prepared().to(device), test.draw_targets(torch.Generator().manual_seed(0)).to(device)
    prior = model.prior(x)
    planes = F.one_hot(y, model.num_classes).movedim(-1, 1).float()
    nats = gaussian_kl(model.posterior(torch.cat([x, planes], 1)), prior)
    return {"nats": nats.mean(0).tolist(), "used": prior.keep.mean(0).tolist()}


def truth(images: AnnotatedImages) -> dict[str, float]:
    """Return the measures of a perfect network; an estimate from annotators if no probabilities are known.

    With D the distance of two annotators of an image, its expected energy distance is D (1 / annotators + 1 / samples).
    `one pixel` shows how strict the distance is: that of a mask to itself one pixel to the right.
    """
    test = images.split("test")
    found = {"marked": _share(test)}
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
    people = len(masks)
    return (1 - iou(masks[:, None], masks[None])).sum() / max(1, people * (people - 1))


def _modes(frequencies: Tensor, probabilities: Tensor) -> dict[str, float]:
    """Compare frequencies of modes (N, M) with their probabilities: the first mode is the likelier the brighter."""
    apart = 100 * (frequencies - probabilities)
    found = {f"mode {number}": float(share) for number, share in enumerate(frequencies.mean(0))}
    thirds = zip(THIRDS, probabilities[:, 0].argsort().tensor_split(len(THIRDS)), strict=True)
    by_third = {f"points off, {name}": float(apart[rows].mean(0).abs().max()) for name, rows in thirds}
    return found | {"points off": float(apart.mean(0).abs().max())} | by_third


def _marked(prediction: lb.Prediction) -> Tensor:
    if prediction.samples is None or prediction.samples.shape[2] != 2:
        raise ValueError("expected a prediction of two classes with its samples, got another; keep the samples")
    return prediction.samples[:, :, 1]


def _share(images: AnnotatedImages) -> float:
    exist = torch.arange(images.annotations.shape[1]) < images.annotators[:, None]
    return float(images.annotations[exist].double().mean())


def _distances(masks: Tensor, images: AnnotatedImages, name: str) -> dict[str, float]:
    annotations = images.annotations.transpose(0, 1).bool()
    distances = {n: energy_distance(masks[:n], annotations, annotators=images.annotators) for n in SAMPLES}
    return {f"{name} {count}": float(distance.mean()) for count, distance in distances.items()}


# ------------------------------------------------------------------------------------ pictures of masks

IMAGES, MASKS = 3, 4
TILE, LABEL = 0.6, 1.5  # inches of the height of a mask, and of the names next to them


def measure_masks(run: Run, *, data: str, scale: Scale) -> list[Record]:
    """Return a few test images, and the first masks of annotators and of the models of the first seed."""
    images = images_of(data, scale.images, run.root)
    found: dict[str, Tensor] = {}
    for kind in KINDS:
        model = run.train(segmenter(run, kind, data, scale), run.seeds[0]).model
        found |= {name: opinions.balanced for name, opinions in variants(kind, model, images)}
    return pack_masks(images, found)


def pack_masks(images: AnnotatedImages, masks: dict[str, Tensor]) -> list[Record]:
    """Return images and masks (S, B, H, W) of each model as hex: one record for each image, and for each row of it."""
    test = images.split("test")
    records: list[Record] = []
    for k, i in enumerate((torch.arange(IMAGES) * len(test) // IMAGES).tolist()):
        raw = test.images[i]
        raw = raw if raw.dtype == torch.uint8 else (255 * raw).round().byte()
        records.append({"image": k, "shape": list(raw.shape), "pixels": raw.numpy().tobytes().hex()})
        rows = {"annotators": test.annotations[i, : min(MASKS, int(test.annotators[i]))]}
        rows |= {name: each[:MASKS, i] for name, each in masks.items()}
        for name, few in rows.items():
            packed = [np.packbits(mask.numpy().astype(bool)).tobytes().hex() for mask in few]
            records.append({"image": k, "model": name, "masks": packed})
    return records


def plot_masks(records: list[Record], path: Path) -> None:
    """Show a column for each image, the image on top, and a row of masks for the annotators and each model."""
    columns = group(records, ("image",))
    names = ["image", *(record["model"] for record in next(iter(columns.values())) if "model" in record)]
    channels, height, width = records[0]["shape"]
    figure = new_figure(TILE * width / height * MASKS * len(columns) + LABEL, TILE * len(names))
    for axis, (image, *rows) in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns.values(), strict=True):
        pixels = torch.tensor(list(bytes.fromhex(image["pixels"]))).view(channels, height, width) / 255
        masks = [[1.0 - unpack_mask(mask, height, width) for mask in row["masks"]] for row in rows]
        tiles = [[pixels[:3].expand(3, -1, -1)], *([mask.expand(3, -1, -1) for mask in row] for row in masks)]
        show(axis, grid(tiles), "", names if axis is figure.axes[0] else ["" for _ in names])
    save_figure(figure, path)


def unpack_mask(text: str, height: int, width: int) -> Tensor:
    """Return a mask (H, W) of zeros and ones."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=height * width)
    return torch.from_numpy(bits).view(height, width).float()
