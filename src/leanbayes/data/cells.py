"""Read cells of text as numbers, booleans or dates; an unreadable cell becomes NaN."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Literal

import numpy as np

from leanbayes.data.dataset import Array

Notation = Literal["point", "comma"]
"""The decimal sign of a column of numbers; the other sign may separate thousands."""
NOTATIONS: tuple[Notation, ...] = ("point", "comma")
Order = Literal["day", "month"]
"""The first number of dates such as 01/02/2024."""

GAPS = frozenset(("", "na", "n/a", "#n/a", "#na", "<na>", "nan", "nat", "null", "nil", "?", "-", "--", "."))
"""Words for a missing value, in lower case."""
NO_NUMBERS = GAPS | {"none", "missing", "unknown", "#value!", "#div/0!", "#ref!", "#num!", "#name?"}
"""Words for a missing number; in a column of text some of them are values."""

_WORDS = {"true": 1.0, "yes": 1.0, "t": 1.0, "y": 1.0, "false": 0.0, "no": 0.0, "f": 0.0, "n": 0.0}
_DRESSED = re.compile(r"[$€£¥]?\s*([+-]?)\s*[$€£¥]?\s*([0-9][0-9.,'\u2019\s]*|[.,][0-9]+)([eE][+-]?[0-9]+)?\s*[%$€£¥]?")
_THOUSANDS = {
    sign: re.compile(rf"[1-9][0-9]{{0,2}}(?:[{others}\s][0-9]{{3}})+|[0-9]*")
    for sign, others in ((".", ",'\u2019"), (",", ".'\u2019"))
}

_TIME = r"(?:[T\s]+(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,]\d+)?)?\s*([AaPp][Mm])?\s*(Z|UTC|[+-]\d{2}:?\d{2})?)?"
_YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})(?:\2(\d{1,2}))?" + _TIME)
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4}|\d{2})" + _TIME)
_DAY_NAMED = re.compile(r"(\d{1,2})(?:st|nd|rd|th)?[\s.-]+([A-Za-z]{3,9})\.?[\s,-]+(\d{4}|\d{2})" + _TIME)
_MONTH_NAMED = re.compile(r"([A-Za-z]{3,9})\.?\s+(\d{1,2})(?:st|nd|rd|th)?,?\s+(\d{4})" + _TIME)
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_POINT_CURRENCIES = "$£"  # of countries that write decimals with a point
_LONGEST = 64  # characters of a number or a date
_EPOCH = datetime(1970, 1, 1)
_LATEST_SHORT_YEAR = 68  # two digits up to this one are of this century, as in POSIX


def are_gaps(cells: Array, words: frozenset[str] = GAPS) -> Array:
    """Mark the cells that mean a missing value."""
    return np.array([cell.casefold() in words for cell in cells], bool)


def to_numbers(cells: Array, notation: Notation = "point") -> Array:
    """Return numbers; percent and currency signs are dropped, and separators of thousands.

    With the notation "comma", 1.234,5 is 1234.5; with "point", 1,234.5 is.
    """
    if notation == "point" and not any("_" in cell for cell in cells):
        try:
            return cells.astype(np.float64)
        except ValueError:
            pass
    return np.array([_number(cell, notation) for cell in cells], np.float64)


def is_number(cell: str) -> bool:
    """Return whether a cell is a number as Python writes it; 10_20 is a range, not 1020."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def _number(cell: str, notation: Notation) -> float:
    if notation == "point" and is_number(cell):
        return float(cell)
    found = _DRESSED.fullmatch(cell) if len(cell) <= _LONGEST else None
    if found is None:
        return float("nan")
    sign = "." if notation == "point" else ","
    whole, _, decimals = found[2].strip().partition(sign)
    if not _THOUSANDS[sign].fullmatch(whole) or (decimals and not decimals.isdecimal()):
        return float("nan")
    digits = re.sub(r"\D", "", whole)
    return float(f"{found[1]}{digits or 0}.{decimals or 0}{found[3] or ''}")


def notation_of(cells: Array) -> Notation | None:
    """Return the decimal sign of a column; None if the cells do not decide, as 1,500 alone.

    Cells without a comma do not count: 1.5 is read with a point, unless another cell such as 1,25 decides.
    """
    unclear = False
    found: set[Notation] = set()
    for cell in cells:
        if "," not in cell:
            continue
        readable: list[Notation] = [n for n in NOTATIONS if math.isfinite(_number(cell, n))]
        if len(readable) == 2 and cell.lstrip("+- ")[0] in _POINT_CURRENCIES:
            readable = ["point"]
        unclear |= len(readable) == 2
        found |= set(readable if len(readable) == 1 else ())
    if unclear and not found:
        return None
    return "comma" if found == {"comma"} else "point"


