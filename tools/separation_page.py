"""Render docs/results/separation.md from the figures of tools/separation.py and the prices of the ruler.

python -m tools.separation_page docs/results/separation > docs/results/separation.md
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanbayes.compare.job import method_of
from leanbayes.training.recipe import rate, Recipe
from tools.ruler_page import count_of, FIGURES, ruler_tables, table

DEFAULT, PLAIN = "implicit", "plain"
PRICES = Path("ruler") / "price.json"  # next to the folder of the figures
VARIANTS = ("Variant", "Seeds", "Accuracy %", "NLL", "Calibrated NLL", "ECE %", "Worth networks")
VARIANTS += ("Less plain", "Less the default", "A training x")
PARTS = ("Variant", "Seeds", "The prediction", "Members, no noise", "Centre", "One member", "Members differ %")
MOVED = ("Variant", "Seeds", "Spread, start", "Spread, end", "Correlation", "Noise, start", "Noise, end")
COLUMNS = ("both", "members without noise", "centre", "one member")
MOVEMENT = ("spread_before", "spread_after", "correlation", "noise_before", "noise_after")

PAGE = """# Late conversion that separates members

Do members of a late conversion become more diverse, and better, if they have more rate, more spread, less noise or more
rows? {net} on CIFAR-10, {epochs} epochs, converted after {late}, bfloat16, compiled steps, one H200. **All figures are
of {rows:,} held-out training rows**: settings are chosen here, and no test row was looked at. So the figures do not
compare with those of [the ruler](ruler.md). One ingredient of `implicit` changes at a time. All variants of a seed
begin from the same plain network after {late} epochs.

* `restart r`: the rate runs through its schedule a second time after the conversion, at r of the rates. Without a
  restart the rate is at {at:.2f} of its highest value there.
* `posterior rate x f`: f times the learning rate of the posterior.
* `spread s`: `init_spread` s instead of 0.25. `noise s`: `init_std` s instead of 0.15.
* `tiled last n`: each row trains all members in the last n epochs.
* `plain, restart r`: a control, the plain network with the restart alone.

{sentences}

## The ruler on the held-out rows

{plain} ± is a jackknife over networks.

{curve}
## Variants

The prediction: all members, with noise, {samples} draws. ± is the standard error over seeds; minus is better. "A
training x" counts steps by the prices of [the ruler](ruler.md#prices), a tiled step as one for each member.

{Variants}
## Members

Calibrated NLL of each part. The last column is the share of the rows whose likeliest classes differ between two members
without noise.

{Parts}
Spread is the standard deviation of the means of members around their average, noise the standard deviation within a
member. The correlation is that of these offsets at the conversion and at the end: 1 if members stay.

{Movement}
## Commands

```text
python -m tools.separation train --out runs/separation --seeds {seeds} --plain-seeds {networks} --device cuda --compile
python -m tools.separation score runs/separation/*.npz --out docs/results/separation/separation.json
python -m tools.separation_page docs/results/separation > docs/results/separation.md
```

Several processes of the first command shared one GPU, so training times are not used. Trained with commit {commits}.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(page(parser.parse_args(arguments).folder), end="")


def page(folder: Path) -> str:
    """Return the page; its summary is to be written by hand."""
    found, by_name = read(folder), tables(folder)
    (late,) = {each["recipe"]["convert_at_epoch"] for each in found["methods"]}
    seeds = sorted({seed for each in found["methods"] for seed in each["seeds"]})
    about: dict[str, Any] = {"net": found["net"].upper(), "epochs": found["recipe"]["epochs"], "late": late}
    about |= {"at": rate(Recipe(**found["recipe"]), late)}
    about |= {"rows": found["data"]["held_out"], "samples": found["samples"], "plain": plain_sentence(found)}
    about |= {"sentences": "\n".join(f"* {line}" for line in sentences(folder))}
    about |= {"curve": by_name[f"Curve of {found['net']}"], "commits": ", ".join(found["trained_with"])}
    about |= {"seeds": ",".join(map(str, seeds)), "networks": ",".join(map(str, found["curves"][0]["seeds"]))}
    return PAGE.format(**about, **{name: by_name[name] for name in ("Variants", "Parts", "Movement")})


def read(folder: Path) -> dict[str, Any]:
    """Return the figures."""
    return dict(json.loads((folder / "separation.json").read_text(encoding="utf-8")))


def tables(folder: Path) -> dict[str, str]:
    """Return the tables of the page by name."""
    found = read(folder)
    prices = json.loads((folder.parent / PRICES).read_text(encoding="utf-8"))
    made = ruler_tables({"curves": found["curves"], "methods": []})
    made["Variants"] = table(VARIANTS, [_variant(each, found, prices) for each in found["methods"]])
    converted = [each for each in found["methods"] if each["of"] != PLAIN]
    made["Parts"] = table(PARTS, map(_parts, converted))
    made["Movement"] = table(MOVED, map(_moved, converted))
    return {name: made[name] for name in (f"Curve of {found['net']}", "Variants", "Parts", "Movement")}


