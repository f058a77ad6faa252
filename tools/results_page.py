"""Render docs/results/README.md, one row for each table and figure of the five papers, from docs/results/items.toml.

    python -m tools.results_page            write the page
    python -m tools.results_page --check    exit with 1 if the page differs
    python -m tools.results_page --readme   print the table of the README, which is that of wrn28/

A number in `items.toml` is a reference {name > key > key : form}. Keys walk through a JSON file: `*` takes all values,
`key=value` the entries of a list with that value, a number one entry. The form is a format of Python. In front of it
may stand min, max or ± (mean ± standard error); several values have their mean otherwise. x100 gives percent, "count"
the number of values, "seeds" the same in words.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from leanbayes.runtime._files import write_text
from tools.results_numbers import DERIVED

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
ITEMS = RESULTS / "items.toml"
PAGE = RESULTS / "README.md"
STATUSES = ("reproduced", "differs", "small scale", "never run", "no data", "diagram")
PAPERS = {
    "rank1": "Rank-1 factors (Dusenberry et al., 2020)",
    "implicit": "Implicit nodes (Trinh, Kaski, Heinonen, 2020)",
    "patch": "Ensemble model patching (Chang et al., 2019)",
    "variance": "Variance networks (Neklyudov et al., 2019)",
    "nested": "Variational nested dropout (Cui et al., 2021)",
}
HEAD = ("table or figure", "suite or file", "printed", "ours", "seeds", "status", "page")
METHODS = {"implicit": "ImplicitNodes", "rank1": "Rank1", "batch_ensemble": "BatchEnsemble"}
FIGURES = (("accuracy", 100.0, 2), ("nll", 1.0, 4), ("cnll", 1.0, 4), ("ece", 100.0, 2))
README = ("WRN-28-10", "accuracy %", "NLL", "calibrated NLL", "ECE %", "worth networks", "training x", "of")
REFERENCE = re.compile(r"\{([^{}]+?)(?: : ([^{}]+))?\}")
ABOVE = """\
# Results: every table and figure of the five papers

One row for each table or figure: the printed number, ours, and how far it can be compared. This page is rendered by
`python -m tools.results_page` from [items.toml](items.toml). Every number of the column "ours" is read from a committed
file, or counted from the networks when the page is rendered ("counted here"). A test renders the page again. "no file"
means that no result of ours is committed.

| status | meaning |
|---|---|
| reproduced | the paper's setting, and the same finding |
| differs | run, with another finding, or not the paper's quantity |
| small scale | another network, data set or number of epochs in the place of the paper's |
| never run | code exists, no result is committed |
| no data | the data set is not available |
| diagram | nothing to measure |

± is a standard error over seeds, or over splits; in the column "printed" it is the paper's (a standard deviation over
seeds for implicit nodes). Accuracies and errors are in percent. One seed is called one seed: such a row has no error.

![Calibrated NLL of plain ensembles by their size, with the methods on it](charts/worth.svg)

![NLL and calibrated NLL over the price of a training, WRN-28-10](charts/price.svg)

Both charts are drawn by `python -m tools.results_charts` from the files of [the ruler](ruler.md) and of
[the wide network](wrn28.md).
"""
BELOW = """\
## Pages without a paper's table

[Digits](digits.md), [Fashion-MNIST](fashion-mnist.md) and [CIFAR-10](cifar10.md) compare methods by
`leanbayes compare`. [The ruler](ruler.md) and [the wide network](wrn28.md) measure how many plain networks a method is
worth, [separated members](separation.md) tries to raise that on held-out rows. [Tables](tables.md) compares nine
regressions with scikit-learn, [the rule](rule.md) tests the advice of the report. [Prices](cost.md) has the costs,
[text](text.md) has encoders of sentences, [runs](runs.md) the time on a GPU.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it with its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the page with its files, write nothing")
    parser.add_argument("--readme", action="store_true", help="print the table of the README, write nothing")
    given = parser.parse_args(arguments)
    if given.readme:
        print(readme())
        return 0
    text = page()
    if given.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    write_text(text, PAGE)
    return 0


def page() -> str:
    """Return the text of the page."""
    return "\n".join([ABOVE, counts(), *(section(name) for name in PAPERS), BELOW])


def readme() -> str:
    """Return the table of the README: plain networks, ensembles of them and the methods on WRN-28-10."""
    ruler, price, floor = (_json(f"wrn28/{name}.json") for name in ("ruler", "price", "floor"))
    (curve,) = ruler["curves"]
    (when,) = {(each["epochs"], each["convert_at_epoch"]) for each in floor["rows"] if each["method"] != "plain"}
    rows = []
    for size in curve["curve"]:
        if size["networks"] in (1, 2, 4):
            name = "one plain network" if size["networks"] == 1 else f"ensemble of {size['networks']}"
            figures = [_shown(size[key]["mean"], size[key]["se_networks"], *form) for key, *form in FIGURES]
            rows.append([name, *figures, f"{size['networks']}", f"{size['networks']:.2f}", _of(size, curve)])
    for method in ruler["methods"]:
        both = method["parts"]["both"]
        values = {key: [each[key] for each in both["by_seed"].values()] for key, *_ in FIGURES}
        figures = [_shown(statistics.fmean(values[key]), _error(values[key]), *form) for key, *form in FIGURES]
        ratio = next(each["ratio"] for each in price["rows"] if each["method"] == method["method"])
        whole = (when[1] + (when[0] - when[1]) * ratio) / when[0]
        worth = f"{both['networks']:.2f} ± {both['se']:.2f}"
        rows.append(
            [f"`{METHODS[method['method']]}`", *figures, worth, f"{whole:.2f}", written(method["seeds"], ["seeds"])]
        )
    return table(README, rows)


