"""Time every way to an answer next to a pass of the plain network, alternately, in the same mode.

Both are built predictors: the same chunks, precision and memory order, and with `--capture` both are CUDA graphs. On a
CPU the process time of one thread counts, on a GPU the time until the kernels have ended. `called` is the plain network
called on all rows at once, with a softmax, in passes of its predictor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.compare.job import PLAIN
from leanbayes.core.predictor import Predictor
from leanbayes.evaluation.cost import times, Work
from leanbayes.evaluation.result import commit, environment
from leanbayes.runtime._files import write_text
from leanbayes.training.objective import autocast
from tools.curve_runs import Runs
from tools.curve_scores import ways


def price_all(runs: Runs, seed: int, rows: Sequence[str], device: str, given: argparse.Namespace) -> None:
    """Time the ways of some trained rows and write their prices; those of a file stay."""
    place = torch.device(device)
    if place.type == "cpu":
        torch.set_num_threads(1)
    x = runs.experiment.data.inputs(_some(runs.test.x, given.price_rows)).to(place)
    about: dict[str, Any] = {"data": runs.study.data, "net": runs.study.net, "seed": seed, "rows": len(x)}
    about |= {"device": place.type}
    about |= {"turns": given.turns, "precision": runs.study.precision, "capture": given.capture}
    path: Path = given.into / f"{runs.study.data}-{runs.study.net}-price.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if other := [name for name, value in about.items() if name in found and found[name] != value]:
        raise ValueError(f"'{path}' has prices with another {', '.join(other)}; choose another --into")
    done = {(one["row"], one["way"]): one for one in found.get("points", [])}
    net, kind = runs.model(seed, PLAIN, device), runs.study.precision
    plain = Predictor(net, keep_samples=False, capture=given.capture)
    against = partial(ratios, x=x, kind=kind, turns=given.turns, least=given.seconds)
    called = found.get("called") or against(partial(_call, net, x), partial(plain, x))
    every, own = ways(runs, seed, device), {"commit": commit(), "environment": environment(place)}
    for way in every:
        if way.row in rows and (way.row, way.name) not in done:
            answer = way.predictor(way.make(), capture=given.capture)
            measured = against(partial(answer, x), partial(plain, x))
            done[way.row, way.name] = {"row": way.row, "way": way.name} | measured
            sys.stderr.write(f"{way.row}, {way.name}: {done[way.row, way.name]['ratio']:.3f} plain passes\n")
        points = [done[key] for each in every if (key := (each.row, each.name)) in done]
        text = json.dumps(about | own | {"called": called, "points": points}, indent=1)
        write_text(text + "\n", path)


def ratios(one: Work, other: Work, *, x: Tensor, kind: str, turns: int, least: float) -> dict[str, Any]:
    """Return the median over turns of time(one) / time(other), its quartiles, and both times in ms for a row.

    A measurement has as many calls as take `least` seconds.
    """
    own, base = (_several(run, x.device, kind, least) for run in (one, other))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # answers with a tolerance cannot be captured
        pairs = [(a / own[1], b / base[1]) for a, b in times(own[0], base[0], turns, x.device)]
    found = [a / b for a, b in pairs]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    ms = [1e3 * statistics.median(column) / len(x) for column in zip(*pairs, strict=True)]
    return {"ratio": statistics.median(found), "quartiles": [low, high], "ms": ms[0], "plain_ms": ms[1]}


def _several(run: Work, device: torch.device, kind: str, least: float) -> tuple[Work, int]:
    """Return work of at least `least` seconds, and its number of calls."""

    def calls(count: int) -> None:
        with autocast(kind, device):
            for _ in range(count):
                run()

    ((once, _),) = times(partial(calls, 2), partial(calls, 1), 1, device)
    count = max(1, math.ceil(2 * least / max(once, 1e-6)))
    return partial(calls, count), count


@torch.no_grad()
def _call(net: nn.Module, x: Tensor) -> Tensor:
    outputs: Tensor = net(x)
    return outputs.float().softmax(1)


def _some(x: Tensor, wanted: int) -> Tensor:
    """Return evenly spaced rows."""
    count = min(wanted, len(x))
    return x[torch.arange(count) * len(x) // count]
