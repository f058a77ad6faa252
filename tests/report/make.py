"""Make result files that look like those of real runs."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# name: (accuracy, NLL, ECE, extra parameters %, training step, predict, epistemic share)
METHODS = {
    "plain": (0.941, 0.232, 0.031, 0.0, 1.0, 1.0, 0.0),
    "batch_ensemble": (0.944, 0.205, 0.024, 0.41, 1.12, 1.01, 0.1),
    "deep_ensemble": (0.957, 0.148, 0.009, 300.0, 4.02, 1.0, 0.3),
    "dropconnect": (0.940, 0.214, 0.021, 0.0, 1.08, 1.05, 0.12),
    "implicit": (0.947, 0.181, 0.013, 0.39, 1.09, 1.02, 0.22),
    "mc_dropout": (0.942, 0.209, 0.018, 0.0, 1.03, 1.04, 0.15),
    "mean_field": (0.931, 0.241, 0.015, 100.0, 1.31, 1.42, 0.2),
    "patch": (0.946, 0.195, 0.019, 1.8, 1.05, 1.01, 0.14),
    "rank1": (0.950, 0.166, 0.011, 0.78, 1.13, 1.03, 0.25),
    "variance": (0.943, 0.201, 0.020, 0.01, 1.22, 1.1, 0.18),
}
CORRUPTIONS = ("gaussian_noise", "blur", "contrast", "rotation")
CLASSES = [str(digit) for digit in range(10)]


def target_row(row: int, epistemic: float, rng: np.random.Generator) -> dict[str, float]:
    """Return a prediction of a real target with its interval."""
    target = 10.0 + 2 * row
    predicted = float(target + 5 * rng.standard_normal())
    ends = {"low": predicted - 9.8, "high": predicted + 9.8}
    return {"row": row, "target": target, "predicted": predicted, **ends, "std": 5.0, "epistemic_std": 2 * epistemic}


def tree(root: Path, methods: dict[str, tuple[float, ...]] = METHODS, seeds: int = 3, **kwargs: Any) -> Path:
    """Write classification results OUT/<data>/<net>/<method>/seed<k>/result.json and return OUT."""
    for name in methods:
        for seed in range(seeds):
            write(root, classification(name, seed, methods[name], **kwargs))
    return root


def regression_tree(root: Path, seeds: int = 3) -> Path:
    """Write regression results and return their folder."""
    for name in ("plain", "deep_ensemble", "mean_field", "rank1"):
        for seed in range(seeds):
            write(root, regression(name, seed))
    return root


def write(root: Path, record: dict[str, Any], folder: str | None = None) -> Path:
    """Write one result where `leanbayes compare` would."""
    names = (record["data"]["name"], record["network"]["name"], folder or record["method"]["name"])
    path = root.joinpath(*(name.replace("/", "_") for name in names), f"seed{record['seed']}", "result.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def record(name: str, seed: int, data: str, net: str, task: str) -> dict[str, Any]:
    """Return what every result has, without metrics."""
    return {
        "schema": 1, "id": f"{data}-{net}-{name}-{seed}", "status": "done", "error": None,
        "command": f"leanbayes compare --data {data} --net {net} --methods plain,rank1 --seeds 0,1,2 --out runs/{data}",
        "created": f"2026-03-0{seed + 1}T10:00:00Z", "commit": "4f1c2d7a9b3e", "seed": seed,
        "method": {"name": name, "fields": {"components": 4} if name in ("rank1", "deep_ensemble") else {}},
        "network": {"name": net, "parameters": 61706},
        "data": {"name": data, "task": task, "train": 1437, "test": 360, "sha256": "9f" * 32, "classes": CLASSES},
        "recipe": {"epochs": 30, "batch_size": 64, "lr": 0.1, "schedule": "cosine", "clip_norm": None, "seed": seed},
        "metrics": {}, "cost": {}, "figures": {}, "history": [],
        "environment": {
            "python": "3.12.4", "torch": "2.13.0", "leanbayes": "0.1.0", "device": "cpu (x86_64)", "threads": 1,
        },
    }  # fmt: skip


def failed(name: str, seed: int, error: str) -> dict[str, Any]:
    """Return the result of a run that failed."""
    return record(name, seed, "digits", "lenet", "classification") | {"status": "failed", "error": error}


def classification(
    name: str, seed: int, figures: tuple[float, ...], *, data: str = "digits", net: str = "lenet"
) -> dict[str, Any]:
    """Return a result on classes around the given figures, with noise that depends on name and seed."""
    accuracy, nll, ece, extra, train, predict, epistemic = figures
    rng = np.random.default_rng([seed, *name.encode()])

    def noisy(value: float, share: float = 0.02) -> float:
        return float(value * (1 + share * rng.standard_normal()))

    result = record(name, seed, data, net, "classification")
    accuracy, nll, ece = noisy(accuracy, 0.002), noisy(nll), noisy(ece, 0.06)
    result["metrics"] = {
        "test": {
            "accuracy": accuracy, "nll": nll, "brier": noisy(0.4 * nll), "ece": ece, "mce": 4 * ece, "cnll": 0.94 * nll,
            "temperature": noisy(1 + 5 * ece), "aurc": noisy(0.05 * nll), "disagreement": noisy(0.1 * epistemic),
            "top5": 0.998, "ece20": 1.1 * ece, "adaptive_ece": 0.9 * ece, "classwise_ece": 0.2 * ece,
        },
        "ood": {
            other: detection(min(noisy(level - 0.2 * nll, 0.004), 0.9999))
            for other, level in (("letters", 0.98), ("noise", 0.995))
        },
        "shift": shift(accuracy, nll, ece, epistemic, noisy),
    }  # fmt: skip
    result["cost"] = {
        "parameters": 61706, "extra_parameters": round(617.06 * extra), "extra_percent": extra,
        "train_step_ratio": noisy(train) if train != 1 else 1.0,
        "predict_ratio": noisy(predict) if predict != 1 else 1.0,
        "passes": {"plain": 1, "deep_ensemble": 4}.get(name, 16),
        "answer_ms": 0.02 * predict * {"plain": 1, "deep_ensemble": 4}.get(name, 16),
        "answer_ms_one": 0.3 * predict * {"plain": 1, "deep_ensemble": 4}.get(name, 16),
        "train_seconds": noisy(74 * train), "peak_memory_mb": noisy(310 * (1 + extra / 300)),
    }  # fmt: skip
    if name != "plain":
        result["cost"]["layers"] = {"converted": 3, "total": 12, "skipped": [f"lstm: LSTM, not a target of {name}"]}
    result["figures"] = {
        "reliability": {"bins": reliability(ece, rng)},
        "histograms": {"total": histogram(nll, math.log(10), rng), "epistemic": histogram(epistemic * nll, 0.7, rng)},
        "log_histograms": {"total": log_histogram(nll), "epistemic": log_histogram(epistemic * nll)},
        "selective": {"coverage": [i / 20 for i in range(1, 21)],
                      "accuracy": [1 - (1 - accuracy) * (i / 20) ** 3 for i in range(1, 21)]},
        "confusion": [[34 if i == j else int(i == j + 1) for j in range(10)] for i in range(10)],
        "examples": {kind: examples(kind, epistemic, rng) for kind in ("certain", "uncertain", "epistemic")},
    }  # fmt: skip
    result["history"] = [
        {"epoch": e, "loss": nll + 2 * math.exp(-e / 5) + 0.1 * epistemic, "nll": 0.6 * nll + 2 * math.exp(-e / 5),
         "valid_nll": 0.8 * nll + 2 * math.exp(-e / 5),
         "kl": 4000 * epistemic * math.exp(-e / 20), "beta": 1.0, "lr": 0.1, "seconds": 2.4}
        for e in range(1, 31)
    ]  # fmt: skip
    return result


def detection(auroc: float) -> dict[str, Any]:
    """Return how well out-of-distribution inputs are detected."""
    scores = {
        score: {"auroc": auroc - i / 100, "aupr": auroc - 0.02, "fpr95": 3 * (1 - auroc)}
        for i, score in enumerate(("entropy", "mutual_information", "confidence"))
    }
    return {**scores["entropy"], "by": "entropy", "scores": scores}


def shift(accuracy: float, nll: float, ece: float, epistemic: float, noisy: Any) -> list[dict[str, Any]]:
    """Return rows under corruption that get worse with severity."""
    rows = []
    for corruption, strength in [("clean", 0.0), *zip(CORRUPTIONS, (1.0, 0.7, 0.5, 1.3), strict=True)]:
        for severity in (0,) if corruption == "clean" else range(1, 6):
            harm = strength * severity / 5
            rows.append({
                "corruption": corruption, "severity": severity, "accuracy": noisy(accuracy * (1 - 0.45 * harm), 0.004),
                "nll": noisy(nll * (1 + 6 * harm)), "ece": noisy(ece * (1 + 7 * harm)),
                "epistemic": noisy(0.4 * epistemic * (0.1 + harm)), "aleatoric": noisy(0.15 + 0.5 * harm),
            })  # fmt: skip
    return rows


def reliability(ece: float, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return 15 bins less the lowest three, which are empty."""
    bins = []
    for i in range(3, 15):
        confidence = (i + 0.5) / 15
        accuracy = confidence - 6 * ece * math.sin(math.pi * confidence) + 0.03 * rng.standard_normal()
        bins.append({"confidence": confidence, "accuracy": float(np.clip(accuracy, 0, 1)), "count": int(3 + i**2.2)})
    return bins


