"""Tables 12 and 13 of the patching paper: UCI regressions, all standard splits at once (its appendix D.7).

The paper (appendix B.3) averages the outputs f_s of S draws and adds the noise 1 / tau to their variance:

    mean = 1/S sum_s f_s,    variance = 1/S sum_s f_s^2 - mean^2 + 1 / tau.

`lpd` is the log density of the Gaussian with these moments. `lpd_mixture` is that of the mixture,
log 1/S sum_s Normal(y | f_s, 1 / tau), the first formula of the same appendix. Without any spread both are at most
-1/2 log(2 pi / tau), which is -2.07 for tau = 0.1.

A cell is a method on a data set. Finished cells are in `OUT/DATA/METHOD.json`. A GPU trains several cells at once.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.evaluation import result as results
from leanbayes.training.progress import duration
from leanbayes_papers.harness import Column, group, plot_rows, printed, Record, Run, Study, Suite, Table
from leanbayes_papers.harness.numbers import numbers
from leanbayes_papers.patch import PAPER
from leanbayes_papers.patch.batched import BatchedRegression, Mask, Nothing, PatchedNorm, Place, Training

METHODS = ("ECMP", "EMP", "Dropout", "Ensemble")
NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 25}  # activations of a layer at a time: a cache's size, enough for a GPU
AT_ONCE = 4  # cells that a GPU trains at once


class Sizes(NamedTuple):
    """Hidden units and number of standard splits of a data set."""

    hidden: int = 50
    splits: int = 20


# In the order of the paper's rows; its tenth, Year Prediction MSD, is not among our data sets.
SETS = {name: Sizes() for name in printed("patch", "table12")} | {"uci-protein": Sizes(hidden=100, splits=5)}
SIX = ("uci-boston", "uci-concrete", "uci-energy", "uci-power", "uci-wine-red", "uci-yacht")
PRINTED = {
    (data, method): {
        "rmse": printed("patch", "table12")[data][method],
        "lpd": printed("patch", "table13")[data][method],
    }
    for data in SETS
    for method in METHODS
}
COLUMNS = (Column("rmse", "RMSE", "#.4g", sign=-1), Column("lpd", "LPD", "#.4g", sign=1))
KINDS = ("worse", "equal", "better")


def against(column: Column, records: Sequence[Record]) -> str:
    """Compare the splits of a cell with the paper: equal within 2 sqrt(sem^2 + sem'^2) + 0.005."""
    ours, paper = column.estimate(records), PRINTED[records[0]["data"], records[0]["method"]][column.name]
    assert ours is not None
    gain = column.sign * (ours.mean - paper.value)
    if abs(gain) <= 2 * math.hypot(ours.sem or 0.0, paper.spread or 0.0) + 0.005:
        return "equal"
    return "better" if gain > 0 else "worse"


def counts(column: Column, records: Sequence[Record]) -> str:
    """Write on how many sets a method is worse, equal and better than the paper's."""
    found = [against(column, rows) for rows in group(records, ("data",)).values()]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in KINDS)


def not_worse(records: Sequence[Record]) -> str:
    """Write on how many sets no number of a method is worse than the paper's."""
    sets = group(records, ("data",)).values()
    fine = sum(all(against(column, rows) != "worse" for column in COLUMNS) for rows in sets)
    return f"{fine} of {len(sets)}"


TABLE = Table(
    title="Ensemble model patching, Tables 12 and 13",
    by=("data", "method"),
    columns=(*COLUMNS, *(Column(f"{c.name} is", f"{c.head}: ours is", text=partial(against, c)) for c in COLUMNS)),
    paper=PRINTED,
)
COUNTS = Table(
    title="Against the paper, over all sets",
    by=("method",),
    columns=(
        Column("not worse", "sets on which neither is worse", text=not_worse),
        *(Column(f"{c.name} counts", f"{c.head}, sets", text=partial(counts, c)) for c in COLUMNS),
    ),
)


def patch_uci(run: Run) -> Suite:
    """EMP, ECMP, dropout and explicit ensembles on the UCI regressions, all splits at once (Tables 12 and 13)."""
    notes = numbers("patch")["notes"]
    sets = run.pick(quick=("uci-yacht", "uci-boston"), short=SIX, full=tuple(SETS))
    plot = partial(plot_rows, table=Table(by=("data", "method"), columns=COLUMNS, paper=PRINTED))
    studies = (
        Study.of("patch", "uci", {"data": name, "note": notes.get(name, "")}, measure=measure, plot=plot, name=name)
        for name in sets
    )
    legend = " ".join(numbers("patch")["legend"][name] for name in ("all", run.budget))
    return Suite(paper=PAPER, studies=tuple(studies), tables=(TABLE, COUNTS), legend=legend)


