"""Render the tables of docs/results/ruler.md from the figures next to it, and gather what its runs say.

python tools/ruler_page.py runs RESULT.json ... --out docs/results/ruler/runs.json
python tools/ruler_page.py tables docs/results/ruler
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

from leanbayes.runtime._files import write_text

CURVE = ("Networks", "Subsets", "Accuracy %", "NLL", "Calibrated NLL", "ECE %")
PARTS = ("Method", "Part", "Seeds", "Accuracy %", "NLL", "Calibrated NLL", "ECE %", "Worth networks", "Gain", "Paired")
CENTRE = ("Method", "Seeds", "Members, no noise", "One member", "The prediction")
SEEDS = ("Method", "Seed", "Accuracy %", "NLL", "Calibrated NLL", "ECE %", "Less plain, same seed")
PRICES = ("Network", "Method", "Seconds", "A step x", "A training x")
RUNS = ("Network", "Method", "Seeds", "AUROC SVHN", "Extra params %", "A step x", "Predict x", "Passes")
LATE = (
    "Plain epochs",
    "Seeds",
    "Accuracy %",
    "NLL",
    "Calibrated NLL",
    "ECE %",
    "Worth networks",
    "Less plain",
    "A training x",
)
LESS = ("Plain epochs", "Seeds", "Accuracy %", "NLL", "Calibrated NLL", "ECE %", "Centre, calibrated NLL")
FIGURES = (("accuracy", 100.0, 2), ("nll", 1.0, 4), ("cnll", 1.0, 4), ("ece", 100.0, 2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    gather = commands.add_parser("runs", help="write what result.json files say, without figures and histories")
    gather.add_argument("files", type=Path, nargs="+")
    gather.add_argument("--out", type=Path, required=True)
    show = commands.add_parser("tables", help="print the tables and the sentences")
    show.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "runs":
        found = [short(json.loads(path.read_text(encoding="utf-8"))) for path in given.files]
        write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", given.out)
    else:
        print("\n".join(f"{name}\n\n{table}" for name, table in tables(given.folder).items()))
        print("\n".join(f"* {line}" for line in (*worth_sentences(given.folder), *late_sentences(given.folder))))


def short(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without figures, histories, layers and the folder that its command wrote to."""
    kept = {name: value for name, value in result.items() if name not in ("figures", "history", "settings")}
    kept["cost"] = {name: value for name, value in result["cost"].items() if name != "layers"}
    kept["command"] = re.sub(r"--out \S+", "--out runs/ruler", result["command"])
    return kept


def tables(folder: Path) -> dict[str, str]:
    """Return the tables of the page by name, from `ruler.json`, `price.json`, `runs.json` and `late.json`."""
    ruler, price, runs = (json.loads((folder / f"{name}.json").read_text()) for name in ("ruler", "price", "runs"))
    found = ruler_tables(ruler)
    found["Four thin networks"] = table(
        ("One ensemble", "Calibrated NLL", "Worth networks", "Gain"),
        [
            (f"{len_of(ruler, each['net'])} x {each['net']}", f"{each['cnll']:.4f}", _worth(each), _gain(each))
            for each in ruler["against"]
            if each["bound"] == ""
        ],
    )
    epochs, before = _late(runs)
    found["Prices"] = price_table(price, epochs, before)
    found["Runs"] = table(RUNS, list(_runs(runs)))
    late = json.loads((folder / "late.json").read_text())
    found["When to convert"] = table(LATE, [_conversion(each, price, epochs) for each in late["conversions"]])
    others = [each for each in late["conversions"] if each["convert_at_epoch"] != before]
    found["Less the default"] = table(LESS, [_less(each, late, before) for each in others])
    return found


def ruler_tables(ruler: dict[str, Any]) -> dict[str, str]:
    """Return the tables of curves and methods by name."""
    found = {f"Curve of {curve['net']}": table(CURVE, map(_size, curve["curve"])) for curve in ruler["curves"]}
    parts = [(method, name, part) for method in ruler["methods"] for name, part in method["parts"].items()]
    found["Parts"] = table(PARTS, [_part(*each) for each in parts])
    found["Against the centre"] = table(CENTRE, [_centre(method) for method in ruler["methods"]])
    found["Seeds"] = table(SEEDS, [row for method in ruler["methods"] for row in _seeds(method)])
    return found


