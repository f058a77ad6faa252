"""What the user sees during training: a bar with the time left on a terminal, a few lines elsewhere, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

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
    """Writes a line after every tenth of the training."""

    def __init__(self, epochs: int) -> None:
        """Start the clock."""
        self.epochs = epochs
        self.begin(0)

    def begin(self, done: float) -> None:
        """Start the clock again."""
        self.done, self.clock = done, time.monotonic()

    def step(self, done: float, values: dict[str, Any]) -> None:
        """Wait for the end of the epoch."""

    def epoch(self, done: float, values: dict[str, Any]) -> None:
        """Write a line if it is due."""
        every = max(1, round(self.epochs / LINES))
        if round(done) % every and round(done) != self.epochs:
            return
        each = (time.monotonic() - self.clock) / max(1e-9, done - self.done)
        left = duration(each * (self.epochs - done))
        sys.stderr.write(f"epoch {round(done)} of {self.epochs}: {describe(values)}, {left} left\n")
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
        self.bar.update(self.task, completed=done, description=describe(values))


@contextmanager
def display(epochs: int, *, shown: bool) -> Iterator[Display]:
    """Open what suits the place: a bar, lines, or nothing."""
    if not shown:
        yield Nothing()
        return
    bar = _rich_bar() if sys.stderr.isatty() else None
    if bar is None:
        yield Lines(epochs)
        return
    with bar:
        yield Bar(bar, epochs)


def describe(values: dict[str, Any]) -> str:
    """Say in a few words how an epoch goes."""
    shown = [f"{name} {values[name]:.4g}" for name in ("loss", "kl", "lr") if name in values]
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


def _rich_bar() -> Any:
    """Return rich's bar, or None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    return Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
    )