def histogram(scale: float, top: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return shares of test inputs near zero and of out-of-distribution inputs farther off."""
    edges = np.linspace(0, top * rng.uniform(0.9, 1), 31)

    def shares(mean: float) -> list[float]:
        values = np.minimum(rng.gamma(2, max(mean, 0) / 2 + 1e-9, 2000), edges[-1])
        return [float(share) for share in np.histogram(values, edges)[0] / 2000]

    return {
        "edges": edges.tolist(),
        "counts": {"test": shares(scale), "letters": shares(6 * scale), "noise": shares(4 * scale)},
    }


def log_histogram(mean: float) -> dict[str, Any]:
    """Return shares between edges 10^(k / 5) of two exponential distributions; all below if the mean is zero."""
    edges = [10 ** (k / 5) for k in range(-20, 3)] if mean else []
    sets = {"test": mean, "letters": 6 * mean, "noise": 4 * mean}

    def share(scale: float, low: float, high: float) -> float:
        return math.exp(-low / scale) - math.exp(-high / scale)

    return {
        "edges": edges,
        "counts": {name: [share(m, *ends) for ends in itertools.pairwise(edges)] for name, m in sets.items()},
        "below": {name: share(m, 0, edges[0]) if mean else 1.0 for name, m in sets.items()},
    }


def examples(kind: str, epistemic: float, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return real digits with made-up predictions."""
    images, targets = digits()
    found = []
    for i in rng.integers(0, len(images), 6):
        label, sharp = int(targets[i]), 9.0 if kind == "certain" else 1.2
        logits = rng.standard_normal(10)
        logits[label] += sharp
        p = np.exp(logits) / np.exp(logits).sum()
        total = float(-(p * np.log(p)).sum())
        found.append({
            "image": png(images[i] * 15), "label": label, "predicted": int(p.argmax()),
            "probabilities": p.tolist(), "spread": (epistemic * np.sqrt(p * (1 - p))).tolist(),
            "total": total, "aleatoric": total * (1 - epistemic), "epistemic": total * epistemic,
        })  # fmt: skip
    return found


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels that come with scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images, found.target


def png(pixels: np.ndarray) -> str:
    """Return an image as a base64 PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def regression(name: str, seed: int) -> dict[str, Any]:
    """Return a result on real targets."""
    rng = np.random.default_rng([seed, *name.encode()])
    gain = {"plain": 0.0, "deep_ensemble": 0.25, "mean_field": 0.02, "rank1": 0.15}[name]
    result = record(name, seed, "concrete", "mlp", "regression")
    result["data"]["classes"] = []
    result["metrics"] = {"test": {
        "rmse": 5.8 - 3 * gain + 0.05 * rng.standard_normal(),
        "lpd": -6.3864 + gain / 100 + 0.0001 * rng.standard_normal(),
        "crps": 3.1 - gain + 0.02 * rng.standard_normal(), "coverage": 0.91 + gain / 8,
    }}  # fmt: skip
    _, _, _, extra, train, predict, _ = METHODS[name]
    result["cost"] = {
        "parameters": 8000,
        "extra_percent": extra,
        "train_step_ratio": train,
        "predict_ratio": predict,
        "passes": {"plain": 1, "deep_ensemble": 4}.get(name, 16),
        "train_seconds": 9.1,
    }
    levels = [(i + 1) / 11 for i in range(10)]
    result["figures"] = {
        "reliability": {"levels": [{"level": level, "coverage": level ** (1.3 - gain)} for level in levels]},
        "histograms": None, "predicted": {"level": 0.95, "rows": [target_row(i, gain, rng) for i in range(40)]},
        "selective": {"coverage": [i / 20 for i in range(1, 21)], "rmse": [3 + i / 10 for i in range(1, 21)]},
        "examples": {kind: [target_row(i, gain, rng) for i in range(6)] for kind in ("certain", "uncertain")},
    }  # fmt: skip
    result["history"] = [
        {"epoch": e, "loss": 3.5 + math.exp(-e / 4), "nll": 3.2 + math.exp(-e / 4), "kl": 0.0} for e in range(1, 21)
    ]
    return result
