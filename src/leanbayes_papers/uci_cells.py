"""The regressions of ensemble model patching, cell by cell: one data set, one method, all of its splits at once.

A cell that is done lies in `OUT/DATA/METHOD.json` and is kept as long as protocol, seed and data are the same. On a
GPU several cells are trained beside each other; a run that is killed loses only those.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from leanbayes import data
from leanbayes.compare.experiment import pick_device
from leanbayes.evaluation import result as results
from leanbayes.runtime._files import write_text
from leanbayes.training.progress import duration
from leanbayes_papers.batched_training import Training
from leanbayes_papers.suite import Setting
from leanbayes_papers.uci_protocol import load_splits, METHODS, Protocol, SETS, Sizes
from leanbayes_papers.uci_scores import functions, NUMBERS, score

Record = dict[str, Any]

BESIDE = 4
"""Cells that a GPU trains beside each other."""

EVERY = 5.0
"""Seconds between two lines of progress."""


def run(
    sets: Sequence[str],
    methods: Sequence[str],
    out: Path,
    setting: Setting,
    *,
    beside: int = BESIDE,
    fresh: bool = False,
) -> dict[tuple[str, str], Record]:
    """Train and judge every method on every data set, and return the records by data set and method.

    Args:
        sets: names of UCI sets, such as "uci-yacht".
        methods: some of `METHODS`.
        out: folder of the cells; those that are done are kept.
        setting: budget, seed (the first one), device and folder of the data.
        beside: cells that a GPU trains beside each other; elsewhere it is one after the other.
        fresh: train again what is done.

    Raises:
        ValueError: if there is no such method or data set.
    """
    _check("data sets", sets, tuple(SETS))
    _check("methods", methods, METHODS)
    cells = [Cell(name, method, protocol_of(setting), setting.seeds[0]) for name in sets for method in methods]
    found = {} if fresh else {cell: record for cell in cells if (record := cell.kept(out, setting.root)) is not None}
    device = pick_device(setting.device)
    if device.type not in NUMBERS:
        device = torch.device("cpu")  # sums over draws are float64, which not every device has
    missing = deque(cell for cell in cells if cell not in found)
    progress = Progress(sum(cell.steps for cell in missing))

    def begin() -> Running | None:
        return Running(missing.popleft(), setting.root, device) if missing else None

    for running in _in_turn(begin, beside if device.type == "cuda" else 1, progress):
        record = running.record()
        write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", running.cell.path(out))
        found[running.cell] = record
    return {(cell.data, cell.method): found[cell] for cell in cells}


def protocol_of(setting: Setting) -> Protocol:
    """Return the paper's protocol; the quick budget shows on two splits that everything runs."""
    return setting.pick(quick=Protocol(epochs=20, draws=100, splits=2), short=Protocol(), full=Protocol())


@dataclass(frozen=True)
class Cell:
    """A method on a data set: everything that decides what comes out."""

    data: str
    method: str
    protocol: Protocol
    seed: int

    @property
    def sizes(self) -> Sizes:
        """Hidden units, and how many splits are run."""
        sizes = SETS[self.data]
        return sizes._replace(splits=self.protocol.splits or sizes.splits)

    @cached_property
    def steps(self) -> int:
        """Steps of the training."""
        return self.protocol.steps({row.name: row.train for row in data.describe()}[self.data])

    @property
    def number(self) -> int:
        """A seed for torch that no other cell has."""
        words = f"{self.data} {self.method} {self.seed}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:6])

    def path(self, out: Path) -> Path:
        """Return where the record of the cell lies."""
        return out / self.data / f"{self.method.lower()}.json"

    def settings(self) -> Record:
        """Return what decides the outcome, as JSON holds it; the digest of the data is beside it in a record."""
        return {**asdict(self), "sizes": self.sizes._asdict()}

    def kept(self, out: Path, root: str | None) -> Record | None:
        """Return the record on disk, if it is whole and of the same settings and data."""
        try:
            record = json.loads(self.path(out).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict) or record.get("settings") != self.settings():
            return None
        return record if record.get("sha256") == data.load(self.data, root).sha256 else None


class Running:
    """A cell that is being trained."""

    def __init__(self, cell: Cell, root: str | None, device: torch.device) -> None:
        """Read the data and build the networks; the seed of the cell decides all that is random."""
        self.cell, self.device, self.began = cell, device, time.monotonic()
        protocol, sizes = cell.protocol, cell.sizes
        self.members = protocol.members(cell.method)
        self.splits = load_splits(cell.data, sizes.splits, root, device)
        x, y = (tensor.repeat_interleave(self.members, 0) for tensor in (self.splits.x, self.splits.y))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cell.number)
            net = protocol.network(cell.method, nets=len(x), inputs=x.shape[-1], hidden=sizes.hidden)
        net = net.to(device)
        self.generator = torch.Generator(device).manual_seed(cell.number + 1)
        optimizer = protocol.optimizer(net)
        self.training = Training(net, (x, y), optimizer, self.generator, steps=cell.steps, batch=protocol.batch)

    def record(self) -> Record:
        """Judge the trained networks, and return all that is worth keeping."""
        protocol, splits = self.cell.protocol, self.splits
        net, trained = self.training.finish(), time.monotonic() - self.began
        x = splits.x_test.repeat_interleave(self.members, 0)
        draws = 1 if self.members > 1 else protocol.draws
        outputs = functions(net, x, draws=draws, members=self.members, generator=self.generator)
        scores = score(outputs, splits.y_test, splits.unit, precision=protocol.precision)
        return {
            "settings": self.cell.settings(),
            "sha256": splits.sha256,
            "scores": scores,
            "target_std": splits.unit.std.tolist(),
            "steps": self.cell.steps,
            "train_seconds": round(trained, 3),
            "test_seconds": round(time.monotonic() - self.began - trained, 3),
            "created": results.now(),
            "commit": results.commit(),
            "environment": results.environment(self.device),
        }


def _in_turn(begin: Callable[[], Running | None], at_once: int, progress: Progress) -> Iterator[Running]:
    """Make the steps of several cells in turn, and yield each after its last step.

    On a GPU they run beside each other, as every training has its own stream. A cell begins when there is room for it,
    so that no more than `at_once` are in memory.
    """
    running: list[Running] = []
    while True:
        while len(running) < at_once and (another := begin()) is not None:
            running.append(another)
        if not running:
            return
        for each in list(running):
            progress.show(each.training.advance(), running)
            if each.training.done >= each.cell.steps:
                running.remove(each)
                yield each


def _check(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"expected {what} among {', '.join(known)}, got {name!r}")


class Progress:
    """A line on stderr every few seconds: the share of each cell that is done, and the time left for all of them."""

    def __init__(self, steps: int) -> None:
        """Start the clock; `steps` are those of all cells."""
        self.steps, self.done = steps, 0
        self.began = self.last = time.monotonic()

    def show(self, made: int, running: Sequence[Running]) -> None:
        """Count steps that were made, and write a line if it is due."""
        self.done += made
        now = time.monotonic()
        if now < self.last + EVERY:
            return
        self.last = now
        left = duration((now - self.began) / self.done * (self.steps - self.done))
        shares = (f"{r.cell.data} {r.cell.method} {r.training.done / r.cell.steps:.0%}" for r in running)
        sys.stderr.write(f"{', '.join(shares)}; all {self.done / self.steps:.0%}, {left} left\n")
        sys.stderr.flush()
