"""`Column`: how one column of a table becomes network inputs, fitted to training rows and stored as JSON.

| kind | inputs |
|---|---|
| number | the value; a gap gets the median of the training rows |
| boolean | 0 or 1 |
| date | those of year, month, weekday and elapsed days that vary |
| category | one input for each value of the training rows; an unseen value is 0 in all of them |
| embedding | a code with a learned vector: 0 for an unseen or rare value, 1, 2, ... for the others |

If training rows have gaps, a column of numbers, booleans or dates has one more input, 1 for a gap. In a column of text
a gap is one more value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args, Literal

import numpy as np

from leanbayes.data.cells import (
    are_gaps,
    calendar,
    GAPS,
    has_numeric_months,
    NO_NUMBERS,
    Notation,
    notation_of,
    Order,
    order_of,
    to_booleans,
    to_days,
    to_numbers,
)
from leanbayes.data.dataset import Array

Kind = Literal["number", "boolean", "date", "category", "embedding"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TYPES = (*KINDS, "comma", "day", "month")
"""Types that a user may name: a kind, numbers with a decimal comma, dates with the day or the month first."""

PARTS = ("year", "month", "weekday", "elapsed days")  # inputs of a date
FIRST_DAY, LAST_DAY = -719_162, 2_932_896  # of the calendar, 0001-01-01 and 9999-12-31, from 1970-01-01
MOST_ONE_HOT = 30  # values of a text column; more become codes of an embedding
FEWEST_OF_A_CODE = 2  # training rows of a value with its own code
NEARLY_ALL = 0.8  # share of distinct values from which text is an identifier
NEARLY_NONE = 10  # fewest distinct values of an identifier
WORDS_OF_TEXT = 5  # words a cell, on average, from which it is free text
FEW_ODD = 0.05  # share of cells that may be unreadable in a column of numbers or dates
SHOWN = 3  # odd cells in a message
_SHORTEST = 12  # characters of a cell in a message


@dataclass(frozen=True)
class Faults:
    """Numbers of gaps and of odd cells in a column, and some of the odd cells."""

    gaps: int = 0
    odd: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Column:
    """The preparation of one column.

    Attributes:
        name: name in the header.
        kind: see the table above.
        notation: decimal sign of numbers.
        order: first number of dates such as 01/02/2024.
        fill: value for a gap: the median of the training rows.
        gaps: whether training rows have gaps.
        values: values of a text column, in order.
        parts: inputs of a date.
        origin: first day of the training rows, in days since 1970-01-01.
    """

    name: str
    kind: Kind
    notation: Notation = "point"
    order: Order = "month"
    fill: float = 0.0
    gaps: bool = False
    values: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    origin: float = 0.0

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        match self.kind:
            case "category":
                return tuple(f"{self.name}={value}" for value in (*self.values, *(["(gap)"] if self.gaps else [])))
            case "embedding":
                return (f"{self.name} (code)",)
            case "date":
                own = tuple(f"{self.name} ({part})" for part in self.parts)
            case _:
                own = (self.name,)
        return (*own, f"{self.name} (gap)") if self.gaps else own

    @property
    def scaled(self) -> tuple[bool, ...]:
        """Return which inputs are standardised: numbers and parts of dates, not ones and zeros or codes."""
        count = len(self.inputs)
        measured = {"number": 1, "date": len(self.parts)}.get(self.kind, 0)
        return tuple(i < measured for i in range(count))

    @property
    def codes(self) -> int:
        """Return the number of codes of an embedding, with that of unseen values."""
        return 1 + len(self.values) + self.gaps

    def encode(self, cells: Array) -> tuple[Array, Faults]:
        """Return the inputs (n, width) of cells as text, and the faults."""
        if self.kind in ("category", "embedding"):
            return self._encode_text(cells)
        values = read(cells, self.kind, self.notation, self.order)
        bad = ~np.isfinite(values)
        filled = np.where(bad, self.fill, values)
        if self.kind == "date":
            parts = _parts(filled, self.origin)
            own = [parts[part] for part in self.parts]
        else:
            own = [filled]
        indicator = [bad.astype(np.float64)] if self.gaps else []
        return np.stack([*own, *indicator], 1), _faults(cells, bad)

    def _encode_text(self, cells: Array) -> tuple[Array, Faults]:
        number = {value: i for i, value in enumerate(self.values, 1)}
        missing = self.codes - 1 if self.gaps else 0
        gaps = are_gaps(cells)
        codes = np.array(
            [missing if gap else number.get(cell, 0) for gap, cell in zip(gaps, cells, strict=True)], np.int64
        )
        unseen = cells[(codes == 0) & ~gaps]
        faults = Faults(int(gaps.sum()), len(unseen), _some(unseen))
        if self.kind == "embedding":
            return codes[:, None].astype(np.float64), faults
        ones = np.zeros((len(codes), self.codes))
        ones[np.arange(len(codes)), codes] = 1
        return ones[:, 1:], faults

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        kept = {name: value for name, value in found.items() if value != defaults[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}

    @classmethod
    def from_json(cls, found: Any) -> Column:
        """Return the column of JSON values; raise ``ValueError`` for values of another kind."""
        known = {f.name for f in fields(cls)}
        if not isinstance(found, Mapping) or not known >= set(found) >= {"name", "kind"}:
            raise ValueError(f"expected a column with name and kind, got {str(found)[:80]!r}")
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in found.items()}
        column = cls(**values)
        for name, value in asdict(column).items():
            if not _valid(name, value):
                raise ValueError(f"column {str(column.name)[:40]!r} has the {name} {str(value)[:80]!r}")
        if column.kind == "date" and not (set(column.parts) <= set(PARTS) and FIRST_DAY <= column.fill <= LAST_DAY):
            raise ValueError(f"column {column.name[:40]!r} has parts or a fill that no date has")
        return column


def _valid(name: str, value: Any) -> bool:
    match name:
        case "name":
            return isinstance(value, str)
        case "kind":
            return value in KINDS
        case "notation":
            return value in get_args(Notation)
        case "order":
            return value in get_args(Order)
        case "gaps":
            return isinstance(value, bool)
        case "values" | "parts":
            return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    return type(value) in (int, float) and math.isfinite(value)


def read(cells: Array, kind: str, notation: Notation = "point", order: Order = "month") -> Array:
    """Return the values of cells of numbers, booleans or dates, NaN where they cannot be read."""
    match kind:
        case "boolean":
            return to_booleans(cells)
        case "date":
            return to_days(cells, order)
    return to_numbers(cells, notation)


def _parts(days: Array, origin: float) -> dict[str, Array]:
    return dict(zip(PARTS, (*calendar(days).values(), days - origin), strict=True))


def _faults(cells: Array, bad: Array) -> Faults:
    """Tell gaps from odd cells."""
    if not bad.any():
        return Faults()
    wrong = cells[bad]
    odd = wrong[~are_gaps(wrong, NO_NUMBERS)]
    return Faults(len(wrong) - len(odd), len(odd), _some(odd))


def _some(cells: Array) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cell[:_SHORTEST] for cell in cells[: 20 * SHOWN]))[:SHOWN]


def fit_column(name: str, cells: Array, wanted: str | None = None, unclear: Notation | None = None) -> Column | str:
    """Return the preparation of a column, or the reason to leave it out.

    Args:
        name: Name of the column.
        cells: Its cells in the training rows.
        wanted: One of `TYPES`; None goes by the cells.
        unclear: Decimal sign of a column such as 1,500 alone; None raises ``ValueError``.
    """
    present = cells[~are_gaps(cells)]
    if not len(present):
        return "empty"
    kind, notation, order = _types(name, present, wanted, unclear)
    if kind in ("category", "embedding"):
        return _fit_text(name, cells, present, kind, forced=wanted is not None)
    values = read(cells, kind, notation, order)
    good = values[np.isfinite(values)]
    if not len(good):
        return "no cell can be read"
    gaps = len(good) < len(cells)
    shared: dict[str, Any] = {"name": name, "gaps": gaps, "fill": float(np.median(good))}
    if kind == "date":
        return _fit_date(good, shared, order)
    if kind == "number":
        return Column(kind="number", notation=notation, **shared)
    return Column(kind="boolean", **shared)


def _fit_date(days: Array, shared: dict[str, Any], order: Order) -> Column | str:
    origin = float(np.floor(days.min()))
    parts = _parts(days, origin)
    vary = tuple(part for part, values in parts.items() if values.min() < values.max())
    if not vary and not shared["gaps"]:
        return "constant"
    shared["fill"] = float(np.sort(days)[(len(days) - 1) // 2])  # a day that occurs
    return Column(kind="date", order=order, origin=origin, parts=vary, **shared)


def _fit_text(name: str, cells: Array, present: Array, kind: Kind, *, forced: bool) -> Column | str:
    counts = Counter(present)
    gaps = len(present) < len(cells)
    if not forced and (reason := _unusable(present, counts)):
        return reason
    if len(counts) + gaps == 1:
        return "constant"
    if kind == "category":
        return Column(name=name, kind="category", gaps=gaps, values=tuple(sorted(counts)))
    common = tuple(sorted(value for value, times in counts.items() if times >= FEWEST_OF_A_CODE))
    return Column(name=name, kind="embedding", gaps=gaps, values=common)


def _unusable(present: Array, counts: Counter[str]) -> str:
    """Return the reason to leave a text column out, or an empty text."""
    share = len(counts) / len(present)
    if len(counts) <= NEARLY_NONE:
        return ""
    if share > 0.5 and np.mean([len(cell.split()) for cell in present]) >= WORDS_OF_TEXT:
        return "free text"
    if share >= NEARLY_ALL:
        return f"{len(counts)} of {len(present)} values differ"
    return ""


def _types(name: str, present: Array, wanted: str | None, unclear: Notation | None) -> tuple[Kind, Notation, Order]:
    """Return kind, decimal sign and order of dates, as wanted or by the cells that are not gaps."""
    order: Order = order_of(present) or "month"
    match wanted:
        case None:
            kind, notation = _infer(name, present, unclear)
            return kind, notation, order
        case "comma":
            return "number", "comma", order
        case "day" | "month":
            return "date", "point", wanted
        case "number":
            return "number", notation_of(present) or "point", order
        case "boolean" | "date" | "category" | "embedding":
            return wanted, "point", order
    raise ValueError(f"expected a type among {', '.join(TYPES)} for column {name!r}, got {wanted!r}")


def _infer(name: str, present: Array, unclear: Notation | None) -> tuple[Kind, Notation]:
    notation = notation_of(present)
    if notation is None:
        notation = unclear
        if notation is None:
            example = next(cell for cell in present if "," in cell)
            raise ValueError(
                f"column {name!r}: expected numbers with a decimal point, got {example!r}, with a comma that may also "
                f"separate thousands. Say which: --types {name}=comma or --types {name}=number."
            )
    numbers = np.isfinite(to_numbers(present, notation))
    distinct = len(set(present))
    if numbers.all():
        return "number", notation
    if np.isfinite(to_booleans(present)).all():
        return "boolean", notation
    if np.isfinite(to_days(present, order_of(present) or "month")).mean() >= 1 - FEW_ODD:
        return "date", notation
    words = len(set(present[~numbers & ~are_gaps(present, NO_NUMBERS)]))
    many = distinct - words > MOST_ONE_HOT or not words
    if numbers.mean() >= (0.5 if many else 1 - FEW_ODD):
        return "number", notation
    return ("category" if distinct <= MOST_ONE_HOT else "embedding"), notation


def unclear_dates(name: str, cells: Array) -> str | None:
    """Return a sentence on dates whose day and month cannot be told apart, such as 01/02/2024 alone."""
    present = cells[~are_gaps(cells, GAPS)]
    if not has_numeric_months(present) or order_of(present) is not None:
        return None
    return f"{name!r}: {present[0]} is read with the month first (--types {name}=day for the day first)"
