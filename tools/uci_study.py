"""Compare the rows of `leanbayes compare` on the nine UCI regressions with a multilayer perceptron of scikit-learn.

    python -m tools.uci_study run --out runs/uci          train; finished runs are kept
    python -m tools.uci_study gather --out runs/uci       write docs/results/tables/uci.json; other splits stay
    python -m tools.uci_study page                        print the tables of docs/results/tables.md

Each set has the three splits 0, 1 and 2 of the data folder, one seed each, and default settings. The reference is
MLPRegressor(early_stopping=True, batch_size=32, n_iter_no_change=30, max_iter=500, learning_rate_init=3e-3) on inputs
and targets that are standardised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes import data
from leanbayes.cli.main import main as leanbayes
from leanbayes.report.load import load_results
from leanbayes.report.verdict import candidates
from leanbayes.runtime._files import write_text

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine-red", "yacht")
SPLITS = (0, 1, 2)
METHODS = "plain,rank1,implicit,patch,laplace,mean,linear,boosting"
FILE = Path(__file__).parent.parent / "docs" / "results" / "tables" / "uci.json"
NOISE_FILE = FILE.with_name("noise.json")  # trials of the initial noise on held-out training rows
NOISE_TEST_FILE = FILE.with_name("noise-test.json")  # test rows of split 0, before and after the rule
RULES = ("default", "linear 0.25", "linear 0.5", "std only 0.25", "std only 0.5", "squared 0.25")
ROWS = ("plain", "rank1", "implicit", "patch", "laplace", "mean", "linear", "boosting")
NETWORKS = ("plain", "rank1", "implicit", "patch", "laplace")
FIGURES = ("rmse", "lpd", "coverage")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "gather", "page"))
    parser.add_argument("--out", type=Path, default=Path("runs/uci"))
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--splits", default=",".join(map(str, SPLITS)))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)
    if given.command == "page":
        trials = noise_tables(json.loads(NOISE_FILE.read_text(encoding="utf-8")))
        scored = noise_test_table(json.loads(NOISE_TEST_FILE.read_text(encoding="utf-8")))
        print("\n\n".join([*tables(json.loads(FILE.read_text(encoding="utf-8"))), *trials, scored]))
        return
    pairs = [(name, int(split)) for split in given.splits.split(",") for name in given.sets.split(",")]
    if given.command == "gather":
        found = merged(json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else [], given.out, pairs)
        write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", FILE)
        return
    for name, split in pairs:
        run(given.out, name, split, given.methods, given.workers)


def merged(before: list[dict[str, Any]], out: Path, pairs: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the figures of all splits: those of finished runs in `out`, and of other splits as they were before."""
    found = {(one["set"], one["split"]): one for one in before}
    for name, split in pairs:
        if (out / name / f"split{split}" / "reference.json").is_file():
            found[name, split] = gathered(out, name, split)
    return [found[pair] for pair in sorted(found, key=lambda pair: (SETS.index(pair[0]), pair[1]))]


def run(out: Path, name: str, split: int, methods: str, workers: int) -> None:
    """Train the rows and the reference on one split."""
    start, folder = time.perf_counter(), out / name / f"split{split}"
    flags = ["--data", f"uci-{name}", "--split", str(split), "--seeds", "0", "--methods", methods]
    code = leanbayes(["compare", *flags, "--workers", str(workers), "--out", str(folder)])
    if code:
        raise SystemExit(code)
    path = folder / "reference.json"
    if not path.is_file():
        found = {"rmse": reference(name, split), "seconds": time.perf_counter() - start}
        write_text(json.dumps(found) + "\n", path)


