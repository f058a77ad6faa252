"""Render docs/results/curve.md and its pictures from the figures of tools/curve.py.

python -m tools.curve_page docs/results/curve > docs/results/curve.md

The goal of a method, by means over seeds, each side alone: an answer for at most 2.0 plain passes, by measured time,
whose NLL is at most 1 % above that of sixteen draws with all layers converted, and whose AUROC by both uncertainties is
at most 0.01 below theirs; and a student for at most 1.05 passes whose NLL is at most 2 % above. Both are dropped where
sixteen draws do not beat the mean network by more than two standard errors: the larger one of those over seeds and over
test rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import curve_chart
from tools.ruler_page import table

ALL, MEAN, PLAIN, STUDENT = "16 draws", "mean network", "plain network", "student"
SIDES = {"raw": "without a temperature", "tempered": "with a temperature"}
MOST, STUDENT_MOST = 2.0, 1.05
NEAR, STUDENT_NEAR, AREA = 0.01, 0.02, 0.01
QUALITY = ("Way", "Draws", "Price (quartiles)", "Multiply-adds", "Accuracy %", "NLL", "ECE %", "AUROC, total")
QUALITY += ("AUROC, epistemic",)
AGAINST = ("Way", "Price", "NLL less 16 draws'", "NLL, % above", "AUROC less, total", "AUROC less, epistemic", "Near")
GAIN = ("Method", "Side", "By seed", "Mean ± over seeds", "Error over rows", "Sixteen draws beat the mean network")
NAMES = {"fashion-mnist": "Fashion-MNIST", "lenet": "LeNet", "cifar10": "CIFAR-10", "wrn-28-10": "WRN-28-10"}


@dataclass(frozen=True)
class Curve:
    """The figures of all seeds for one data set and network, the prices, and the errors over test rows."""

    seeds: Sequence[Mapping[str, Any]]
    price: Mapping[str, Any]
    rows: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The common start of the names of the files."""
        return f"{self.seeds[0]['data']}-{self.seeds[0]['net']}"

    @property
    def methods(self) -> list[str]:
        """The converted methods."""
        return list(dict.fromkeys(point["method"] for point in self.seeds[0]["points"] if point["method"]))

    def ways(self, method: str) -> list[Mapping[str, Any]]:
        """Return the ways of a method, and those of plain networks, cheap ones first."""
        known = self.prices
        own = [p for p in self.seeds[0]["points"] if p["method"] in (method, "")]
        return sorted((p for p in own if _key(p) in known), key=lambda p: known[_key(p)]["ratio"])

    @property
    def prices(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """The prices by row and way."""
        return {_key(point): point for point in self.price["points"]}

    def points(self, way: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return a way in every seed."""
        return [next(p for p in seed["points"] if _key(p) == _key(way)) for seed in self.seeds]

    def values(self, way: Mapping[str, Any], side: str, *path: str) -> list[float]:
        """Return a figure of a way in every seed; none where there is no such figure."""
        found = []
        for point in self.points(way):
            value: Any = point[side]
            for name in path:
                value = value.get(name) if value else None
            if value is not None:
                found.append(float(value))
        return found

    def areas(self, way: Mapping[str, Any], side: str, kind: str) -> list[float]:
        """Return the AUROC of a way in every seed, the mean over the other data sets."""
        each = [self.values(way, side, "auroc", name, kind) for name in self.seeds[0]["rows"]["ood"]]
        return [statistics.fmean(column) for column in zip(*each, strict=True)]

    def whole(self, method: str) -> Mapping[str, Any]:
        """Return sixteen draws of the network with all layers converted."""
        return next(way for way in self.ways(method) if way["way"] == ALL)


def _key(point: Mapping[str, Any]) -> tuple[str, str]:
    return point["row"], point["way"]


@dataclass(frozen=True)
class Near:
    """How far a way is from sixteen draws: differences by seed; `areas` by kind of uncertainty."""

    way: Mapping[str, Any]
    price: float
    nll: Sequence[float]
    share: Sequence[float]
    areas: Mapping[str, Sequence[float]]

    @property
    def holds(self) -> bool:
        """Whether it is within the goal, at any price."""
        areas = all(each and statistics.fmean(each) >= -AREA for each in self.areas.values())
        return areas and statistics.fmean(self.share) <= NEAR


def near(curve: Curve, way: Mapping[str, Any], method: str, side: str) -> Near:
    """Return how far a way is from sixteen draws of a method."""
    whole = curve.whole(method)
    pairs = list(zip(curve.values(way, side, "nll"), curve.values(whole, side, "nll"), strict=True))
    areas = {
        kind: [a - b for a, b in zip(curve.areas(way, side, kind), curve.areas(whole, side, kind), strict=False)]
        for kind in ("total", "epistemic")
    }
    price = curve.prices[_key(way)]["ratio"]
    return Near(way, price, [a - b for a, b in pairs], [a / b - 1 for a, b in pairs], areas)


def gain(curve: Curve, method: str, side: str) -> tuple[list[float], float, bool]:
    """Return NLL of sixteen draws less that of the mean network by seed, the error over rows, and whether it is a gain.

    The error is that of the mean over seeds. The larger one of it and of the error over seeds decides.
    """
    whole = curve.whole(method)
    values = [point["less"][MEAN][side][0] for point in curve.points(whole)]
    error = float(next(p for p in curve.rows["points"] if _key(p) == _key(whole))["less"][MEAN][side][1])
    return values, error, statistics.fmean(values) < -2 * max(error, over_seeds(values))


def over_seeds(values: Sequence[float]) -> float:
    """Return the standard error over seeds; that of one seed is not known, so infinite."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def read(folder: Path) -> list[Curve]:
    """Return the curves of a folder: of each data set and network with prices."""
    found = []
    for path in sorted(folder.glob("*-price.json")):
        seeds = sorted(folder.glob(path.name.replace("-price.json", "-seed*.json")))
        each = [json.loads(one.read_text(encoding="utf-8")) for one in seeds]
        rows = json.loads(Path(str(path).replace("-price.json", "-rows.json")).read_text(encoding="utf-8"))
        found.append(Curve(each, json.loads(path.read_text(encoding="utf-8")), rows))
    return found


def tables(curve: Curve) -> dict[str, str]:
    """Return the tables of a curve by title."""
    rows = [_gain(curve, method, side) for method in curve.methods for side in SIDES]
    found = {"Do sixteen draws beat the mean network?": table(GAIN, rows)}
    for method in curve.methods:
        for side, said in SIDES.items():
            ways = curve.ways(method)
            found[f"{method}, {said}"] = table(QUALITY, [_quality(curve, way, side) for way in ways])
            found[f"{method}, {said}: against sixteen draws"] = table(
                AGAINST, [_against(near(curve, way, method, side)) for way in ways]
            )
    return found


def verdicts(curve: Curve) -> Iterator[str]:
    """Yield a sentence for each method and side: whether the goals are met."""
    for method in curve.methods:
        for side, said in SIDES.items():
            yield f"`{method}`, {said}: {_verdict(curve, method, side)}"


def _verdict(curve: Curve, method: str, side: str) -> str:
    values, error, beats = gain(curve, method, side)
    start = f"sixteen draws less the mean network is {signed(values)} NLL ({error:.4f} over test rows)"
    if not beats:
        return f"{start}, not a gain of more than two standard errors. The goals are dropped."
    every = [near(curve, way, method, side) for way in curve.ways(method) if way["method"]]
    cheap = [f"{n.way['way']} ({n.price:.2f} passes)" for n in every if n.price <= MOST and n.holds]
    first = (
        f"The goal of {MOST} passes is met by {', '.join(cheap)}."
        if cheap
        else f"No way of at most {MOST} passes is near."
    )
    student = next(n for n in every if n.way["way"] == STUDENT)
    met = student.price <= STUDENT_MOST and statistics.fmean(student.share) <= STUDENT_NEAR
    other = "" if all(statistics.fmean(v) >= -AREA for v in student.areas.values()) else " Its AUROC is not near."
    second = (
        f"The goal of the student is {'met' if met else 'not met'}: {percent(student.share)} above, for "
        f"{student.price:.2f} passes.{other}"
    )
    return f"{start}. {first} {second}"


def draws_sentence(curve: Curve) -> str:
    """Return how far few draws and the student are from sixteen draws, for all methods."""
    parts = []
    for method in curve.methods:
        found = {way["way"]: near(curve, way, method, "raw").share for way in curve.ways(method)}
        two, four, eight = (f"{100 * statistics.fmean(found[f'{count} draws']):.1f}" for count in (2, 4, 8))
        student = percent(found[STUDENT]).lstrip("+")
        parts.append(
            f"`{method}`: {two} % with 2 draws, {four} % with 4, {eight} % with 8, and {student} with a student of one "
            "pass"
        )
    seeds = "one seed" if len(curve.seeds) == 1 else f"{len(curve.seeds)} seeds"
    data, net, rows = _named(curve.seeds[0]["data"]), _named(curve.seeds[0]["net"]), curve.seeds[0]["rows"]["train"]
    return (
        f"On {data} ({net}, {rows:,} training rows, {seeds}), without a temperature, the NLL is above that of 16 draws "
        f"by this much. {'. '.join(parts)}."
    )


def rule_sentence(curve: Curve) -> str:
    """Return where the error over seeds alone would decide otherwise."""
    found = []
    for method in curve.methods:
        for side, said in SIDES.items():
            values, _, beats = gain(curve, method, side)
            if beats != (statistics.fmean(values) < -2 * over_seeds(values)):
                found.append(f"`{method}` {said}")
    where = f"By the error over seeds alone {', '.join(found)} would have a gain, too." if found else ""
    return f"The error over test rows was added when the figures were known. {where}".strip()


def plain_sentences(curve: Curve) -> str:
    """Return how far plain networks are from sixteen draws: two of them, and one with a temperature."""
    pair = next(way for way in curve.ways(curve.methods[0]) if way["way"] == "ensemble of 2")
    one = next(way for way in curve.ways(curve.methods[0]) if way["way"] == PLAIN)
    two = [f"{percent(near(curve, pair, m, 'raw').share)} (`{m}`)" for m in curve.methods]
    alone = {m: near(curve, one, m, "tempered") for m in curve.methods}
    said = [f"{percent(found.share)} (`{m}`)" for m, found in alone.items()]
    areas = [f"{signed(found.areas['total'], 3)} (`{m}`)" for m, found in alone.items()]
    return (
        f"The NLL of an ensemble of two plain networks, at {curve.prices[_key(pair)]['ratio']:.2f} passes and two "
        f"trainings, less that of sixteen draws is {', '.join(two)}. With a temperature on both sides that of one "
        f"plain network is {', '.join(said)}, its AUROC by total uncertainty {', '.join(areas)}."
    )


def signed(values: Sequence[float], digits: int = 4) -> str:
    """Return the mean with its sign, and the standard error over seeds; one seed has none."""
    if not values:
        return ""
    error = f" ± {over_seeds(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.{digits}f}{error}"


def percent(values: Sequence[float]) -> str:
    """Return the mean of shares in percent, with the standard error."""
    return f"{signed([100 * value for value in values], 1)} %"


def _mean(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    return signed([scale * value for value in values], digits).lstrip("+")


def _gain(curve: Curve, method: str, side: str) -> list[str]:
    values, error, beats = gain(curve, method, side)
    cells = [", ".join(f"{value:+.4f}" for value in values), signed(values), f"{error:.4f}"]
    return [method, SIDES[side], *cells, "yes" if beats else "no"]


def _quality(curve: Curve, way: Mapping[str, Any], side: str) -> list[str]:
    points, price = curve.points(way), curve.prices[_key(way)]
    draws = statistics.fmean(point["draws"] for point in points)
    cost = "{:.2f} ({:.2f} to {:.2f})".format(price["ratio"], *price["quartiles"])
    madds = statistics.fmean(point["passes"] for point in points)
    cells = [_mean(curve.values(way, side, "accuracy"), 2, 100), _mean(curve.values(way, side, "nll"), 4)]
    cells += [_mean(curve.values(way, side, "ece"), 2, 100)]
    cells += [_mean(curve.areas(way, side, kind), 3) for kind in ("total", "epistemic")]
    return [way["way"], f"{draws:.1f}".removesuffix(".0"), cost, f"{madds:.2f}", *cells]


def _against(found: Near) -> list[str]:
    if found.way["way"] == ALL:
        return [ALL, f"{found.price:.2f}", *[""] * (len(AGAINST) - 2)]
    areas = [signed(each, 3) for each in found.areas.values()]
    near = "yes" if found.holds else "no"
    return [found.way["way"], f"{found.price:.2f}", signed(found.nll), percent(found.share), *areas, near]


PAGE = """# The price of an answer: quality against price

How many draws does an answer need, and is there a cheaper way to it? Ways to an answer with their quality and their
price, in passes of the plain network: fewer draws, early stopping (`tolerance=`), late layers (`where=`), a student
(`lb.distill`), the mean network, and deep ensembles of plain networks.

{curves}
## Commands

```text
{commands}
python -m tools.curve_page docs/results/curve > docs/results/curve.md
```

`train`, `score` and `price` keep finished work, and take `--seeds` and `--rows`. On a GPU, `train` takes
`--device cuda --precision bf16-mixed --compile`. **CIFAR-10 with WRN-28-10 has not been run.**
"""

SECTION = """## {title}

{network}, {epochs} epochs with {train:,} of the training rows, the other settings those of the `{budget}` budget of
`leanbayes compare`. Seeds {seeds}. Methods convert after {late} epochs, from the plain network of the seed; their
settings are the defaults. {test:,} test rows; out-of-distribution rows: {ood}. Nothing was chosen on these rows. It is
one short recipe on one data set, and sixteen draws of one seed of draws.

* **Temperatures** are fitted for each way on the same {held:,} training rows, which no network saw. The mean is
  tempered, and the entropy keeps its shares.
* **Price** is the median time of an answer over that of the plain network, alternately, both built `lb.Predictor`s:
  {rows:,} test rows, {turns} turns, the networks of seed {seed}, {machine}. The plain network called on all rows at
  once takes {called:.2f} of its predictor's time. A second predictor of the plain network takes {again:.2f} of the
  first one's: prices are no more exact than that. Multiply-adds are counted.
* **Near** is the goal without the price: NLL at most 1 % above sixteen draws of the network with all layers converted,
  AUROC by both uncertainties at most 0.01 below. Means over seeds decide; better is near, too. The mean network and the
  plain network have no epistemic part, so they are never near.
* **Late layers** are converted by `where=` with that name. An ensemble's first member is the plain network of the seed.
* ± is a standard error over seeds, of paired differences where figures are subtracted.

**In short.** {sentence} {others}

**Were the goals met?** The first goal: a way of the method that is near, for at most 2.0 passes. The second: a student
with an NLL at most 2 % above sixteen draws, for at most 1.05 passes. Where sixteen draws do not beat the mean network
by more than two standard errors, the goals are dropped. The larger one of two errors counts: that over seeds, and that
over test rows, which is of the mean over seeds. {late_rule}

{verdicts}

![Quality against price]({picture})

Bars are standard errors over seeds, which all ways share: the tables have paired differences.

{tables}"""
MACHINES = {"cpu": "process time of one CPU thread on a busy machine", "cuda": "one GPU, up to the end of its kernels"}


def section(curve: Curve, folder: Path) -> str:
    """Return the part of the page about one data set and network."""
    one, price = curve.seeds[0], curve.price
    recipe, rows = one["recipe"], one["rows"]
    late = sorted(set(one["convert_at_epoch"].values()))
    about: dict[str, Any] = {"network": _named(one["net"]), "epochs": recipe["epochs"], "train": rows["train"]}
    about |= {"title": f"{_named(one['data'])}, {_named(one['net'])}", "test": rows["test"], "held": rows["held_out"]}
    about |= {"late": " or ".join(map(str, late)), "budget": one["budget"]}
    about |= {"seeds": ", ".join(str(each["seed"]) for each in curve.seeds), "called": price["called"]["ratio"]}
    about |= {"ood": ", ".join(f"{count:,} of {name}" for name, count in rows["ood"].items())}
    about |= {"rows": price["rows"], "turns": price["turns"], "seed": price["seed"]}
    about |= {"sentence": draws_sentence(curve), "others": plain_sentences(curve)}
    about |= {"late_rule": rule_sentence(curve)}
    about |= {"again": curve.prices[PLAIN.split(" ", maxsplit=1)[0], PLAIN]["ratio"]}
    about |= {"verdicts": "\n".join(f"* {line}" for line in verdicts(curve))}
    about |= {"machine": MACHINES[price["device"]]}
    about |= {"picture": f"{folder.name}/{curve.name}.svg"}
    made = "\n".join(f"### {name[0].upper()}{name[1:]}\n\n{each}" for name, each in tables(curve).items())
    return SECTION.format(**about, tables=made)


def _named(name: str) -> str:
    return NAMES.get(name, name)


def page(folder: Path) -> str:
    """Return the whole page."""
    curves = read(folder)
    commands = "\n".join(_commands(curve) for curve in curves)
    return PAGE.format(curves="\n".join(section(curve, folder) for curve in curves), commands=commands)


def _commands(curve: Curve) -> str:
    seeds, out = ",".join(str(each["seed"]) for each in curve.seeds), f"runs/curve/{curve.name}"
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in curve.seeds[0]["flags"].items() if value)
    lines = [f"python -m tools.curve train --out {out} --seeds {seeds} {given}"]
    lines.append(f"python -m tools.curve score --out {out} --seeds {seeds} --into docs/results/curve")
    lines.append(f"python -m tools.curve price --out {out} --seeds {curve.price['seed']} --into docs/results/curve")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    for curve in read(folder):
        curve_chart.draw(chart_points(curve), folder / f"{curve.name}.svg")
    sys.stdout.write(page(folder))


def chart_points(curve: Curve) -> list[dict[str, Any]]:
    """Return the points of the picture: NLL of every way over its price, by method and side."""
    found = []
    for method in curve.methods:
        for way in curve.ways(method):
            for side in SIDES:
                values = curve.values(way, side, "nll")
                error = over_seeds(values) if len(values) > 1 else 0.0
                point = {
                    "panel": method,
                    "side": side,
                    "way": way["way"],
                    "x": round(curve.prices[_key(way)]["ratio"], 4),
                }
                found.append(point | {"y": round(statistics.fmean(values), 6), "error": round(error, 6)})
    return found


if __name__ == "__main__":
    main()