def items() -> dict[str, Any]:
    """Return the entries of `items.toml`, a list for each paper, and the names of files."""
    return tomllib.loads(ITEMS.read_text(encoding="utf-8"))


def counts() -> str:
    """Return a table: how many rows of each paper have which status."""
    found = items()
    rows = []
    for name, title in PAPERS.items():
        statuses = [item["status"] for item in found[name]]
        rows.append([f"[{title}](#{_anchor(title)})", *(str(statuses.count(status)) for status in STATUSES)])
    return "Rows of each status:\n\n" + table(("paper", *STATUSES), rows)


def section(name: str) -> str:
    """Return the table of one paper, with its heading."""
    found = items()
    return f"## {PAPERS[name]}\n\n" + table(HEAD, [row(item, name, found["files"]) for item in found[name]])


def row(item: Mapping[str, str], paper: str, files: Mapping[str, str]) -> list[str]:
    """Return the cells of one entry, its references filled in."""
    printed = fill(item["printed"], lambda keys, form: cell_of(paper, keys))
    ours, seeds = (fill(item[name], lambda keys, form: value_of(keys, form, files)) for name in ("ours", "seeds"))
    link = f"[{Path(item['page']).stem}]({item['page']})" if "page" in item else "-"
    return [item["item"], item["source"], printed, ours, seeds, item["status"], link]


def fill(text: str, value: Callable[[list[str], str], str]) -> str:
    """Replace every reference of a text by its value."""
    return REFERENCE.sub(lambda match: value([key.strip() for key in match[1].split(" > ")], match[2] or ""), text)


def cell_of(paper: str, keys: Sequence[str]) -> str:
    """Return a printed number as the paper prints it; keys are table, row and column of its numbers.toml."""
    name, line, column = keys
    found = _printed(paper)[name]
    return str(found["rows"][line].split()[found["columns"].index(column)]).replace("±", " ± ")


def value_of(keys: Sequence[str], form: str, files: Mapping[str, str]) -> str:
    """Return values of a file, reduced and written as the form says."""
    return written(values_of(keys, files), form.split())


def values_of(keys: Sequence[str], files: Mapping[str, str]) -> list[Any]:
    """Return the values that a reference names; its first key is a name of `files`, a file or a function."""
    if keys[0] in files:
        keys = [*files[keys[0]].split(" > "), *keys[1:]]
    start = DERIVED[keys[0]]() if keys[0] in DERIVED else _json(keys[0])
    return reached(start, keys[1:])


def reached(value: Any, keys: Sequence[str]) -> list[Any]:
    """Return the values at the end of a path; a list or a dict at the end counts as its entries."""
    found = [value]
    for key in keys:
        found = [each for one in found for each in _step(one, key)]
    if not found:
        raise KeyError(f"expected a value at {' > '.join(keys)}, got none")
    return found[0] if len(found) == 1 and isinstance(found[0], list) else found


def written(values: Sequence[Any], form: Sequence[str]) -> str:
    """Return values as text; see the head of this file for forms."""
    if form == ["count"]:
        return str(len(values))
    if form == ["seeds"]:
        return "one seed" if len(values) == 1 else f"{len(values)} seeds"
    scale = 100.0 if "x100" in form else 1.0
    kind, digits = (form[0], form[1]) if form[0] in ("min", "max", "±") else ("mean", form[0])
    numbers = [scale * float(value) for value in values]
    if kind == "±":
        return f"{statistics.fmean(numbers):{digits}} ± {_error(numbers):{digits}}"
    reduce: Callable[[Iterable[float]], float] = {"min": min, "max": max, "mean": statistics.fmean}[kind]
    return f"{reduce(numbers):{digits}}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _step(value: Any, key: str) -> list[Any]:
    if key == "*":
        return list(value.values()) if isinstance(value, Mapping) else list(value)
    name, found, wanted = key.partition("=")
    if found and not (isinstance(value, Mapping) and key in value):
        entries = [value] if isinstance(value, Mapping) else value
        return [each for each in entries if str(each[name]) == wanted]
    if isinstance(value, Mapping):
        return [value[key]]
    return [value[int(key)]] if re.fullmatch(r"-?\d+", key) else [each[key] for each in value]


def _shown(mean: float, error: float | None, scale: float, digits: int) -> str:
    after = "" if error is None else f" ± {scale * error:.{digits}f}"
    return f"{scale * mean:.{digits}f}{after}"


def _error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _of(size: Mapping[str, Any], curve: Mapping[str, Any]) -> str:
    """Return how many ensembles of a size there are among the seeds of a curve."""
    if size["networks"] == 1:
        return written(curve["seeds"], ["seeds"])
    return "one ensemble" if size["subsets"] == 1 else f"{size['subsets']} ensembles"


@cache
def _json(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@cache
def _printed(paper: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "src" / "leanbayes_papers" / paper / "numbers.toml").read_text(encoding="utf-8"))


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