def price_table(price: dict[str, Any], epochs: int, before: int) -> str:
    """Return the prices of steps, and of trainings that are converted after a number of their epochs."""
    return table(PRICES, [_price(row, epochs, before) for row in price["rows"]])


def worth_sentences(folder: Path) -> list[str]:
    """Return a sentence for each method: its worth, its differences seed by seed, the worth of its centre."""
    found = []
    for method in json.loads((folder / "ruler.json").read_text())["methods"]:
        both, centre = (method["parts"][name] for name in ("both", "centre"))
        each, less = both["paired"]["differences"], _signed(both["paired"]["mean"], both["paired"]["se"])
        seeds = f"{len(each)} seeds" if len(each) > 1 else "one seed"
        sign = f", negative in {sum(value < 0 for value in each)} of {len(each)} seeds" if len(each) > 1 else ""
        found.append(
            f"`{method['method']}` is worth {_worth(both)} networks ({seeds}). Its calibrated NLL less that "
            f"of the plain network of the same seed is {less}{sign}. Its centre alone is worth {_worth(centre)}."
        )
    return found


def late_sentences(folder: Path) -> list[str]:
    """Return a sentence for each time of conversion but the default: its worth, and how it differs from it."""
    late, runs = (json.loads((folder / f"{name}.json").read_text()) for name in ("late", "runs"))
    epochs, before = _late(runs)
    found = []
    for each in late["conversions"]:
        if each["convert_at_epoch"] != before:
            less = less_of(each, late, before)
            found.append(
                f"Converted after {each['convert_at_epoch']} of {epochs} epochs, `{each['method']}` is worth "
                f"{_worth(each['parts']['both'])} networks ({len(each['seeds'])} seeds). Its calibrated NLL less that "
                f"of the conversion after {before} epochs, same seed, is {_mean_error(less)}, positive in "
                f"{sum(value > 0 for value in less)} of {len(less)} seeds."
            )
    return found


def less_of(
    each: dict[str, Any], late: dict[str, Any], before: int, figure: str = "cnll", part: str = "both"
) -> list[float]:
    """Return a figure of a conversion less that of the conversion after `before` epochs, for each common seed."""
    default = next(other for other in late["conversions"] if other["convert_at_epoch"] == before)
    own, other = (conversion["parts"][part]["by_seed"] for conversion in (each, default))
    return [figures[figure] - other[seed][figure] for seed, figures in own.items() if seed in other]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def count_of(seeds: Sized) -> str:
    """Return the number of seeds; one seed is called one seed."""
    return str(len(seeds)) if len(seeds) > 1 else "one seed"


def len_of(ruler: dict[str, Any], net: str) -> int:
    """Return how many networks of a kind were trained."""
    return next(len(curve["seeds"]) for curve in ruler["curves"] if curve["net"] == net)


def _size(row: dict[str, Any]) -> list[str]:
    cells = [str(row["networks"]), str(row["subsets"])]
    for name, scale, digits in FIGURES:
        error = row[name]["se_networks"]
        after = "" if error is None else f" ± {scale * error:.{digits}f}"
        cells.append(f"{scale * row[name]['mean']:.{digits}f}{after}")
    return cells


def _part(method: dict[str, Any], name: str, part: dict[str, Any]) -> list[str]:
    by_seed = part["by_seed"].values()
    figures = [f"{scale * statistics.fmean(f[key] for f in by_seed):.{digits}f}" for key, scale, digits in FIGURES]
    paired = _signed(part["paired"]["mean"], part["paired"]["se"])
    return [method["method"], name, count_of(by_seed), *figures, _worth(part), _gain(part), paired]


