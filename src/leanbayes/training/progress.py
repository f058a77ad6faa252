"""Progress of a training: the `History` of its epochs, and on stderr a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from leanbayes.runtime.display import cell, counted, html_table, text_table

LINES = 10  # of a training where there is no terminal
REFRESHES = 10  # of a bar per second
LINE_SECONDS = 30.0  # between two lines of a long work where there is no terminal
LOOK_SECONDS = 0.5  # between two looks at a long work
ENDS = 3  # epochs that a table shows at its beginning and at its end
COSTS = ("seconds", "peak_memory_mb")  # columns that a table leaves out


class History(list[dict[str, Any]]):
    """One row per epoch.

    A row has epoch (from 1), loss, nll and kl (means over the rows seen), beta and lr (of the last step), seconds (of
    the training steps) and peak_memory_mb. With validation data it also has valid_nll, and valid_accuracy or
    valid_rmse. Rows of an ensemble have member, too.
    """

    @property
    def seconds(self) -> float:
        """Time spent on training steps, in all runs of a resumed training."""
        return float(sum(row["seconds"] for row in self))

    @property
    def peak_memory_mb(self) -> float:
        """Largest memory: allocated on a GPU; on a CPU, resident of the whole process."""
        return float(max((row["peak_memory_mb"] for row in self), default=0.0))

    def __repr__(self) -> str:
        heads, rows = self._table()
        return f"{self._title()}\n{text_table(heads, rows)}" if rows else self._title()

    def _repr_html_(self) -> str:
        return html_table(self._title(), *self._table())

    def _title(self) -> str:
        seconds = sum(row.get("seconds") or 0.0 for row in self)
        return f"History({counted(len(self), 'epoch')}{f', {seconds:.1f} s' if self else ''})"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows, with dots for those left out."""
        heads = [head for head in dict.fromkeys(head for row in self for head in row) if head not in COSTS]
        rows = [[cell(row.get(head)) for head in heads] for row in self]
        if len(rows) > 2 * ENDS + 1:
            rows = [*rows[:ENDS], ["..." for _ in heads], *rows[-ENDS:]]
        return heads, rows


class Display:
    """Shows nothing. Progress is in epochs, over all members of an ensemble."""

    def begin(self, done: float) -> None:
        """Start or resume after `done` epochs."""

    def step(self, done: float, values: dict[str, Any]) -> None:
        """Show a step."""

    def epoch(self, done: float, values: dict[str, Any]) -> None:
        """Show the end of an epoch."""


class Lines(Display):
    """Writes a line after every tenth of the work."""

    def __init__(self, epochs: int, unit: str = "epoch") -> None:
        self.epochs, self.unit = epochs, unit
        self.begin(0)

    @override
    def begin(self, done: float) -> None:
        self.done, self.last, self.clock = done, done, time.monotonic()

    @override
    def epoch(self, done: float, values: dict[str, Any]) -> None:
        every = max(1, round(self.epochs / LINES))
        if int(done / every) == int(self.last / every) and round(done) != self.epochs:
            return
        self.last = done
        each = (time.monotonic() - self.clock) / max(1e-9, done - self.done)
        left = duration(each * (self.epochs - done))
        described = f": {describe(values)}" if values else ""
        sys.stderr.write(f"{self.unit} {round(done):,} of {self.epochs:,}{described}, {left} left\n")
        sys.stderr.flush()


class Bar(Display):
    """A progress bar of rich, with the latest values next to it."""

    def __init__(self, bar: Any, epochs: int) -> None:
        self.bar, self.epochs = bar, epochs
        self.next = 0.0
        self.task = bar.add_task("", total=epochs, epoch=f"0 of {epochs}")

    @override
    def begin(self, done: float) -> None:
        self.bar.reset(self.task, completed=done, total=self.epochs)  # the time left is estimated from here

    @override
    def step(self, done: float, values: dict[str, Any]) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + 1 / REFRESHES
        epoch = f"{min(self.epochs, int(done) + 1)} of {self.epochs}"
        self.bar.update(self.task, completed=done, description=describe(values), epoch=epoch)

    @override
    def epoch(self, done: float, values: dict[str, Any]) -> None:
        epoch = f"{round(done)} of {self.epochs}"
        self.bar.update(self.task, completed=done, description=describe(values), epoch=epoch)


@contextmanager
def display(epochs: int, *, shown: bool, unit: str = "epoch") -> Iterator[Display]:
    """Open a bar on a terminal, lines elsewhere, or nothing; `unit` is the name of a step of the work."""
    if not shown:
        yield Display()
        return
    bar = _rich_bar(unit) if sys.stderr.isatty() else None
    if bar is None:
        yield Lines(epochs, unit)
        return
    with bar:
        yield Bar(bar, epochs)


class Status(NamedTuple):
    """A long work at one moment: the share that is over, a few words, and the time left in words."""

    share: float
    text: str
    left: str


@contextmanager
def watched(look: Callable[[], Status], *, shown: bool) -> Iterator[None]:
    """Show a long work: a bar on a terminal, else a line every half minute.

    `look` is called twice a second from a thread of its own, and once more at the end.
    """
    if not shown:
        yield
        return
    bar = _rich_status() if sys.stderr.isatty() else None
    task = None if bar is None else bar.add_task("", total=1.0, left="")
    over = threading.Event()
    next_line = time.monotonic() + LINE_SECONDS

    def refresh() -> None:
        nonlocal next_line
        status = look()
        if bar is not None:
            bar.update(task, completed=status.share, description=status.text, left=status.left)
        elif status.share < 1 and time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_SECONDS
            sys.stderr.write(f"{100 * status.share:.0f} %, {status.text}, {status.left}\n")
            sys.stderr.flush()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            refresh()

    thread = threading.Thread(target=watch, daemon=True)
    with nullcontext() if bar is None else bar:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            refresh()


def describe(values: dict[str, Any]) -> str:
    """Return title, loss, KL, rate, validation scores and speed in a few words."""
    shown = [values["title"]] if "title" in values else []
    shown += [f"{name} {values[name]:.4g}" for name in ("loss", "kl", "lr") if name in values]
    valid = {name: value for name, value in values.items() if name.startswith("valid_") and value is not None}
    shown += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in valid.items()]
    if "rows_per_second" in values:
        shown.append(f"{values['rows_per_second']:.0f} rows/s")
    return ", ".join(shown)


def duration(seconds: float) -> str:
    """Write a time in usual units: 42 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def peak_memory_mb(device: torch.device) -> float:
    """Return the largest memory so far in MiB: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _rich_status() -> Any:
    """Return a bar with a share, words and the time left, or None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ModuleNotFoundError:
        return None
    return Progress(
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
    )


def _rich_bar(unit: str) -> Any:
    """Return a bar of rich, or None where rich is not installed."""
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