def reference(name: str, split: int) -> float:
    """Return the test RMSE of scikit-learn's perceptron."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    settings = {"early_stopping": True, "batch_size": 32, "n_iter_no_change": 30, "max_iter": 500}
    network = MLPRegressor(**settings, learning_rate_init=3e-3, random_state=0)
    model = TransformedTargetRegressor(make_pipeline(StandardScaler(), network), transformer=StandardScaler())
    loaded = data.load(f"uci-{name}", split=split)
    train, test = loaded.train, loaded.test
    model.fit(train.x.double().numpy(), train.y.double().numpy().ravel())
    error = model.predict(test.x.double().numpy()).ravel() - test.y.double().numpy().ravel()
    return float(np.sqrt(np.mean(error**2)))


def gathered(out: Path, name: str, split: int) -> dict[str, Any]:
    """Return the figures of all rows on one split, and the row that the report names as the best within the limits."""
    folder = out / name / f"split{split}"
    (group,) = load_results(folder).groups
    rows, commits = {}, set()
    for contender in group.contenders:
        (run_of,) = contender.runs
        rows[contender.label] = {figure: run_of.number("metrics", "test", figure) for figure in FIGURES}
        rows[contender.label]["seconds"] = run_of.number("cost", "train_seconds")
        commits.add(run_of.part("commit"))
    best = next((candidate.label for candidate in candidates(group) if candidate.affordable), None)
    known = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    rows["reference"] = {"rmse": known["rmse"]}
    facts = {"set": name, "split": split, "test": group.runs[0].part("data", "test"), "best": best}
    return {**facts, "seconds": known["seconds"], "commits": sorted(map(str, commits)), "rows": rows}


def tables(found: list[dict[str, Any]]) -> list[str]:
    """Return the tables of the page: figures of all rows, coverage and seconds of networks, and the best row."""
    by_set = _by_set(found)
    quality = [_table("rmse", ["reference", *ROWS], by_set), _table("lpd", list(ROWS), by_set)]
    quality += [_table(figure, list(NETWORKS), by_set) for figure in ("coverage", "seconds")]
    lines = [
        "| set | splits | test rows | best rows, by split | RMSE of plain over the reference | coverage of the best |"
    ]
    lines += ["| --- | --- | ---: | --- | ---: | ---: |"]
    for name, some in by_set.items():
        ratio = mean(some, "plain", "rmse") / mean(some, "reference", "rmse")
        best = ", ".join(str(one["best"]) for one in some)
        rows = sum(one["test"] for one in some)
        splits = ", ".join(str(one["split"]) for one in some)
        lines.append(f"| {name} | {splits} | {rows:,} | {best} | {ratio:.3f} | {100 * pooled_coverage(some):.1f} % |")
    return [*quality, "\n".join(lines)]


def noise_tables(found: list[dict[str, Any]]) -> list[str]:
    """Return the tables of the trials of the initial noise: all sets, and all rules where the targets have little."""
    columns = [(method, rule) for method in ("rank1", "implicit") for rule in ("default", "squared 0.25")]
    heads = ["plain", *(f"{method}, {rule}" for method, rule in columns), "patch"]
    lines = [f"| set, one seed | rows | noise | {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) + 2)}"]
    for one in found:
        values = [one["plain"]["nll"], *(_trial(one, *column) for column in columns), _trial(one, "patch", "default")]
        cells = " | ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {one['set']} | {one['rows']:,} | {one['noise']:.3f} | {cells} |")
    little = [
        one for one in found if all(_trial(one, "rank1", rule) is not None for rule in RULES) and one["noise"] < 0.1
    ]
    heads = [f"{method}, {one['set']}" for method in ("rank1", "implicit") for one in little]
    rules = [f"| rule, one seed | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for rule in RULES:
        pairs = [(one, _trial(one, method, rule)) for method in ("rank1", "implicit") for one in little]
        cells = [f"{nll - one['plain']['nll']:+.3f}" for one, nll in pairs]
        rules.append(f"| {rule} | {' | '.join(cells)} |")
    return ["\n".join(lines), "\n".join(rules)]


def noise_test_table(found: list[dict[str, Any]]) -> str:
    """Return the log predictive densities of the test rows before and after the rule."""
    heads = ["plain", "rank1, before", "rank1, after", "implicit, before", "implicit, after", "patch"]
    lines = [f"| set, one seed | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for one in found:
        cells = [f"{one['rows'][head]['lpd']:.3f}" for head in heads]
        lines.append(f"| {one['set']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _trial(one: dict[str, Any], method: str, rule: str) -> Any:
    """Return the held-out NLL of a method under a rule, None without such a trial."""
    fit = [trial["nll"] for trial in one["trials"] if trial["method"] == method and rule in trial.get("rules", ())]
    return fit[0] if fit else None


def _by_set(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [one for one in found if one["set"] == name] for name in dict.fromkeys(one["set"] for one in found)}


def mean(some: list[dict[str, Any]], row: str, figure: str) -> float:
    """Return the mean of a figure over the splits."""
    return statistics.fmean(one["rows"][row][figure] for one in some)


def pooled_coverage(some: list[dict[str, Any]]) -> float:
    """Return the share of the test rows of all splits in the 95 % interval of the best row."""
    covered = sum(one["test"] * one["rows"][one["best"]]["coverage"] for one in some)
    return float(covered / sum(one["test"] for one in some))


def _table(figure: str, labels: list[str], by_set: dict[str, list[dict[str, Any]]]) -> str:
    title = {"rmse": "RMSE", "lpd": "log predictive density", "coverage": "coverage", "seconds": "seconds"}[figure]
    lines = [f"| {title} | {' | '.join(labels)} |", f"| --- |{' ---: |' * len(labels)}"]
    for name, some in by_set.items():
        cells = [f"{mean(some, label, figure):.4g}" for label in labels]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
