"""`History`: what happened in each epoch, as JSON can hold it."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from leanbayes.display import cell, counted, html_table, text_table

ENDS = 3
"""Epochs that are shown at the beginning and at the end."""
MACHINE = ("seconds", "peak_memory_mb")
"""Columns that say what it took, not how it went."""


class History(list[dict[str, Any]]):
    """One row an epoch.

    A row has epoch (from 1), loss, nll and kl (means over the rows seen), beta and lr (of the last step), seconds (of
    the training steps), peak_memory_mb, and with validation data valid_nll and valid_accuracy or valid_rmse; rows of an
    ensemble have member, too.
    """

    @property
    def seconds(self) -> float:
        """Time spent on training steps, in all runs that a resumed training consists of."""
        return float(sum(row["seconds"] for row in self))

    def __repr__(self) -> str:
        """Return a short table: the first and the last epochs."""
        heads, rows = self._table()
        return f"{self._title()}\n{text_table(heads, rows)}" if rows else self._title()

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._title(), *self._table())

    def _title(self) -> str:
        seconds = sum(row.get("seconds") or 0.0 for row in self)
        return f"History({counted(len(self), 'epoch')}{f', {seconds:.1f} s' if self else ''})"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the rows to show, with dots where some are left out."""
        heads = [head for head in dict.fromkeys(head for row in self for head in row) if head not in MACHINE]
        rows = [[cell(row.get(head)) for head in heads] for row in self]
        if len(rows) > 2 * ENDS + 1:
            rows = [*rows[:ENDS], ["..." for _ in heads], *rows[-ENDS:]]
        return heads, rows

    @property
    def peak_memory_mb(self) -> float:
        """Largest memory: allocated on a GPU; on a CPU, resident of the whole process."""
        return float(max((row["peak_memory_mb"] for row in self), default=0.0))


def peak_memory_mb(device: torch.device) -> float:
    """Return the largest memory so far in MiB: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def finite(number: float) -> float | None:
    """Return a number as JSON can hold it, which has no nan."""
    return number if math.isfinite(number) else None
