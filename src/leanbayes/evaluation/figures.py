"""Numbers to plot: calibration, uncertainties, answers kept by certainty, confusions, predicted and true targets.

Each function returns JSON values; `figures_of` collects them. docs/design/0009 has their form.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from leanbayes import metrics as scores
from leanbayes.core.prediction import Prediction
from leanbayes.distributions.likelihoods import Gaussian

BINS = 30  # of a histogram with equal bins
BINS_PER_DECADE = 5  # of a histogram with logarithmic bins: edges 10^(k / 5), the same in all runs
DECADES = 6  # below the largest value; smaller ones count as "below"
LEAST = 1e-8  # smaller uncertainties are rounding errors of zero
LEVELS = tuple(level / 20 for level in range(1, 20))  # of the intervals whose coverage is plotted
COVERAGES = tuple(share / 20 for share in range(1, 21))  # shares of answers that are kept
MOST_CLASSES = 20  # of a confusion matrix
MOST_ROWS = 200  # of predicted and true targets
SHOWN = 6  # rows of each kind of example
LEVEL = 0.95


def figures_of(prediction: Prediction, p: Prediction, y: Tensor, others: Mapping[str, Prediction]) -> dict[str, Any]:
    """Return all figures of a prediction.

    Args:
        prediction: the prediction for the test rows.
        p: the same with a class axis: two classes for each answer of a Bernoulli likelihood.
        y: class numbers, or real targets in the units of the prediction.
        others: predictions for out-of-distribution inputs, by name.
    """
    uncertainties = {"histograms": histograms(prediction, others), "log_histograms": log_histograms(prediction, others)}
    if isinstance(prediction.likelihood, Gaussian):
        coverages = [(level, float(scores.interval_coverage(*p.interval(level), y))) for level in LEVELS]
        levels = [{"level": level, "coverage": coverage} for level, coverage in coverages]
        found = {"reliability": {"levels": levels}, **uncertainties, "selective": selective_error(p, y)}
        return found | {"predicted": predicted_rows(p, y), "examples": target_examples(p, y)}
    bins = [asdict(each) for each in scores.reliability(p.mean, y)]
    probabilities, classes = scores.flatten(p.mean, y)
    found = {"reliability": {"bins": bins}, **uncertainties, "selective": selective_accuracy(probabilities, classes)}
    few = probabilities.shape[1] <= MOST_CLASSES
    return found | ({"confusion": confusion(probabilities, classes)} if few else {})


def per_row(uncertainty: Tensor) -> Tensor:
    """Return one number for each row: the mean over its answers."""
    return uncertainty.flatten(1).mean(1) if uncertainty.dim() > 1 else uncertainty


def _uncertainties(p: Prediction, others: Mapping[str, Prediction], measure: str) -> dict[str, Tensor]:
    sets = {"test": p, **others}
    return {name: per_row(getattr(each, measure)).double() for name, each in sets.items()}


def least_of(p: Prediction) -> float:
    """Return the uncertainty below which there are rounding errors alone; variances have the scale of the target."""
    return LEAST * min(1.0, float(p.total.max())) if isinstance(p.likelihood, Gaussian) else LEAST


def _shares(values: Mapping[str, Tensor], edges: Tensor) -> dict[str, Any]:
    counts = {name: torch.histogram(rows, edges).hist / len(rows) for name, rows in values.items()}
    return {name: [round(share, 6) for share in shares.tolist()] for name, shares in counts.items()}


def histograms(p: Prediction, others: Mapping[str, Prediction]) -> dict[str, Any]:
    """Return shares of rows by uncertainty, on the same edges for the test rows and all other sets."""
    found = {}
    for measure in ("total", "epistemic"):
        values = _uncertainties(p, others, measure)
        zero = least_of(p) / 10
        top = max(zero, *(float(rows.max()) for rows in values.values()))
        edges = torch.linspace(0, top, BINS + 1, dtype=torch.float64, device="cpu")
        tiny = zero < top < 1e-3 and isinstance(p.likelihood, Gaussian)  # of a target in a large unit
        written = [float(f"{edge:.6g}") if tiny else round(edge, 6) for edge in edges.tolist()]
        found[measure] = {"edges": written, "counts": _shares(values, edges)}
    return found


def log_histograms(p: Prediction, others: Mapping[str, Prediction]) -> dict[str, Any]:
    """Return shares of rows by uncertainty between the edges 10^(k / 5), and the share below the first edge.

    An uncertainty that is zero for every row has no edges, and a share of 1 below.
    """
    found, least = {}, least_of(p)
    for measure in ("total", "epistemic"):
        values = _uncertainties(p, others, measure)
        every = torch.cat(list(values.values()))
        top, low = float(every.max()), float(every.quantile(0.001)) if len(every) < 1 << 24 else 0.0
        powers: list[int] = []
        if top > least:
            last = math.floor(BINS_PER_DECADE * math.log10(top)) + 1
            first = math.floor(BINS_PER_DECADE * math.log10(max(low, least, top * 10.0**-DECADES)))
            powers = list(range(min(first, last - 1), last + 1))
        edges = torch.tensor([10 ** (k / BINS_PER_DECADE) for k in powers], dtype=torch.float64, device="cpu")
        shares = _shares(values, edges) if powers else {name: [] for name in values}
        below = {name: float((rows < edges[0]).double().mean()) if powers else 1.0 for name, rows in values.items()}
        written = [float(f"{edge:.6g}") for edge in edges.tolist()]
        found[measure] = {"edges": written, "counts": shares, "below": {n: round(s, 6) for n, s in below.items()}}
    return found


def _kept(rows: int) -> list[int]:
    """Return numbers of rows to keep, for each share of COVERAGES; each number once."""
    return sorted({max(1, round(share * rows)) for share in COVERAGES})


def selective_accuracy(probabilities: Tensor, classes: Tensor) -> dict[str, Any]:
    """Return the accuracy of the most confident answers, by the share of answers that are kept."""
    wrong = (probabilities.argmax(1) != classes).double()
    curve = scores.risk_coverage(scores.doubt(probabilities), wrong)
    kept = [count - 1 for count in _kept(len(classes))]
    accuracy = [round(1 - float(curve.risk[i]), 6) for i in kept]
    return {"coverage": [round(float(curve.coverage[i]), 6) for i in kept], "accuracy": accuracy}


def selective_error(p: Prediction, y: Tensor) -> dict[str, Any]:
    """Return the root of the mean squared error of the most certain rows, by the share of rows that are kept."""
    square = per_row((p.mean.double() - y.double()).square())
    curve = scores.risk_coverage(per_row(p.total), square)
    kept = [count - 1 for count in _kept(len(square))]
    rmse = [float(f"{float(curve.risk[i]) ** 0.5:.6g}") for i in kept]
    return {"coverage": [round(float(curve.coverage[i]), 6) for i in kept], "rmse": rmse}


def confusion(probabilities: Tensor, classes: Tensor) -> list[list[int]]:
    """Return how many rows of each true class (down) were taken for each class (across)."""
    count = probabilities.shape[1]
    pairs = classes.long() * count + probabilities.argmax(1)
    found: list[list[int]] = torch.bincount(pairs, minlength=count * count).view(count, count).tolist()
    return found


def predicted_rows(p: Prediction, y: Tensor) -> dict[str, Any]:
    """Return predictions of the first target with their 95 % intervals, for evenly spaced rows."""
    count = len(p.mean)
    chosen = torch.linspace(0, count - 1, min(count, MOST_ROWS), device="cpu").round().long()
    return {"level": LEVEL, "rows": _targets(p, y, chosen)}


def target_examples(p: Prediction, y: Tensor) -> dict[str, Any]:
    """Return the most certain rows, the least certain rows, and those with most epistemic uncertainty."""
    order = per_row(p.total).argsort(stable=True)
    epistemic = per_row(p.epistemic).argsort(descending=True, stable=True)
    chosen = {"certain": order[:SHOWN], "uncertain": order.flip(0)[:SHOWN], "epistemic": epistemic[:SHOWN]}
    return {kind: _targets(p, y, rows) for kind, rows in chosen.items()}


def _targets(p: Prediction, y: Tensor, rows: Tensor) -> list[dict[str, Any]]:
    """Return number, target, prediction, interval and standard deviations of rows, in units of the target."""
    low, high = p.interval(LEVEL)
    columns = {
        "target": y, "predicted": p.mean, "low": low, "high": high,
        "std": p.total.clamp(min=0).sqrt(), "epistemic_std": p.epistemic.clamp(min=0).sqrt(),
    }  # fmt: skip
    picked = {name: values.reshape(len(p.mean), -1)[rows, 0].tolist() for name, values in columns.items()}
    return [
        {"row": int(row)} | {name: float(f"{values[i]:.6g}") for name, values in picked.items()}
        for i, row in enumerate(rows.tolist())
    ]


def examples(p: Prediction, y: Tensor, images: Tensor | None) -> dict[str, list[dict[str, Any]]]:
    """Return the most certain rows, the least certain rows, and those with most epistemic uncertainty."""
    order = p.total.argsort(stable=True)
    chosen = {
        "certain": order[:SHOWN],
        "uncertain": order.flip(0)[:SHOWN],
        "epistemic": p.epistemic.argsort(descending=True, stable=True)[:SHOWN],
    }
    return {kind: [_example(p, y, images, int(row)) for row in rows] for kind, rows in chosen.items()}


def _example(p: Prediction, y: Tensor, images: Tensor | None, row: int) -> dict[str, Any]:
    std = torch.zeros_like(p.mean[row]) if p.samples is None else p.samples[:, row].std(0, correction=0)
    return {
        "image": None if images is None else png(images[row]),
        "label": int(y[row]),
        "predicted": int(p.mean[row].argmax()),
        "probabilities": [round(value, 5) for value in p.mean[row].tolist()],
        "spread": [round(value, 5) for value in std.tolist()],
        "total": float(p.total[row]),
        "aleatoric": float(p.aleatoric[row]),
        "epistemic": float(p.epistemic[row]),
    }


def png(image: Tensor) -> str:
    """Return an image (C, H, W), uint8 or in [0, 1], as base64 PNG."""
    from PIL import Image

    pixels = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).round().to(torch.uint8)
    array = pixels[0].numpy() if len(pixels) == 1 else pixels[:3].permute(1, 2, 0).contiguous().numpy()
    written = io.BytesIO()
    Image.fromarray(array).save(written, format="PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()
