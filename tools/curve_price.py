"""Time every way to an answer next to a pass of the plain network, alternately, in the same mode.

Both are built predictors: the same chunks, precision and memory order, and with `--capture` both are CUDA graphs. On a
CPU the process time of one thread counts, on a GPU the time until the kernels have ended. A ratio has the mean of the
plain passes before and after the answer below it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanbayes.compare.job import PLAIN
from leanbayes.core.predictor import Predictor
from leanbayes.evaluation.cost import _quartiles, _seconds, Work
from leanbayes.evaluation.result import commit, environment
from leanbayes.runtime._files import write_text
from leanbayes.training.objective import autocast
from tools.curve_runs import Runs
from tools.curve_scores import Way, ways


def price_all(runs: Runs, seed: int, rows: Sequence[str], device: str, given: argparse.Namespace) -> None:
    """Time the ways of some trained rows and write their prices; those of a file stay."""
    place = torch.device(device)
    if place.type == "cpu":
        torch.set_num_threads(1)
    x = runs.experiment.data.inputs(_some(runs.test.x, given.price_rows)).to(place)
    about: dict[str, Any] = {"data": runs.study.data, "net": runs.study.net, "seed": seed, "rows": len(x)}
    about |= {"turns": given.turns, "precision": runs.study.precision, "capture": given.capture, "commit": commit()}
    about |= {"environment": environment(place)}
    path: Path = given.into / f"{runs.study.data}-{runs.study.net}-price.json"
    known = json.loads(path.read_text(encoding="utf-8"))["points"] if path.is_file() else []
    every = ways(runs, seed, device)
    done = {(one["row"], one["way"]): one for one in known}
    plain = Predictor(runs.model(seed, PLAIN, device), keep_samples=False, capture=given.capture)
    for way in every:
        if way.row in rows and (way.row, way.name) not in done:
            done[way.row, way.name] = price(way, plain, x, runs.study.precision, given)
            sys.stderr.write(f"{way.row}, {way.name}: {done[way.row, way.name]['ratio']:.3f} plain passes\n")
            points = [done[key] for each in every if (key := (each.row, each.name)) in done]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(json.dumps(about | {"points": points}, indent=1) + "\n", path)


def price(way: Way, plain: Predictor, x: Tensor, kind: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the time of an answer for all rows in plain passes: the median of the turns, and quartiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tolerance cannot be captured
        own = way.predictor(way.make(), capture=given.capture)
        both = [stopwatch(partial(each, x), x.device, kind, given.seconds) for each in (plain, own)]
        spent = []
        for _ in range(given.turns):
            before, mine, after = both[0](), both[1](), both[0]()
            spent.append((mine, (before + after) / 2))
    ratios = [mine / base for mine, base in spent]
    each = {"ms": [mine for mine, _ in spent], "plain_ms": [base for _, base in spent]}
    found: dict[str, Any] = {"row": way.row, "way": way.name, "ratio": statistics.median(ratios)}
    found |= {"quartiles": _quartiles(ratios)}
    return found | {name: 1e3 * statistics.median(values) / len(x) for name, values in each.items()}


def stopwatch(run: Work, device: torch.device, kind: str, least: float) -> Callable[[], float]:
    """Return a function that gives the seconds of one call, from as many calls as take `least` seconds."""

    def calls(count: int) -> float:
        with autocast(kind, device):
            return _seconds(lambda: [run() for _ in range(count)], device) / count

    calls(2)  # the first ones build caches
    count = max(1, math.ceil(least / max(calls(1), 1e-6)))
    return lambda: calls(count)


def _some(x: Tensor, wanted: int) -> Tensor:
    count = min(wanted, len(x))
    return x[torch.arange(count) * len(x) // count]
