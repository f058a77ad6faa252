"""Compare designs of draws: quality at 1 to 32 draws, independent and paired, on held-out training rows.

python -m tools.designs score runs/curve/fashion runs/curve/patch --out docs/results/designs/fashion-mnist-lenet.json
python -m tools.designs page docs/results/designs/fashion-mnist-lenet.json

The networks are those of `tools/curve.py`. Draw i does not depend on the number of draws, so the first S of 32 draws
are the prediction with S draws. With probabilities p_s of a row

    mean p = 1/S sum_s p_s,    total H[p],    epistemic H[p] - 1/S sum_s H[p_s].

Figures are means over seeds of draws. The default design changes only if four paired draws have an NLL that is lower by
more than two standard errors over seeds, paired by seed, for each method. Test rows are not looked at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from leanbayes import metrics
from leanbayes.core.predictor import predict
from leanbayes.evaluation.result import commit, environment
from leanbayes.runtime._files import write_text
from leanbayes.runtime.noise import Design
from tools.curve_runs import Runs, Study

COUNTS = (1, 2, 4, 8, 16, 32)
DECIDING = 4
DESIGNS: tuple[Design, ...] = get_args(Design)
TITLES = {"nll": "NLL", "ece": "ECE %", "auroc_total": "AUROC, total", "auroc_epistemic": "AUROC, epistemic"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("score", "page"))
    parser.add_argument("files", nargs="+", type=Path, help="folders of networks, or the file of figures")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--draw-seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    if given.command == "page":
        found = json.loads(given.files[0].read_text(encoding="utf-8"))
        print("\n\n".join([*tables(found), *sentences(found)]))
        return
    seeds = [int(seed) for seed in given.seeds.split(",")]
    points = [p for folder in given.files for p in scored(folder, seeds, given.draw_seeds, given.device)]
    about = {"draw_seeds": given.draw_seeds, "commit": commit(), "environment": environment(torch.device(given.device))}
    study = Study.read(given.files[0])
    about |= {"data": study.data, "net": study.net, "rows": study.hold_out, "ood": list(study.ood)}
    write_text(json.dumps(about | {"points": points}, indent=1, allow_nan=False) + "\n", given.out)


def scored(folder: Path, seeds: Sequence[int], draw_seeds: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of each method, seed and design."""
    study = Study.read(folder)
    runs = Runs(study, folder)
    held = runs.experiment.data.test  # held-out training rows
    x, y = runs.experiment.data.inputs(held.x).to(device), held.y.long()
    ood = torch.cat([inputs for inputs, _ in runs.experiment.ood.values()]).to(device)
    for method in study.methods:
        for seed in seeds:
            model = runs.model(seed, method, device)
            for design in DESIGNS:
                several = []
                for draw_seed in range(draw_seeds):
                    given: dict[str, Any] = {"samples": COUNTS[-1], "seed": draw_seed, "design": design}
                    inside, outside = (predict(model, some, **given).samples for some in (x, ood))
                    assert inside is not None
                    assert outside is not None
                    several.append([figures(inside[:n].cpu(), y, outside[:n].cpu()) for n in COUNTS])
                means = [_mean(by_draw_seed) for by_draw_seed in zip(*several, strict=True)]
                counts = {str(n): found for n, found in zip(COUNTS, means, strict=True)}
                sys.stderr.write(f"{method}, seed {seed}, {design}: NLL {counts[str(DECIDING)]['nll']:.4f}\n")
                yield {"method": method, "seed": seed, "design": design, "draws": counts}


def figures(inside: Tensor, y: Tensor, outside: Tensor) -> dict[str, float]:
    """Return the figures of probabilities (S, N, C) and classes, against those of out-of-distribution rows."""
    found, (total, epistemic), (far, unknown) = inside.double().mean(0), parts(inside), parts(outside)
    return {
        "nll": float(metrics.nll(found, y)),
        "ece": 100 * float(metrics.ece(found, y)),
        "auroc_total": float(metrics.auroc(total, far)),
        "auroc_epistemic": float(metrics.auroc(epistemic, unknown)),
    }


def parts(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return total and epistemic uncertainty of probabilities (S, N, C) in nats."""
    p = p.double()
    total = torch.special.entr(p.mean(0)).sum(-1)
    return total, total - torch.special.entr(p).sum(-1).mean(0)


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in found) for name in found[0]}


def by_seed(found: Mapping[str, Any], method: str, design: str, draws: int, figure: str) -> list[float]:
    """Return a figure of each seed."""
    points = [p for p in found["points"] if (p["method"], p["design"]) == (method, design)]
    return [p["draws"][str(draws)][figure] for p in sorted(points, key=lambda p: p["seed"])]


def difference(found: Mapping[str, Any], method: str, draws: int, figure: str = "nll") -> tuple[float, float]:
    """Return the figure of paired draws less that of independent ones: mean and standard error over seeds."""
    paired, independent = (by_seed(found, method, design, draws, figure) for design in ("paired", "independent"))
    less = [a - b for a, b in zip(paired, independent, strict=True)]
    return statistics.fmean(less), statistics.stdev(less) / len(less) ** 0.5


def methods_of(found: Mapping[str, Any]) -> list[str]:
    """Return the methods in their order."""
    return list(dict.fromkeys(p["method"] for p in found["points"]))


def tables(found: Mapping[str, Any]) -> list[str]:
    """Return a table for each figure: its mean over seeds by method, design and draws; and the differences in NLL."""
    made = []
    for figure, title in TITLES.items():
        heads = [f"| {title} | design | {' | '.join(map(str, COUNTS))} |", f"| --- | --- |{' ---: |' * len(COUNTS)}"]
        digits = 2 if figure == "ece" else 4 if figure == "nll" else 3
        for method in methods_of(found):
            for design in DESIGNS:
                values = [statistics.fmean(by_seed(found, method, design, n, figure)) for n in COUNTS]
                cells = [
                    "" if figure.endswith("epistemic") and n == 1 else f"{v:.{digits}f}"
                    for n, v in zip(COUNTS, values, strict=True)
                ]
                heads.append(f"| {method} | {design} | {' | '.join(cells)} |")
        made.append("\n".join(heads))
    lines = [f"| NLL, paired less independent | {' | '.join(map(str, COUNTS))} |", f"| --- |{' ---: |' * len(COUNTS)}"]
    for method in methods_of(found):
        cells = ["{:+.4f} ± {:.4f}".format(*difference(found, method, n)) for n in COUNTS]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return [*made, "\n".join(lines)]


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Return what the rule says of each method."""
    said = []
    for method in methods_of(found):
        mean, error = difference(found, method, DECIDING)
        gain = "a gain" if mean < -2 * error else "no gain"
        said.append(
            f"`{method}`: {DECIDING} paired draws less {DECIDING} independent ones is {mean:+.4f} ± {error:.4f} "
            f"nats, {gain} of more than two standard errors."
        )
    return said


if __name__ == "__main__":
    main()
