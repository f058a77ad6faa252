"""Choose the prior of the temperature of `leanbayes compare`, on held-out training rows alone.

    python -m tools.temperature_study RUNS ...      write docs/results/rule/temperature.json from comparisons
    python -m tools.temperature_study               print its table

Every run is a network that was trained without its held-out rows. These are divided at random, 40 times: n rows fit the
temperature, the others score it. The loss is the mean NLL of the scored rows, minus that without a temperature. Priors
are log T ~ Normal(0, s^2); "none" is the maximum of the likelihood.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.compare.load_run import load_run
from leanbayes.data.holdout import held_out
from leanbayes.metrics import best_joint_temperature
from leanbayes.runtime._files import write_text

FILE = Path(__file__).parent.parent / "docs" / "results" / "rule" / "temperature.json"

PRIORS = (None, 1.0, 0.5, 0.3, 0.2, 0.1)
ROWS = (25, 50, 100, 200)
DIVISIONS = 40


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--methods", default="plain,swag,patch,laplace")
    given = parser.parse_args(arguments)
    if not given.runs:
        print(table(json.loads(FILE.read_text(encoding="utf-8"))))
        return
    found = [each for folder in given.runs for method in given.methods.split(",") for each in rows_of(folder, method)]
    write_text(json.dumps(found, indent=1) + "\n", FILE)


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the gains of the mean NLL as a table."""
    lines = ["| data | method | n | seeds |" + "".join(f" {prior or 'none'} |" for prior in PRIORS)]
    lines.append("| --- | --- | ---: | ---: |" + " ---: |" * len(PRIORS))
    for one in found:
        cells = [f"{mean:+.4f} ± {error:.4f}" for mean, error in one["nll"]]
        lines.append(f"| {one['data']} | {one['method']} | {one['rows']} | {one['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(folder: Path, method: str) -> list[dict[str, Any]]:
    """Return, for each number of rows, the mean change of the NLL over seeds with its standard error, by prior."""
    changes: dict[int, list[list[float]]] = {}
    for run in sorted(folder.glob(f"*/*/{method}/seed*/result.json")):
        seed = int(run.parent.name[4:])
        for rows, found in losses(*held_out_answers(run.parent, seed), seed).items():
            changes.setdefault(rows, []).append(found)
    return [
        {
            "data": folder.name,
            "method": method,
            "rows": rows,
            "seeds": len(by_seed),
            "nll": [
                (statistics.fmean(one), statistics.stdev(one) / len(one) ** 0.5) for one in zip(*by_seed, strict=True)
            ],
        }
        for rows, by_seed in changes.items()
    ]


def held_out_answers(run: Path, seed: int) -> tuple[Tensor, Tensor]:
    """Return the class probabilities and targets of the rows that a run held out."""
    loaded = load_run(run)
    x, y = loaded.data.prepared(loaded.data.train)
    out = held_out(y, loaded.source.validation, seed)
    return lb.predict(loaded.model, x[out], loaded.likelihood).mean, y[out]


def losses(p: Tensor, y: Tensor, seed: int) -> dict[int, list[float]]:
    """Return, for each number of rows and each prior, the mean loss of the others over random divisions."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, list[float]] = {}
    for rows in (rows for rows in ROWS if 3 * rows <= 2 * len(y)):
        each: list[list[float]] = []
        for _ in range(DIVISIONS):
            order = torch.randperm(len(y), generator=generator)
            fitted, scored = order[:rows], order[rows:]
            logs, targets = p[scored].double().clamp(min=1e-38).log(), y[scored]
            before = torch.nn.functional.nll_loss(logs, targets)
            inverses = [1 / best_joint_temperature([p[fitted]], y[fitted], prior=prior).item() for prior in PRIORS]
            after = [torch.nn.functional.cross_entropy(inverse * logs, targets) for inverse in inverses]
            each.append([float(loss - before) for loss in after])
        found[rows] = [statistics.fmean(one) for one in zip(*each, strict=True)]
    return found


if __name__ == "__main__":
    main()
