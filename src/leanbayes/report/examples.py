"""Galleries: test inputs that a network is most and least sure of, as cards of images or as rows of real targets."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leanbayes.evaluation.statistics import number
from leanbayes.report.load import Contender, Group, Run

CARDS = 4  # on a shelf of a gallery
CLASSES = 4  # bars on a card
IMAGE_LIMIT = 60_000  # characters of one image; larger ones would make the page heavy
SHELVES = {"certain": "Most certain", "uncertain": "Least certain", "epistemic": "Most epistemic uncertainty"}
PNG = b"\x89PNG\r\n\x1a\n"
TARGET_HEADS = {  # numbers of a row with a real target, and their heads
    "row": "Row",
    "target": "True",
    "predicted": "Predicted",
    "low": "Interval from",
    "high": "to",
    "std": "Std",
    "epistemic_std": "Epistemic std",
}


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
class TargetRow:
    """One test row with a real target: its number, the numbers as text, and whether the interval holds the target."""

    cells: tuple[str, ...]
    inside: bool


@dataclass(frozen=True)
class Gallery:
    """The cards of one contender and one seed, or its rows of real targets, by shelf."""

    contender: Contender
    seed: str
    shelves: list[tuple[str, list[Card]]]
    tables: list[tuple[str, list[TargetRow]]]


def galleries(group: Group) -> list[Gallery]:
    """Return a gallery for each contender with examples, from its first seed that has some."""
    found = []
    for contender in group.contenders:
        for run in contender.runs:
            regression = group.task == "regression"
            shelves = [] if regression else [(title, _cards(run, name)) for name, title in SHELVES.items()]
            tables = [(title, _target_rows(run, name)) for name, title in SHELVES.items()] if regression else []
            if any(rows for _, rows in (*shelves, *tables)):
                shown = [(title, cards) for title, cards in shelves if cards]
                found.append(Gallery(contender, run.seed, shown, [(title, rows) for title, rows in tables if rows]))
                break
    return found


def _target_rows(run: Run, shelf: str) -> list[TargetRow]:
    """Read rows of real targets; an interval that lacks the target is marked."""
    found = []
    for row in run.rows("figures", "examples", shelf):
        values = {name: number(row.get(name)) for name in TARGET_HEADS}
        known = {name: value for name, value in values.items() if value is not None}
        if len(known) == len(values):
            inside = known["low"] <= known["target"] <= known["high"]
            found.append(TargetRow(tuple(_number(name, value, known) for name, value in known.items()), inside))
    return found


def _number(name: str, value: float, row: Mapping[str, float]) -> str:
    """Write a number of a row to four digits; ends of an interval that lies far from zero have more."""
    if name == "row":
        return f"{value:.0f}"
    width = row["high"] - row["low"]
    far = max(abs(row["low"]), abs(row["high"])) / width if 0 < width < math.inf and not name.endswith("std") else 1.0
    return f"{value:.{4 + max(0, math.floor(math.log10(far)))}g}"


def _cards(run: Run, shelf: str) -> list[Card]:
    names = run.part("data", "classes")
    names = [str(name) for name in names] if isinstance(names, list) else []
    return [_card(row, names) for row in run.rows("figures", "examples", shelf)[:CARDS]]


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
    return names[index] if isinstance(index, int) and 0 <= index < len(names) else str(index)


def _bars(row: Mapping[str, Any], names: list[str]) -> list[Bar]:
    """Return bars of the most probable classes; the true class is always among them."""
    given = (row.get(name) for name in ("probabilities", "spread"))
    chances, stds = ([number(v) or 0.0 for v in values] if isinstance(values, list) else [] for values in given)
    stds += [0.0] * (len(chances) - len(stds))
    order = sorted(range(len(chances)), key=lambda i: -chances[i])[:CLASSES]
    label = row.get("label")
    if isinstance(label, int) and 0 <= label < len(chances) and label not in order:
        order[-1] = label
    bars = []
    for i in order:
        low, high = max(chances[i] - stds[i], 0.0), min(chances[i] + stds[i], 1.0)
        bars.append(Bar(_name(i, names), 100 * chances[i], 100 * low, 100 * high, i == label))
    return bars


def _image(text: Any) -> str | None:
    """Return an image as a data address; None if it is no PNG or too large."""
    if not isinstance(text, str) or len(text) > IMAGE_LIMIT:
        return None
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return f"data:image/png;base64,{text}" if content.startswith(PNG) else None
