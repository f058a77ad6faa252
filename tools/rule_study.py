"""Test the advice of the report on other trainings of the same rows.

    python -m tools.rule_study gather RUNS NAME     write docs/results/rule/NAME.json.gz and NAME.npz from a comparison
    python -m tools.rule_study test                 write docs/results/rule/outcome.json
    python -m tools.rule_study simulate             write docs/results/rule/simulation.json
    python -m tools.rule_study page                 print the tables of docs/results/rule.md

A comparison has twelve seeds. In each of 200 repetitions, three of them are the comparison of a user, and the report
gives its advice. The other nine test it. Without a recommendation the advice is the reference, plain + temperature.
Where the report then proposes more seeds, these are added, up to six in all, and the others test the new advice.

(a) The advised row is worse than the best eligible row by at most 2 % of plain's NLL (0.01 of the AUROC). "No clear
    difference" is right, too, if all twelve seeds say so.
(b) It is worse than plain + temperature.
(c) All "methods" are plain networks of other seeds, at their temperatures: one is recommended.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from leanbayes.report.advice import choose, LEVEL
from leanbayes.report.load import Group, grouped, Run
from leanbayes.report.losses import losses_of, ood_losses
from leanbayes.report.verdict import candidates, verdict
from leanbayes.runtime._files import write_text

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "rule"
REPETITIONS, SEEDS, MORE, SIMULATED = 200, 3, 6, 2000
NLL, AREA = 0.02, 0.01  # largest distance to the best row: a share of plain's NLL, and of the AUROC
KEPT = ("schema", "status", "seed", "method", "network", "data", "recipe", "settings", "metrics", "cost", "commit")
REFERENCE = "plain + temperature"
NEEDS = {
    "Recommended": "nll",
    "Best probabilities": "nll",
    "Robust to corrupted images": "shift",
    "Finds out-of-distribution inputs": "ood",
    "Smallest file": "nll",
    "Cheapest answer": "nll",
}
"""Needs of the report, and the figure that tests the advice."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("gather", "test", "simulate", "page"))
    parser.add_argument("given", nargs="*")
    given = parser.parse_args(arguments)
    if given.command == "gather":
        gather(Path(given.given[0]), given.given[1])
    elif given.command == "test":
        found = {path.name.split(".")[0]: outcome(read(path)) for path in sorted(FOLDER.glob("*.json.gz"))}
        write_text(json.dumps(found, indent=1) + "\n", FOLDER / "outcome.json")
    elif given.command == "simulate":
        write_text(json.dumps(simulate(), indent=1) + "\n", FOLDER / "simulation.json")
    else:
        print("\n\n".join(tables()))


def tables() -> list[str]:
    """Return the tables of the page."""
    outcomes, simulations = (
        json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("outcome", "simulation")
    )
    return [table(outcomes), simulation_table(simulations)]