def measure(run: Run, *, data: str) -> list[Record]:
    """Return the scores of every method on every split of a data set."""
    return [record for cell in run_cells(run, [data], METHODS).values() for record in records_of(cell)]


def records_of(cell: Record) -> list[Record]:
    """Return the scores of a cell, one record for each split."""
    names = {name: cell["settings"][name] for name in ("data", "method")}
    splits = zip(*cell["scores"].values(), strict=True)
    return [names | {"split": k} | dict(zip(cell["scores"], found, strict=True)) for k, found in enumerate(splits)]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The paper's numbers; `lr` and `spread`, which it does not print, are Adam's default and ours."""

    epochs: int = 4000
    batch: int = 100  # rows of a step
    draws: int = 10_000  # of a prediction; an explicit ensemble has its members instead
    splits: int = 0  # number of the standard splits; 0 means all
    copies: int = 5  # of every scale and shift, and members of an explicit ensemble
    scale: float = 0.2  # of the norms at the start
    spread: float = 0.1  # of the copies around it, relative
    dropout: float = 0.005  # rate of the dropout networks
    lr: float = 1e-3
    weight_decay: float = 0.01  # L2 of Adam, on all parameters
    precision: float = 0.1  # tau, one over the variance of the noise, in the units of the target

    def members(self, method: str) -> int:
        """Return the number of networks of a split."""
        return self.copies if method == "Ensemble" else 1

    def steps(self, rows: int) -> int:
        """Return the steps of a training; a batch may overlap the end of an epoch."""
        return max(1, round(self.epochs * rows / min(self.batch, rows)))

    def network(self, method: str, *, nets: int, inputs: int, hidden: int) -> BatchedRegression:
        """Return the networks of a method at their start, from torch's global generator."""

        def place(features: int) -> Place:
            if method == "Ensemble":
                return Nothing()
            if method == "Dropout":
                return Mask(nets, features, rate=self.dropout)
            shape = (self.copies, nets, features)
            return PatchedNorm(shape, crossed=method == "ECMP", scale=self.scale, spread=self.spread)

        return BatchedRegression(place(inputs), place(hidden), nets=nets, inputs=inputs, hidden=hidden)

    def optimizer(self, net: BatchedRegression) -> torch.optim.Adam:
        """Return Adam, fused on devices where that is faster and can be captured."""
        fused = net.hidden_weight.device.type in NUMBERS
        return torch.optim.Adam(net.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=fused)


def protocol_of(run: Run) -> Protocol:
    """Return the paper's protocol; the quick budget shows on two splits that everything runs."""
    return run.pick(quick=Protocol(epochs=20, draws=100, splits=2), short=Protocol(), full=Protocol())


@dataclass(frozen=True)
class Cell:
    """A method on a data set, with all settings that decide its scores."""

    data: str
    method: str
    protocol: Protocol
    seed: int

    @property
    def sizes(self) -> Sizes:
        """Hidden units, and the number of splits."""
        sizes = SETS[self.data]
        return sizes._replace(splits=self.protocol.splits or sizes.splits)

    @cached_property
    def steps(self) -> int:
        """Steps of the training."""
        return self.protocol.steps({row.name: row.train for row in lb.data.describe()}[self.data])

    @property
    def number(self) -> int:
        """A seed for torch that no other cell has."""
        words = f"{self.data} {self.method} {self.seed}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:6])

    def path(self, out: Path) -> Path:
        """Return the file of the cell."""
        return out / self.data / f"{self.method.lower()}.json"

    def settings(self) -> Record:
        """Return the settings as JSON holds them."""
        return {**asdict(self), "sizes": self.sizes._asdict()}


def run_cells(
    run: Run, sets: Sequence[str], methods: Sequence[str], *, at_once: int = AT_ONCE
) -> dict[tuple[str, str], Record]:
    """Train and evaluate every method on every data set, and return the cells by data set and method.

    A GPU trains `at_once` cells at a time, each on a stream of its own; other devices train one after the other.
    """
    _check("data sets", sets, tuple(SETS))
    _check("methods", methods, METHODS)
    device = run.torch_device
    if device.type not in NUMBERS:
        device = torch.device("cpu")  # sums over draws are float64, which not every device has
    cells = [Cell(name, method, protocol_of(run), run.seeds[0]) for name in sets for method in methods]
    known = {cell: run.known(cell.path(run.out), partial(_is_of, cell, run)) for cell in cells}
    waiting = deque(cell for cell, found in known.items() if found is None)
    fresh = replace(run, fresh=True)
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < (at_once if device.type == "cuda" else 1):
            running.append(Running(waiting.popleft(), run.root, device))
        for each in list(running):
            each.training.advance()
            if each.training.done >= each.cell.steps:
                running.remove(each)
                sys.stderr.write(f"{each.cell.data}, {each.cell.method}: {duration(time.monotonic() - each.began)}\n")
                known[each.cell] = fresh.cached(each.cell.path(run.out), each.record)
    return {(cell.data, cell.method): found for cell, found in known.items() if found is not None}


