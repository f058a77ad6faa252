"""Galleries: the most and the least certain test inputs of each contender, as cards."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leanbayes.evaluation.statistics import number
from leanbayes.report.load import Contender, Group, Run

SHOWN = 4  # cards on a shelf
CLASSES = 4  # bars on a card
IMAGE_LIMIT = 60_000  # characters of one image; larger ones would make the page heavy
SHELVES = {"certain": "Most certain", "uncertain": "Least certain", "epistemic": "Most epistemic uncertainty"}
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Bar:
    """The probability of one class, in percent, with one standard deviation between draws on either side."""

    name: str
    percent: float
    low: float
    high: float
    is_label: bool


@dataclass(frozen=True)
class Card:
    """One test input: image, true class, predicted class, probabilities and uncertainties."""

    image: str | None
    label: str
    predicted: str
    right: bool
    bars: list[Bar]
    uncertainties: list[tuple[str, str]]


@dataclass(frozen=True)
class Gallery:
    """The cards of one contender and one seed, by shelf."""

    contender: Contender
    seed: str
    shelves: list[tuple[str, list[Card]]]


def galleries(group: Group) -> list[Gallery]:
    """Return a gallery for each contender with examples."""
    found = []
    for contender in group.contenders:
        for run in contender.runs:
            shelves = [(title, _cards(run, name)) for name, title in SHELVES.items()]
            if any(cards for _, cards in shelves):
                found.append(Gallery(contender, run.seed, [(title, cards) for title, cards in shelves if cards]))
                break
    return found


def _cards(run: Run, shelf: str) -> list[Card]:
    names = run.part("data", "classes")
    names = [str(name) for name in names] if isinstance(names, list) else []
    return [_card(row, names) for row in run.rows("figures", "examples", shelf)[:SHOWN]]


def _card(row: Mapping[str, Any], names: list[str]) -> Card:
    label, predicted = row.get("label"), row.get("predicted")
    measured = ((kind, number(row.get(kind))) for kind in ("epistemic", "aleatoric"))
    return Card(
        image=_image(row.get("image")),
        label=_name(label, names),
        predicted=_name(predicted, names),
        right=label == predicted,
        bars=_bars(row, names),
        uncertainties=[(kind, f"{value:.3f}") for kind, value in measured if value is not None],
    )


def _name(index: Any, names: list[str]) -> str:
    known = isinstance(index, int) and 0 <= index < len(names)
    return names[index] if known else str(index)


def _bars(row: Mapping[str, Any], names: list[str]) -> list[Bar]:
    chances, stds = _numbers(row.get("probabilities")), _numbers(row.get("spread"))
    stds += [0.0] * (len(chances) - len(stds))
    order = sorted(range(len(chances)), key=lambda i: -chances[i])[:CLASSES]
    label = row.get("label")
    if isinstance(label, int) and 0 <= label < len(chances) and label not in order:
        order[-1] = label
    return [
        Bar(
            name=_name(i, names),
            percent=100 * chances[i],
            low=100 * max(chances[i] - stds[i], 0.0),
            high=100 * min(chances[i] + stds[i], 1.0),
            is_label=i == label,
        )
        for i in order
    ]


def _numbers(values: Any) -> list[float]:
    return [number(value) or 0.0 for value in values] if isinstance(values, list) else []


def _image(text: Any) -> str | None:
    """Return an image as a data address; None if it is no PNG or too large."""
    if not isinstance(text, str) or len(text) > IMAGE_LIMIT:
        return None
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return f"data:image/png;base64,{text}" if content.startswith(PNG) else None