def sentences(folder: Path) -> list[str]:
    """Return a sentence for each variant: its worth, its difference from the default, how members differ."""
    found = read(folder)
    own = next((each for each in found["methods"] if each["method"] == DEFAULT), None)
    return [_sentence(each, own) for each in found["methods"]]


def plain_sentence(found: Mapping[str, Any]) -> str:
    """Return how much plain networks differ."""
    (curve,) = found["curves"]
    share = 100 * found["plain_disagreement"]
    return (
        f"{len(curve['seeds'])} plain networks; two of them differ in the likeliest class of {share:.1f} % of the rows."
    )


def price(each: Mapping[str, Any], epochs: int, prices: Mapping[str, Any]) -> float | None:
    """Return the cost of a training in plain ones, by steps; None if a step of the method was not timed.

    Epochs before the conversion are plain ones. A tiled step gives each row to all members.
    """
    ratios = {row["method"]: row["ratio"] for row in prices["rows"] if row["net"] == each["net"]}
    if each["of"] not in ratios:
        return None
    method = method_of(each["of"], each["fields"])
    after = epochs - each["recipe"]["convert_at_epoch"]
    tiled = min(after, each["recipe"].get("tile_last_epochs", 0))
    steps = after - tiled + getattr(method, "components", 1) * tiled
    return float(epochs - after + steps * ratios[each["of"]]) / epochs


def _sentence(each: Mapping[str, Any], default: Mapping[str, Any] | None) -> str:
    both = each["parts"]["both"]
    said = f"`{each['method']}` is worth {worth(both)} networks ({_seeds(each['seeds'])})."
    if default is None or each is default:
        own = "The calibrated NLL less that of the plain network of the same seed is"
        return f"{said} {own} {signed(both['paired']['differences'])}.{_differing(each)}"
    less = both["less_default"]["differences"]
    if not less:
        return said
    signs = f", negative in {sum(value < 0 for value in less)} of {len(less)} seeds" if len(less) > 1 else ""
    return f"{said} Its calibrated NLL less that of the default, same seed, is {signed(less)}{signs}.{_differing(each)}"


def _differing(each: Mapping[str, Any]) -> str:
    values = [100 * value for value in each["disagreement"].values()]
    return f" Its members differ in {statistics.fmean(values):.1f} % of the rows." if values else ""


def worth(part: Mapping[str, Any]) -> str:
    """Return the worth in networks with its error; outside of the curve it is a bound."""
    signs = {"at most": "≤ ", "at least": "≥ "}
    if part["bound"]:
        return f"{signs[part['bound']]}{part['networks']:.1f}"
    return f"{part['networks']:.2f} ± {part['se']:.2f}"


def signed(values: Sequence[float]) -> str:
    """Return the mean of differences with its sign, and the standard error over seeds; one seed has none."""
    if not values:
        return ""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.4f}{error}"


def _variant(each: Mapping[str, Any], found: Mapping[str, Any], prices: Mapping[str, Any]) -> list[str]:
    both = each["parts"]["both"]
    own = both["by_seed"].values()
    cells = [f"{scale * statistics.fmean(f[key] for f in own):.{digits}f}" for key, scale, digits in FIGURES]
    less = "" if each["method"] == DEFAULT else signed(both.get("less_default", {}).get("differences", []))
    cost = price(each, found["recipe"]["epochs"], prices)
    ends = [worth(both), signed(both["paired"]["differences"]), less, "" if cost is None else f"{cost:.2f}"]
    return [each["method"], count_of(each["seeds"]), *cells, *ends]


def _parts(each: Mapping[str, Any]) -> list[str]:
    parts = [each["parts"].get(name, {}).get("by_seed", {}).values() for name in COLUMNS]
    cells = [_mean((figures["cnll"] for figures in part), 4) for part in parts]
    differing = _mean((100 * value for value in each["disagreement"].values()), 1)
    return [each["method"], count_of(each["seeds"]), *cells, differing]


def _moved(each: Mapping[str, Any]) -> list[str]:
    cells = [_mean((own[name] for own in each["members"].values() if own), 3) for name in MOVEMENT]
    return [each["method"], count_of(each["seeds"]), *cells]


def _mean(values: Iterable[float], digits: int) -> str:
    found = list(values)
    return f"{statistics.fmean(found):.{digits}f}" if found else ""


def _seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"


if __name__ == "__main__":
    main()