def _worth(found: dict[str, Any]) -> str:
    """Return the equivalent with its error; outside of the curve it is a bound, and an error would say nothing."""
    signs = {"at most": "≤ ", "at least": "≥ "}
    if found["bound"]:
        return f"{signs[found['bound']]}{found['networks']:.1f}"
    return f"{found['networks']:.2f} ± {found['se']:.2f}"


def _gain(found: dict[str, Any]) -> str:
    return _signed(found["gain"], found["gain_se"])


def _signed(mean: float, error: float | None) -> str:
    return f"{mean:+.4f}" if error is None else f"{mean:+.4f} ± {error:.4f}"


def _mean_error(values: Sequence[float], scale: float = 1.0, digits: int = 4) -> str:
    """Return the mean and the standard error of values; one value has no error."""
    if len(values) == 1:
        return f"{scale * values[0]:+.{digits}f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{scale * statistics.fmean(values):+.{digits}f} ± {scale * error:.{digits}f}"


def _conversion(each: dict[str, Any], price: dict[str, Any], epochs: int) -> list[str]:
    """Return a row: a time of conversion, its figures, what it is worth, its difference from plain and its price."""
    _, _, seeds, *figures, worth, _, less = _part(each, "both", each["parts"]["both"])
    timed = next(r for r in price["rows"] if (r["net"], r["method"]) == (each["net"], each["method"]))
    before = each["convert_at_epoch"]
    return [str(before), seeds, *figures, worth, less, _price(timed, epochs, before)[-1]]


def _less(each: dict[str, Any], late: dict[str, Any], before: int) -> list[str]:
    """Return a row: the figures of a conversion less those of the default, seed by seed."""
    cells = [_mean_error(less_of(each, late, before, name), scale, digits) for name, scale, digits in FIGURES]
    centre = _mean_error(less_of(each, late, before, part="centre"))
    return [str(each["convert_at_epoch"]), str(len(each["seeds"])), *cells, centre]


def _centre(method: dict[str, Any]) -> list[str]:
    """Return the calibrated NLL of each part less that of the centre of the same seed: mean and standard error."""
    parts = {name: part["by_seed"] for name, part in method["parts"].items()}
    one = next(name for name in parts if name.startswith("one member"))
    cells: list[str] = []
    for name in ("members without noise", one, "both"):
        each = [parts[name][seed]["cnll"] - figures["cnll"] for seed, figures in parts["centre"].items()]
        cells.append(_mean_error(each))
    return [method["method"], count_of(method["seeds"]), *cells]


def _seeds(method: dict[str, Any]) -> Iterable[list[str]]:
    both = method["parts"]["both"]
    for (seed, figures), less in zip(both["by_seed"].items(), both["paired"]["differences"], strict=True):
        cells = [f"{scale * figures[key]:.{digits}f}" for key, scale, digits in FIGURES]
        yield [method["method"], seed, *cells, f"{less:+.4f}"]


def _late(runs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the epochs of the runs and after how many of them they were converted."""
    found = {(r["recipe"]["epochs"], r["recipe"]["convert_at_epoch"]) for r in runs if r["method"]["name"] != "plain"}
    (only,) = found
    return only


def _price(row: dict[str, Any], epochs: int, before: int) -> list[str]:
    """Return a row: epochs before the conversion cost what those of the plain network cost."""
    whole = row["ratio"] if row["method"] == "plain" else (before + (epochs - before) * row["ratio"]) / epochs
    return [row["net"], row["method"], f"{row['median']:.2f}", f"{row['ratio']:.2f}", f"{whole:.2f}"]


def _runs(runs: Sequence[dict[str, Any]]) -> Iterable[list[str]]:
    """Yield what the finished evaluations say, a row for each network and method."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["network"]["name"], run["method"]["name"]), []).append(run)
    for (net, method), each in groups.items():
        values = [run["metrics"]["ood"]["svhn"]["auroc"] for run in each]
        error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
        cost = each[0]["cost"]
        cells = [f"{cost[name]:.2f}" for name in ("extra_percent", "train_step_ratio", "predict_ratio")]
        yield [net, method, count_of(each), f"{statistics.fmean(values):.3f}{error}", *cells, str(cost["passes"])]


if __name__ == "__main__":
    main()
