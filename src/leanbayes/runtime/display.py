"""Text and HTML of records for a prompt and a notebook: short, on any device, never an error. Warnings as sentences."""

from __future__ import annotations

import html
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this file, and lists need no torch
    from torch import Tensor

UNKNOWN = "?"


def average(values: Tensor, digits: int = 3) -> str:
    """Return the mean of a tensor in a few digits; `?` if it has no numbers to read."""
    if values.is_meta or values.numel() == 0:
        return UNKNOWN
    try:
        return f"{values.detach().float().mean().item():.{digits}g}"
    except RuntimeError:  # a tensor without storage of its own, as inside vmap
        return UNKNOWN


def counted(number: int, name: str) -> str:
    """Return a number with its noun: 1 example, 2 examples, 2 classes."""
    if number == 1:
        return f"1 {name}"
    return f"{number:,} {name}{'es' if name.endswith('s') else 's'}"


def cell(value: Any) -> str:
    """Return a table cell: floats in four digits, a dash for None."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns aligned to the right."""
    wide = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join("  ".join(f"{each:>{w}}" for each, w in zip(row, wide, strict=True)) for row in (heads, *rows))


def html_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], below: str = "") -> str:
    """Return a table for a notebook: a title, a head (none if it is empty), rows, a line below."""
    first = f"<thead><tr>{_cells('th', heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    after = f"<p>{html.escape(below)}</p>" if below else ""
    table = f"<table>{first}<tbody>{body}</tbody></table>" if rows else ""
    return f"<div><p>{html.escape(title)}</p>{table}{after}</div>"


def _cells(tag: str, row: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(each)}</{tag}>" for each in row)


class _Sentence:
    """Writes each warning once, as a sentence without its place in the code."""

    def __init__(self, said: Collection[str]) -> None:
        self.said = set(said)

    def __call__(self, message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in self.said:
            self.said.add(str(message))
            sys.stderr.write(f"leanbayes: warning: {message}\n")


@contextmanager
def brief_warnings(said: Collection[str] = ()) -> Iterator[None]:
    """Show each warning once, as a sentence without its place in the code; leave out those that were said before."""
    with warnings.catch_warnings():
        warnings.showwarning = _Sentence(said)
        yield


def said_warnings() -> frozenset[str] | None:
    """Return the warnings that `brief_warnings` has shown so far; None outside of it."""
    return frozenset(show.said) if isinstance(show := warnings.showwarning, _Sentence) else None