def check_notation(cells: Array, notation: Notation, where: str) -> None:
    """Raise ``ValueError`` for new cells with the other decimal sign alone, such as 2,5 instead of 2.5."""
    other: Notation = "point" if notation == "comma" else "comma"
    own, others = (np.isfinite(to_numbers(cells, sign)) for sign in (notation, other))
    if (others & ~own).any() and not (own & ~others).any():
        raise ValueError(
            f"{where}: expected numbers with a decimal {notation} as in training, got "
            f"{cells[np.argmax(others & ~own)]!r}. Write them with a {notation}."
        )


def is_value(cell: str) -> bool:
    """Return whether a cell is a number in any notation, or a date."""
    return any(math.isfinite(_number(cell, n)) for n in NOTATIONS) or math.isfinite(_days(cell, "day"))


def to_booleans(cells: Array) -> Array:
    """Return 1 for true, yes, t and y, and 0 for false, no, f and n, in any case."""
    return np.array([_WORDS.get(cell.casefold(), float("nan")) for cell in cells], np.float64)


def order_of(cells: Array) -> Order | None:
    """Return the first number of dates such as 13/02/2024; None if no cell decides."""
    found = [match for cell in cells if (match := _YEAR_LAST.fullmatch(cell))]
    if any(int(match[1]) > 12 or match[2] == "." for match in found):
        return "day"
    return "month" if any(int(match[3]) > 12 for match in found) else None


def has_numeric_months(cells: Array) -> bool:
    """Return whether a cell is a date whose order of day and month must be known."""
    return any(_YEAR_LAST.fullmatch(cell) for cell in cells)


def to_days(cells: Array, order: Order = "month") -> Array:
    """Return days since 1970-01-01, with fractions for times.

    Read are 2024-02-01, 2024/02/01, 2024-02, 1.2.2024, 2/1/2024, 1 Feb 2024, Feb 1, 2024, each with or without a time.
    """
    return np.array([_days(cell, order) for cell in cells], np.float64)


def _days(cell: str, order: Order) -> float:
    numbers = _date_numbers(cell, order)
    if numbers is None:
        return float("nan")
    year, month, day, time = numbers
    try:
        moment = datetime(year, month, day) + _time(*time) - _EPOCH
    except (ValueError, OverflowError):
        return float("nan")
    return moment / timedelta(days=1)


def _date_numbers(cell: str, order: Order) -> tuple[int, int, int, tuple[str | None, ...]] | None:
    """Return year, month, day and the groups of the time."""
    if len(cell) > _LONGEST:
        return None
    if found := _YEAR_FIRST.fullmatch(cell):
        return int(found[1]), int(found[3]), int(found[4] or 1), found.groups()[4:]
    if found := _YEAR_LAST.fullmatch(cell):
        day, month = (found[1], found[3]) if order == "day" else (found[3], found[1])
        return _year(found[4]), int(month), int(day), found.groups()[4:]
    if found := _DAY_NAMED.fullmatch(cell):
        return _year(found[3]), _month(found[2]), int(found[1]), found.groups()[3:]
    if found := _MONTH_NAMED.fullmatch(cell):
        return int(found[3]), _month(found[1]), int(found[2]), found.groups()[3:]
    return None


def _time(hour: str | None, minute: str | None, second: str | None, half: str | None, zone: str | None) -> timedelta:
    if hour is None or minute is None:
        return timedelta()
    hours = int(hour)
    if half is not None:
        hours = hours % 12 + 12 * (half.lower() == "pm")
    if hours > 24 or int(minute) > 59:
        raise ValueError("no such time")
    offset = timedelta()
    if zone is not None and zone[0] in "+-":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:])) * (1 if zone[0] == "+" else -1)
    return timedelta(hours=hours, minutes=int(minute), seconds=int(second or 0)) - offset


def _year(digits: str) -> int:
    year = int(digits)
    if len(digits) == 4:
        return year
    return year + (2000 if year <= _LATEST_SHORT_YEAR else 1900)


def _month(name: str) -> int:
    """Return the number of a month by its English name or the beginning of it; 0 if there is none."""
    return next((i for i, month in enumerate(_MONTHS, 1) if month.startswith(name.lower())), 0)


def calendar(days: Array) -> dict[str, Array]:
    """Return year, month from 1, and weekday from 0 (Monday) of days since 1970-01-01."""
    moments = [_EPOCH + timedelta(days=float(np.floor(day))) for day in days]
    return {
        "year": np.array([moment.year for moment in moments], np.float64),
        "month": np.array([moment.month for moment in moments], np.float64),
        "weekday": np.array([moment.weekday() for moment in moments], np.float64),
    }
