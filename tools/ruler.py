"""Measure methods by ensembles of plain networks: predictions of finished runs, sub-ensembles, equivalents, prices.

python -m tools.ruler predict RUN FILE.npz [--device cuda] [--no-noise]
python -m tools.ruler score FILE.npz ... --out ruler.json
python -m tools.ruler late FILE.npz ... --out late.json
python -m tools.ruler floor FILE.npz ... --out floor.json
python -m tools.ruler price --out price.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from leanbayes import metrics
from leanbayes.compare.experiment import maker
from leanbayes.compare.job import method_of, PLAIN
from leanbayes.evaluation.result import commit, environment
from leanbayes.runtime._files import write_text
from tools.ruler_scores import ece_floor, paired, read_predictions, Ruler, save_predictions, Saved, score, Scored

Key = tuple[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("predict", help="write the class probabilities of a finished run on the test rows")
    one.add_argument("run", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--samples", type=int, default=16)
    one.add_argument("--no-noise", action="store_true", help="leave out each member with noise")
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    one.add_argument("--root")
    many = commands.add_parser("score", help="score sub-ensembles and methods from such files")
    many.add_argument("files", type=Path, nargs="+")
    many.add_argument("--out", type=Path, required=True)
    late = commands.add_parser("late", help="score one method that was converted after different numbers of epochs")
    late.add_argument("files", type=Path, nargs="+")
    late.add_argument("--out", type=Path, required=True)
    floor = commands.add_parser("floor", help="put the ECE of every prediction next to that of a calibrated network")
    floor.add_argument("files", type=Path, nargs="+")
    floor.add_argument("--out", type=Path, required=True)
    price = commands.add_parser(
        "price", help="time training epochs next to those of a plain network, on an idle machine"
    )
    price.add_argument("--net", default="wrn-16-4")
    price.add_argument("--rows", nargs="+", default=["wrn-16-2:plain", "wrn-16-4:rank1", "wrn-16-4:batch_ensemble"])
    price.add_argument("--steps", type=int, default=100)
    price.add_argument("--epochs", type=int, default=5)
    price.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    price.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.command == "predict":
        how = {"samples": given.samples, "noise": not given.no_noise, "device": given.device, "root": given.root}
        save_predictions(given.run, given.out, **how)
    elif given.command == "score":
        _write(scores([read_predictions(path) for path in given.files]), given.out)
    elif given.command == "late":
        _write(conversions([read_predictions(path) for path in given.files]), given.out)
    elif given.command == "floor":
        _write(floors([read_predictions(path) for path in given.files]), given.out)
    else:
        _write(prices(given), given.out)


def scores(runs: Sequence[Saved]) -> dict[str, Any]:
    """Return the curve of every plain network, and what every other method is worth against that of its network.

    A plain network of one seed has no curve: `alone` has its figures.
    """
    y = _targets(runs)
    groups: dict[Key, dict[int, Saved]] = {}
    for run in runs:
        groups.setdefault((run.about["net"], run.about["method"]["name"]), {})[run.about["seed"]] = run
    every = {net: members for (net, method), members in groups.items() if method == PLAIN}
    plain = {net: members for net, members in every.items() if len(members) > 1}
    rulers = {
        net: Ruler([members[seed].parts["both"] for seed in sorted(members)], y) for net, members in plain.items()
    }
    found: dict[str, Any] = {
        "commit": commit(),
        "data": runs[0].about["data"],
        "curves": [
            {"net": net, "seeds": sorted(plain[net]), "curve": ruler.table(), "by_seed": _by_seed(plain[net])}
            for net, ruler in rulers.items()
        ],
        "methods": [_method(key, members, rulers, plain) for key, members in groups.items() if key[1] != PLAIN],
    }
    found["against"] = [
        {"net": thin, "of": net, "networks": len(plain[thin])} | rulers[net].worth([_ensemble(plain[thin])])
        for net in rulers
        for thin in rulers
        if thin != net
    ]
    if alone := [net for net in every if net not in plain]:
        found["alone"] = [{"net": net, "method": PLAIN, "by_seed": _by_seed(every[net])} for net in alone]
    return found


def conversions(runs: Sequence[Saved]) -> dict[str, Any]:
    """Return what one method is worth for each number of plain epochs before its conversion, fewest first.

    Raises:
        ValueError: if the runs have other test rows, several networks, methods or numbers of epochs, or no plain ones.
    """
    y = _targets(runs)
    plain = {run.about["seed"]: run for run in runs if run.about["method"]["name"] == PLAIN}
    others = [run for run in runs if run.about["method"]["name"] != PLAIN]
    kinds = {(run.about["net"], json.dumps(run.about["method"]), run.about["recipe"]["epochs"]) for run in others}
    nets = {run.about["net"] for run in runs}
    if len(kinds) != 1 or len(nets) != 1 or len(plain) < 2:
        raise ValueError(
            "expected one method with one number of epochs and at least two plain networks, all of one network, got "
            f"{len(kinds)} methods, {len(plain)} plain networks and the networks {', '.join(sorted(nets))}"
        )
    groups: dict[int, dict[int, Saved]] = {}
    for run in others:
        groups.setdefault(run.about["recipe"]["convert_at_epoch"], {})[run.about["seed"]] = run
    net, key = others[0].about["net"], (others[0].about["net"], others[0].about["method"]["name"])
    rulers = {net: Ruler([plain[seed].parts["both"] for seed in sorted(plain)], y)}
    return {
        "commit": commit(),
        "data": runs[0].about["data"],
        "method": others[0].about["method"],
        "recipe": {n: v for n, v in others[0].about["recipe"].items() if n not in ("seed", "convert_at_epoch")},
        "conversions": [
            {"convert_at_epoch": epoch} | _method(key, groups[epoch], rulers, {net: plain}) for epoch in sorted(groups)
        ],
    }


def floors(runs: Sequence[Saved]) -> dict[str, Any]:
    """Return the ECE of each run, and of the ensemble of all plain networks of a kind, next to its noise floor."""
    y = _targets(runs)
    rows: list[dict[str, Any]] = []
    plain: dict[str, list[torch.Tensor]] = {}
    for run in runs:
        about, p = run.about, run.parts["both"]
        name = about["method"]["name"]
        when = {key: about["recipe"][key] for key in ("epochs", "convert_at_epoch")}
        rows.append({"net": about["net"], "method": name, "seed": about["seed"], "networks": 1} | when | _floor(p, y))
        if name == PLAIN:
            plain.setdefault(about["net"], []).append(p.double())
    for net, members in plain.items():
        if len(members) > 1:
            found = _floor(torch.stack(members).mean(0), y)
            rows.append({"net": net, "method": PLAIN, "seed": None, "networks": len(members)} | found)
    return {"commit": commit(), "data": runs[0].about["data"], "rows": rows}


def _floor(p: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    return {"ece": float(metrics.ece(p, y)), "floor": ece_floor(p)}


def _targets(runs: Sequence[Saved]) -> torch.Tensor:
    """Return the classes of the test rows, which must be the same in all files."""
    y = runs[0].y
    if any(not torch.equal(run.y, y) for run in runs):
        raise ValueError("expected predictions of the same test rows in all files, got different targets")
    return y


def _method(
    key: Key, members: dict[int, Saved], rulers: dict[str, Ruler], plain: dict[str, dict[int, Saved]]
) -> dict[str, Any]:
    """Return the figures of a method by seed and by part, and what each part is worth."""
    net, method = key
    parts: dict[str, dict[int, Scored]] = {}
    for seed, run in sorted(members.items()):
        parts.setdefault("both", {})[seed] = score(run.parts["both"], run.y)
        if run.members is not None:
            parts.setdefault("members without noise", {})[seed] = score(run.members, run.y)
            parts.setdefault("centre", {})[seed] = score(run.parts["centre"], run.y)
            alone = run.noisy or [p for name, p in run.parts.items() if name.startswith("member")]
            name = "one member with noise" if run.noisy else "one member"
            parts.setdefault(name, {})[seed] = _mean([score(p, run.y) for p in alone])
    found: dict[str, Any] = {"net": net, "method": method, "seeds": sorted(members), "parts": {}}
    for name, by_seed in parts.items():
        entry: dict[str, Any] = {"by_seed": {str(seed): each.figures for seed, each in by_seed.items()}}
        if net in rulers:
            scored = {seed: score(run.parts["both"], run.y) for seed, run in plain[net].items()}
            entry |= rulers[net].worth(list(by_seed.values())) | {"paired": paired(by_seed, scored)}
        found["parts"][name] = entry
    return found


def _mean(scored: Sequence[Scored]) -> Scored:
    """Return the means of the figures of several predictions, such as each member alone."""
    figures = {name: statistics.fmean(each.figures[name] for each in scored) for name in scored[0].figures}
    rows = {name: torch.stack([each.rows[name] for each in scored]).mean(0) for name in scored[0].rows}
    return Scored(figures, rows)


def _ensemble(members: dict[int, Saved]) -> Scored:
    """Score the ensemble of all networks."""
    runs = list(members.values())
    return score(torch.stack([run.parts["both"].double() for run in runs]).mean(0), runs[0].y)


def _by_seed(members: dict[int, Saved]) -> dict[str, dict[str, float]]:
    return {str(seed): score(run.parts["both"], run.y).figures for seed, run in sorted(members.items())}


def prices(given: argparse.Namespace) -> dict[str, Any]:
    """Time compiled bf16 training epochs of random rows: the median after the first two, and its ratio to `--net`."""
    from leanbayes import fit, Recipe
    from leanbayes.core import conversion as convert

    batch = 256 if given.device == "cuda" else 16
    x = torch.randn(batch * given.steps, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % 10
    recipe = Recipe(epochs=given.epochs, batch_size=batch, lr=0.01, compile=given.device == "cuda")
    recipe = replace(recipe, precision="bf16-mixed", accelerator=given.device)
    rows = []
    for name in [f"{given.net}:{PLAIN}", *given.rows]:
        net, _, method = name.partition(":")
        torch.manual_seed(0)
        model = maker(net, num_outputs=10, input_shape=(3, 32, 32))()
        chosen = method_of(method)
        model = model if chosen is None else convert(model, chosen)
        seconds = [row["seconds"] for row in fit(model, (x, y), recipe, progress=False)]
        rows.append({"net": net, "method": method, "seconds": seconds, "median": statistics.median(seconds[2:])})
        rows[-1]["ratio"] = rows[-1]["median"] / rows[0]["median"]
    return {"commit": commit(), "batch": batch, "steps": given.steps, "rows": rows} | {
        "environment": environment(torch.device(given.device))
    }


def _write(found: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", out)


if __name__ == "__main__":
    main()