def gather(runs: Path, name: str) -> None:
    """Write the figures of all finished runs, and -log p of every test row as float16, by row and seed."""
    records, losses = [], {}
    for path in sorted(runs.rglob("result.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        short = {key: record[key] for key in KEPT}
        short["cost"] = {key: value for key, value in record["cost"].items() if key != "layers"}
        records.append(short)
        for kind, text in record["figures"]["losses"].items():
            label = record["method"]["label"] + ("" if kind == "test" else f" {kind}")
            losses[f"{label}/seed{record['seed']}"] = np.frombuffer(base64.b64decode(text), "<f2")
    FOLDER.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(json.dumps(records).encode(), mtime=0)
    (FOLDER / f"{name}.json.gz").write_bytes(packed)
    np.savez_compressed(FOLDER / f"{name}.npz", **losses)


def read(path: Path) -> list[Run]:
    """Return the runs of one comparison."""
    records = json.loads(gzip.decompress(path.read_bytes()))
    return [Run(f"{one['method']['label']}/seed{one['seed']}", one) for one in records]


def outcome(runs: list[Run]) -> dict[str, Any]:
    """Return, for each need, the share of the repetitions in which the advice was right, worse, and given at all."""
    seeds = sorted({int(run.seed) for run in runs})
    found: dict[str, list[dict[str, Any]]] = {need: [] for need in NEEDS}
    later: dict[str, list[dict[str, Any]]] = {need: [] for need in NEEDS}
    whole = {one.need: one.row for one in advice(_group(runs, lambda seed: True))}

    @lru_cache(maxsize=8)
    def by(chosen: frozenset[int]) -> tuple[dict[str, Advice], dict[str, dict[str, float]]]:
        mine, others = (_group(runs, lambda seed, some=some: seed in some) for some in (chosen, set(seeds) - chosen))
        return {one.need: one for one in advice(mine)}, figures(others)

    for chosen, spare in _choices(seeds):
        advised, tested = by(frozenset(chosen))
        for need, first in advised.items():
            if not tested[NEEDS[need]]:  # a need without data has none
                continue
            found[need].append(_tested(first, tested[NEEDS[need]], unclear=whole[need] is None))
            count = min(first.seeds_needed or SEEDS, MORE)
            second, others = by(frozenset(chosen + spare[: count - SEEDS]))
            row = _tested(second[need], others[NEEDS[need]], unclear=whole[need] is None)
            later[need].append(row | {"seeds": count})
    needs = {
        need: _summary(rows) | {"followed": _followed(later[need]), "all_seeds": whole[need]}
        for need, rows in found.items()
        if rows
    }
    rows = sorted({run.label for run in runs})
    return {"rows": rows, "seeds": len(seeds), "needs": needs, "null": null_test(runs, seeds)}


def _choices(seeds: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the seeds of a comparison, and those that may be added, in order."""
    generator, more = random.Random(0), random.Random(2)
    for _ in range(REPETITIONS):
        chosen = generator.sample(seeds, SEEDS)
        rest = [seed for seed in seeds if seed not in chosen]
        yield chosen, more.sample(rest, min(MORE - SEEDS, len(rest) - 1))


def _group(runs: list[Run], wanted: Any) -> Group:
    (group,) = grouped(run for run in runs if wanted(int(run.seed)))
    return group


class Advice(NamedTuple):
    """The advised row for a need, if any, the rows that were eligible, and the number of seeds that are proposed."""

    need: str
    row: str | None
    eligible: list[str]
    seeds_needed: int | None


def advice(group: Group) -> Iterator[Advice]:
    """Yield the advice for each need."""
    found, everyone = verdict(group), [contender.label for contender in group.contenders]
    within = [c.label for c in candidates(group) if c.affordable]
    yield Advice("Recommended", found.choice, within, found.seeds_needed)
    for need in found.needs:
        if need.name in NEEDS:
            yield Advice(need.name, need.choice, everyone, need.seeds_needed)


def figures(group: Group) -> dict[str, dict[str, float]]:
    """Return the mean losses over seeds by row, for each figure."""
    losses = {"nll": losses_of(group, ("test", "nll")), "shift": losses_of(group, ("shift", "nll"))}
    losses["ood"] = ood_losses(group)
    return {
        name: {label: statistics.fmean(by_seed.values()) for label, by_seed in some.items()}
        for name, some in losses.items()
    }


def _tested(advised: Advice, losses: Mapping[str, float], *, unclear: bool) -> dict[str, Any]:
    row = advised.row or REFERENCE
    best = min((label for label in advised.eligible if label in losses), key=lambda label: losses[label])
    limit = AREA if min(losses.values()) < 0 else NLL * losses["plain"]
    distance = losses[row] - losses[best]
    return {
        "row": row,
        "given": advised.row is not None,
        "near": distance <= limit,
        "right": distance <= limit or (advised.row is None and unclear),
        "worse": losses[row] > losses[REFERENCE],
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {row: sum(one["row"] == row for one in rows) for row in sorted({one["row"] for one in rows})}
    shares = {name: statistics.fmean(one[name] for one in rows) for name in ("given", "near", "right", "worse")}
    advised = [one["near"] for one in rows if one["given"]]
    return {**shares, "near_given": statistics.fmean(advised) if advised else None, "rows": counts}


def _followed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.fmean(one[name] for one in rows) for name in ("seeds", "given", "right", "worse")}


def null_test(runs: list[Run], seeds: Sequence[int]) -> float:
    """Return the share of the repetitions that recommend a plain network of other seeds, at its temperature."""
    plain = {int(run.seed): run for run in runs if run.name == "plain"}
    generator, recommended = random.Random(1), 0
    for _ in range(REPETITIONS):
        order = generator.sample(seeds, len(seeds))
        parts = [order[start : start + SEEDS] for start in range(0, len(order) - SEEDS + 1, SEEDS)]
        made = [
            _renamed(plain[seed], number, position)
            for number, part in enumerate(parts)
            for position, seed in enumerate(part)
        ]
        recommended += verdict(grouped(made)[0]).choice is not None
    return recommended / REPETITIONS


def _renamed(run: Run, number: int, seed: int) -> Run:
    """Return a plain run as seed `seed` of method `number`; number 0 stays the plain network."""
    record: dict[str, Any] = {**run.record, "seed": seed}
    if number:
        record["method"] = {"name": f"copy{number}", "label": f"copy{number}", "fields": {}}
        record["metrics"] = run.part("metrics", "tempered")
    return Run(f"copy{number}/seed{seed}", record)


def simulate() -> list[dict[str, Any]]:
    """Return how often a row is recommended by chance, and how often one that gains three sigma, by the noise of rows.

    The noise of the reference is sigma. "one variance" is the mean of the variances of all rows, with their degrees of
    freedom together. "more seeds" follows the rule, with the seeds that it proposes, up to MORE.
    """
    wide = [float(noise) for noise in np.geomspace(0.3, 10, 12)]
    noises = {"12 alike": [1.0] * 12, "10 alike, 2 noisy": [1.0] * 10 + [8.0, 14.0], "0.3 to 10 sigma": wide}
    noises |= {"4 alike": [1.0] * 4, "3 alike, 1 noisy": [1.0] * 3 + [10.0]}
    found = []
    for (name, noise), seeds in itertools.product(noises.items(), (3, 5)):
        generator, later = np.random.default_rng(0), np.random.default_rng(1)
        counts = {kind: dict.fromkeys(("one variance", "the rule", "more seeds"), 0) for kind in ("chance", "gain")}
        for kind, _ in itertools.product(counts, range(SIMULATED)):
            shift = np.array([3.0 if kind == "gain" else 0.0, *[0.0] * (len(noise) - 1)])
            first = _drawn(generator, seeds, noise, shift)
            choice = choose(_losses(first), "0", 0.0)
            extra = _drawn(later, MORE - seeds, noise, shift)[:, : (choice.seeds_needed or seeds) - seeds]
            with_more = choose(_losses(np.concatenate([first, extra], axis=1)), "0", 0.0)
            clear = {
                "one variance": _clear_by_one_variance(first[0] - first[1:]),
                "the rule": {label for label, gain in choice.gains.items() if gain.clear},
                "more seeds": {label for label, gain in with_more.gains.items() if gain.clear},
            }
            for rule, rows_of_rule in clear.items():
                counts[kind][rule] += "1" in rows_of_rule if kind == "gain" else bool(rows_of_rule)
        shares = {kind: {rule: n / SIMULATED for rule, n in by.items()} for kind, by in counts.items()}
        found.append({"rows": name, "seeds": seeds, **shares})
    return found


def _clear_by_one_variance(gains: Any) -> set[str]:
    rows, seeds = gains.shape
    error = np.sqrt(gains.var(axis=1, ddof=1).mean() / seeds)
    least = student.ppf(1 - LEVEL / rows, rows * (seeds - 1)) * error
    return {str(row + 1) for row in range(rows) if gains[row].mean() > least}


def _drawn(source: np.random.Generator, seeds: int, noise: Sequence[float], gain: Any) -> np.ndarray[Any, Any]:
    """Return normal losses of the reference and of all rows, by seed."""
    reference = source.normal(size=(1, seeds))
    rows = source.normal(size=(len(noise), seeds)) * np.array(noise)[:, None] - gain[:, None]
    return np.concatenate([reference, rows])


def _losses(found: Any) -> dict[str, dict[int, float]]:
    """Return losses by the number of the row and seed; row 0 is the reference."""
    return {str(row): dict(enumerate(map(float, losses))) for row, losses in enumerate(found)}


def simulation_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the simulations as a table."""
    lines = [
        "| noise of the rows | seeds | by chance, one variance | by chance, the rule | by chance, more seeds | "
        "found, one variance | found, the rule | found, more seeds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        cells = [
            f"{100 * one[kind][rule]:.1f} %"
            for kind in ("chance", "gain")
            for rule in ("one variance", "the rule", "more seeds")
        ]
        lines.append(f"| {one['rows']} | {one['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(found: Mapping[str, Any]) -> str:
    """Return the outcome as a table."""
    lines = [
        "| data | need | (a) right | (b) worse | recommended | of these near the best | (a) more seeds | (b) | seeds | "
        "advised rows | by all seeds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for name, data in found.items():
        for need, one in data["needs"].items():
            rows = ", ".join(f"{row} {count}" for row, count in sorted(one["rows"].items(), key=lambda pair: -pair[1]))
            keys = ("right", "worse", "given", "near_given")
            shares = " | ".join("-" if one[key] is None else f"{100 * one[key]:.1f} %" for key in keys)
            more = one["followed"]
            then = f"{100 * more['right']:.1f} % | {100 * more['worse']:.1f} % | {more['seeds']:.1f}"
            whole = one["all_seeds"] or "no clear difference"
            lines.append(f"| {name} | {need} | {shares} | {then} | {rows} | {whole} |")
        lines.append(f"| {name} | (c) plain networks alone |  |  | {100 * data['null']:.1f} % |  |  |  |  |  |  |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
