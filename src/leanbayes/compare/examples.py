"""Test images worth looking at: where the model is surest, least sure, and where its draws differ most."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.prediction import Prediction

SHOWN = 6
"""Images of each kind."""


def examples(p: Prediction, y: Tensor, images: Tensor | None) -> dict[str, list[dict[str, Any]]]:
    """Return the most certain rows, the least certain, and those with most epistemic uncertainty."""
    order = p.total.argsort(stable=True)
    chosen = {
        "certain": order[:SHOWN],
        "uncertain": order.flip(0)[:SHOWN],
        "epistemic": p.epistemic.argsort(descending=True, stable=True)[:SHOWN],
    }
    return {kind: [_example(p, y, images, int(row)) for row in rows] for kind, rows in chosen.items()}


def _example(p: Prediction, y: Tensor, images: Tensor | None, row: int) -> dict[str, Any]:
    spread = torch.zeros_like(p.mean[row]) if p.samples is None else p.samples[:, row].std(0, correction=0)
    return {
        "image": None if images is None else png(images[row]),
        "label": int(y[row]),
        "predicted": int(p.mean[row].argmax()),
        "probabilities": [round(value, 5) for value in p.mean[row].tolist()],
        "spread": [round(value, 5) for value in spread.tolist()],
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
