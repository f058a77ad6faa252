"""Render the tables and the sentences of docs/results/wrn28.md from the figures next to it.

python -m tools.wide_page docs/results/wrn28
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.ruler_page import count_of, price_table, ruler_tables, table, worth_sentences

ECE = ("Method", "Seed", "ECE %", "ECE if calibrated, 95 % range", "Verdict")
PAIRS = ("Method", "Seeds", "Calibrated NLL", "Less one network, same seed", "Less the mean over all pairs")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and the sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    print("\n".join(f"{name}\n\n{each}" for name, each in tables(folder).items()))
    print("\n".join(f"* {line}" for line in sentences(folder)))


def tables(folder: Path) -> dict[str, str]:
    """Return the tables of the page by name, from `ruler.json`, `floor.json` and `price.json`."""
    ruler, floor, price = (json.loads((folder / f"{name}.json").read_text()) for name in ("ruler", "floor", "price"))
    found = ruler_tables(ruler)
    found["Pairs"] = table(PAIRS, [_pairs(method, _of_pairs(ruler)) for method in ruler["methods"]])
    found["ECE"] = table(ECE, [_ece(row) for row in floor["rows"]])
    (when,) = {(row["epochs"], row["convert_at_epoch"]) for row in floor["rows"] if row["method"] != "plain"}
    found["Prices"] = price_table(price, *when)
    return found


def sentences(folder: Path) -> list[str]:
    """Return what each method is worth, how far it is from two networks, and which predictions are calibrated."""
    ruler, floor = (json.loads((folder / f"{name}.json").read_text()) for name in ("ruler", "floor"))
    found = worth_sentences(folder)
    for method in ruler["methods"]:
        name, seeds, _, _, less = _pairs(method, _of_pairs(ruler))
        of = seeds if seeds == "one seed" else f"{seeds} seeds"
        found.append(f"`{name}` less the mean over all pairs of plain networks: {less} calibrated NLL ({of}).")
    for name in dict.fromkeys(row["method"] for row in floor["rows"] if row["networks"] == 1):
        each = [row for row in floor["rows"] if row["method"] == name and row["networks"] == 1]
        found.append(f"The ECE of `{name}` is within the noise floor in {sum(map(within, each))} of {len(each)} runs.")
    return found


def within(row: dict[str, Any]) -> bool:
    """Say whether an ECE is in the central 95 % of those of a calibrated network."""
    return bool(row["floor"]["low"] <= row["ece"] <= row["floor"]["high"])


def _of_pairs(ruler: dict[str, Any]) -> float:
    (curve,) = ruler["curves"]
    return float(next(row["cnll"]["mean"] for row in curve["curve"] if row["networks"] == 2))


def _pairs(method: dict[str, Any], pairs: float) -> list[str]:
    both = method["parts"]["both"]
    own = [figures["cnll"] for figures in both["by_seed"].values()]
    cells = [_mean_error(both["paired"]["differences"]), _mean_error([value - pairs for value in own])]
    return [method["method"], count_of(own), f"{statistics.fmean(own):.4f}", *cells]


def _mean_error(values: Sequence[float]) -> str:
    """Return the mean and the standard error over seeds; one seed has none."""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.4f}{error}"


def _ece(row: dict[str, Any]) -> list[str]:
    verdict = "not distinguishable from calibrated" if within(row) else "not calibrated"
    seed = f"all {row['networks']} together" if row["networks"] > 1 else str(row["seed"])
    low, high = (100 * row["floor"][name] for name in ("low", "high"))
    return [row["method"], seed, f"{100 * row['ece']:.2f}", f"{low:.2f} to {high:.2f}", verdict]


if __name__ == "__main__":
    main()