def _is_of(cell: Cell, run: Run, known: Record) -> bool:
    return known.get("settings") == cell.settings() and known.get("sha256") == lb.data.load(cell.data, run.root).sha256


class Splits(NamedTuple):
    """The splits of a data set, stacked."""

    x: Tensor  # training inputs (T, N, d), standardised
    y: Tensor  # training targets (T, N), standardised
    x_test: Tensor  # test inputs (T, d, n), standardised
    y_test: Tensor  # test targets (T, n), in their own units
    mean: Tensor  # of the targets (T,)
    std: Tensor  # of the targets (T,)
    sha256: str  # of the file


def load_splits(name: str, count: int, root: str | None, device: torch.device) -> Splits:
    """Read the standard splits of a UCI set, each standardised by its own training rows."""
    sets = [lb.data.load(name, root, split=split) for split in range(count)]
    prepared = [each.prepared(each.train) for each in sets]
    stacked = (
        torch.stack([x for x, _ in prepared]),
        torch.stack([y[:, 0] for _, y in prepared]),
        torch.stack([each.inputs(each.test.x).T for each in sets]),
        torch.stack([each.test.y[:, 0] for each in sets]),
        torch.cat([each.target_mean for each in sets]),
        torch.cat([each.target_std for each in sets]),
    )
    x, y, x_test, y_test, mean, std = (tensor.to(device) for tensor in stacked)
    return Splits(x, y, x_test, y_test, mean, std, sets[0].sha256)


class Running:
    """A cell in training."""

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
        """Evaluate the trained networks and return the content of the cell's file."""
        protocol, splits = self.cell.protocol, self.splits
        net, trained = self.training.finish(), time.monotonic() - self.began
        x = splits.x_test.repeat_interleave(self.members, 0)
        draws = 1 if self.members > 1 else protocol.draws
        outputs = functions(net, x, draws=draws, members=self.members, generator=self.generator)
        scores = score(outputs, splits, precision=protocol.precision)
        return {
            "settings": self.cell.settings(),
            "sha256": splits.sha256,
            "scores": scores,
            "target_std": splits.std.tolist(),
            "steps": self.cell.steps,
            "train_seconds": round(trained, 3),
            "test_seconds": round(time.monotonic() - self.began - trained, 3),
            "created": results.now(),
            "commit": results.commit(),
            "environment": results.environment(self.device),
        }


@torch.no_grad()
def functions(
    net: BatchedRegression, x: Tensor, *, draws: int, members: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield standardised draws (S, T, n) at inputs (T * members, d, n), a few at a time; members are draws, too."""
    nets, features, rows = x.shape
    widest = max(features, net.hidden_weight.shape[2])
    few = max(1, NUMBERS[x.device.type] // (nets * widest * rows))
    for start in range(0, draws, few):
        noise = net.noise(min(few, draws - start), 1, generator)
        outputs: Tensor = net(x.unsqueeze(0), noise)
        yield outputs.view(-1, nets // members, members, rows).transpose(1, 2).flatten(0, 1)


def score(outputs: Iterable[Tensor], splits: Splits, *, precision: float) -> dict[str, list[float]]:
    """Return `rmse`, `lpd` and `lpd_mixture` of every split; outputs are standardised draws (S, T, n) in pieces."""
    y, centre, scale = splits.y_test.double(), splits.mean.double()[:, None], splits.std.double()[:, None]
    count, total, squares = 0, torch.zeros_like(y), torch.zeros_like(y)
    density = torch.full_like(y, -math.inf)
    for piece in outputs:
        f = piece.double() * scale + centre - y  # distances from the targets: small numbers, whose squares are exact
        count += len(f)
        total += f.sum(0)
        squares += f.square().sum(0)
        density = torch.logaddexp(density, (-0.5 * precision * f.square()).logsumexp(0))
    mean = total / count
    variance = (squares / count - mean.square()).clamp_min(0) + 1 / precision
    floor = 0.5 * math.log(precision / (2 * math.pi))
    return {
        "rmse": mean.square().mean(1).sqrt().tolist(),
        "lpd": (-0.5 * (mean.square() / variance + (2 * math.pi * variance).log())).mean(1).tolist(),
        "lpd_mixture": (density - math.log(count) + floor).mean(1).tolist(),
    }


def _check(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"expected {what} among {', '.join(known)}, got {name!r}")
