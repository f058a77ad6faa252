"""What the user sees during training: a bar with the time left on a terminal, a few lines elsewhere, on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from leanbayes.runtime.display import cell, counted, html_table, text_table

LINES = 10
"""Lines that a training writes where there is no terminal."""

REFRESHES = 10
"""How often a second a bar moves."""


class Display(Protocol):
    """Something that shows how far training is. Progress is in epochs, of all members of an ensemble together."""

    def begin(self, done: float) -> None:
        """Training begins, or goes on, after `done` epochs."""

    def step(self, done: float, values: dict[str, Any]) -> None:
        """Some steps were made."""

    def epoch(self, done: float, values: dict[str, Any]) -> None:
        """An epoch has ended."""


class Nothing:
    """Shows nothing."""

    def begin(self, done: float) -> None:
        """Show nothing."""

    def step(self, done: float, values: dict[str, Any]) -> None:
        """Show nothing."""

    def epoch(self, done: float, values: dict[str, Any]) -> None:
        """Show nothing."""


class Lines:
    """Writes a line after every tenth of the work."""

    def __init__(self, epochs: int, unit: str = "epoch") -> None:
        """Start the clock."""
        self.epochs, self.unit = epochs, unit
        self.begin(0)

    def begin(self, done: float) -> None:
        """Start the clock again."""
        self.done, self.last, self.clock = done, done, time.monotonic()

    def step(self, done: float, values: dict[str, Any]) -> None:
        """Wait for the end of the epoch."""

    def epoch(self, done: float, values: dict[str, Any]) -> None:
        """Write a line if it is due."""
        every = max(1, round(self.epochs / LINES))
        if int(done / every) == int(self.last / every) and round(done) != self.epochs:
            return
        self.last = done
        each = (time.monotonic() - self.clock) / max(1e-9, done - self.done)
        left = duration(each * (self.epochs - done))
        values_shown = f": {describe(values)}" if values else ""
        sys.stderr.write(f"{self.unit} {round(done):,} of {self.epochs:,}{values_shown}, {left} left\n")
        sys.stderr.flush()


class Bar:
    """A bar of rich's, with the values of the last look beside it."""

    def __init__(self, bar: Any, epochs: int) -> None:
        """Take an open bar."""
        self.bar, self.epochs = bar, epochs
        self.next = 0.0
        self.task = bar.add_task("", total=epochs, epoch=f"0 of {epochs}")

    def begin(self, done: float) -> None:
        """Set the bar, and estimate the time left from here on."""
        self.bar.reset(self.task, completed=done, total=self.epochs)

    def step(self, done: float, values: dict[str, Any]) -> None:
        """Move the bar, unless it has just moved."""
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + 1 / REFRESHES
        epoch = f"{min(self.epochs, int(done) + 1)} of {self.epochs}"
        self.bar.update(self.task, completed=done, description=describe(values), epoch=epoch)

    def epoch(self, done: float, values: dict[str, Any]) -> None:
        """Move the bar to the end of the epoch."""
        epoch = f"{round(done)} of {self.epochs}"
        self.bar.update(self.task, completed=done, description=describe(values), epoch=epoch)


@contextmanager
def display(epochs: int, *, shown: bool, unit: str = "epoch") -> Iterator[Display]:
    """Open what suits the place: a bar, lines, or nothing."""
    if not shown:
        yield Nothing()
        return
    bar = _rich_bar(unit) if sys.stderr.isatty() else None
    if bar is None:
        yield Lines(epochs, unit)
        return
    with bar:
        yield Bar(bar, epochs)


def describe(values: dict[str, Any]) -> str:
    """Say in a few words how an epoch goes."""
    shown = [values["title"]] if "title" in values else []
    shown += [f"{name} {values[name]:.4g}" for name in ("loss", "kl", "lr") if name in values]
    shown += [
        f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in values.items()
        if name.startswith("valid_") and value is not None
    ]
    if "rows_per_second" in values:
        shown.append(f"{values['rows_per_second']:.0f} rows/s")
    return ", ".join(shown)


def duration(seconds: float) -> str:
    """Write a time as people say it: 42 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _rich_bar(unit: str) -> Any:
    """Return rich's bar, or None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    return Progress(
        TextColumn(f"{unit} {{task.fields[epoch]}}"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
    )


# -------------------- history
# `History`: what happened in each epoch, as JSON can hold it.


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
