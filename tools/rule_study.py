"""Test the advice of the report on other trainings of the same rows.

    python -m tools.rule_study gather RUNS NAME     write docs/results/rule/NAME.json.gz and NAME.npz from a comparison;
                                                    rows that are there and were not run again stay
    python -m tools.rule_study test                 write docs/results/rule/outcome.json, and outcome_plain_row.json,
                                                    where the plain row of a seed is the reference of every row
    python -m tools.rule_study simulate             write docs/results/rule/simulation.json and references.json
    python -m tools.rule_study page                 print the tables of docs/results/rule.md

A comparison has twelve seeds. In each of 200 repetitions, three of them are the comparison of a user, and the report
gives its advice. The other nine test it. Without a recommendation the advice is the reference, plain + temperature.
Where the report then proposes more seeds, these are added, up to six in all, and the others test the new advice.

(a) The advised row is worse than the best eligible row by at most 2 % of plain's NLL (0.01 of the AUROC). "No clear
    difference" is right, too, if all twelve seeds say so.
(b) It is worse than plain + temperature.
(c) All "methods" are plain networks of other seeds, at their temperatures: one is recommended. Their reference is the
    mean of all plain networks of a seed, where a deep ensemble was trained. In a second test all plain networks, those
    of ensembles included, are dealt out to all roles by chance. In the first, the plain rows are always compared with
    the same members of ensembles, and either may be better by luck.
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

from leanbayes.methods import all_methods
from leanbayes.report.advice import choose, gains_of, LEVEL, with_mean_reference
from leanbayes.report.load import Group, grouped, Run
from leanbayes.report.losses import Compared, compared, losses_of, ood_losses
from leanbayes.report.verdict import candidates, verdict
from leanbayes.runtime._files import write_text

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "rule"
REPETITIONS, SEEDS, MORE, SIMULATED = 200, 3, 6, 2000
SHUFFLES, MEMBERS, COPIES = 1000, 4, 8  # repetitions of the second test of (c), members of an ensemble, "methods"
NLL, AREA = 0.02, 0.01  # largest distance to the best row: a share of plain's NLL, and of the AUROC
KEPT = ("schema", "status", "seed", "method", "network", "data", "recipe", "settings", "metrics", "cost", "commit")
KEPT_IF_THERE = ("from_plain",)
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
        for name, some in (("outcome", read), ("outcome_plain_row", lambda path: without_members(read(path)))):
            found = {path.name.split(".")[0]: outcome(some(path)) for path in sorted(FOLDER.glob("*.json.gz"))}
            write_text(json.dumps(found, indent=1) + "\n", FOLDER / f"{name}.json")
    elif given.command == "simulate":
        write_text(json.dumps(simulate(), indent=1) + "\n", FOLDER / "simulation.json")
        write_text(json.dumps(simulate_references(), indent=1) + "\n", FOLDER / "references.json")
    else:
        print("\n\n".join(tables()))


def tables() -> list[str]:
    """Return the tables of the page."""
    outcomes, before, simulations, references = (
        json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("outcome", "outcome_plain_row", "simulation", "references")
    )
    spreads = {path.name.split(".")[0]: spread(read(path)) for path in sorted(FOLDER.glob("*.json.gz"))}
    both = reference_table(references)
    return [
        table(outcomes),
        mean_table(outcomes),
        before_table(before, outcomes),
        spread_table(spreads),
        both,
        simulation_table(simulations),
    ]


def gather(runs: Path, name: str) -> None:
    """Write the figures of all finished runs, and -log p of every test row as float16, by row and seed.

    Rows that are there and were not run again stay. Those that were run again keep their costs, which were measured in
    one comparison with the plain network.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    file, arrays = FOLDER / f"{name}.json.gz", FOLDER / f"{name}.npz"
    known = json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else []
    records = {(one["method"]["label"], one["seed"]): one for one in known}
    losses = dict(np.load(arrays)) if arrays.is_file() else {}
    for path in sorted(runs.rglob("result.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        key = (record["method"]["label"], record["seed"])
        short = {name: record[name] for name in KEPT} | {name: record[name] for name in KEPT_IF_THERE if name in record}
        source = short["settings"]["data"]
        source["name"] = Path(source["name"]).name  # without the folders of a machine
        before = records.get(key, record)["cost"]
        short["cost"] = {name: value for name, value in before.items() if name != "layers"}
        records[key] = short
        for kind, text in record["figures"]["losses"].items():
            label = key[0] + ("" if kind == "test" else f" {kind}")
            losses[f"{label}/seed{record['seed']}"] = np.frombuffer(base64.b64decode(text), "<f2")
    file.write_bytes(gzip.compress(json.dumps(list(records.values())).encode(), mtime=0))
    np.savez_compressed(arrays, **losses)


def read(path: Path) -> list[Run]:
    """Return the runs of one comparison."""
    records = json.loads(gzip.decompress(path.read_bytes()))
    return [Run(f"{one['method']['label']}/seed{one['seed']}", _origin(one) | one) for one in records]


def without_members(runs: list[Run]) -> list[Run]:
    """Return runs without the figures of members: the plain row is then the reference of every row."""
    return [Run(one.path, one.record | {"metrics": _rest(one.record["metrics"])}) for one in runs]


def _rest(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name != "members"}


def _origin(record: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether a row continues the training of the plain network, as `compare.job.from_plain`.

    Results have this field since the second change of the rule; here it follows from the recorded method and recipe.
    """
    method = all_methods().get(record["method"]["name"])
    late = bool(record["recipe"].get("convert_at_epoch"))
    return {"from_plain": method is None or method.post_hoc or late}


def outcome(runs: list[Run]) -> dict[str, Any]:
    """Return, for each need, the share of the repetitions in which the advice was right, worse, and given at all."""
    seeds = sorted({int(run.seed) for run in runs})
    found: dict[str, list[dict[str, Any]]] = {need: [] for need in NEEDS}
    later: dict[str, list[dict[str, Any]]] = {need: [] for need in NEEDS}
    whole = {one.need: one.row for one in advice(_group(runs, lambda seed: True))}

    @lru_cache(maxsize=8)
    def by(
        chosen: frozenset[int],
    ) -> tuple[dict[str, Advice], dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        mine, others = (_group(runs, lambda seed, some=some: seed in some) for some in (chosen, set(seeds) - chosen))
        return {one.need: one for one in advice(mine)}, figures(mine), figures(others)

    for chosen, spare in _choices(seeds):
        advised, seen, tested = by(frozenset(chosen))
        for need, first in advised.items():
            if not tested[NEEDS[need]]:  # a need without data has none
                continue
            row = _tested(first, tested[NEEDS[need]], unclear=whole[need] is None)
            largest = _best(first.eligible, seen[NEEDS[need]])
            by_mean = _tested(first._replace(row=largest), tested[NEEDS[need]], unclear=False)
            found[need].append(row | {"by_mean": by_mean["near"]})
            count = min(first.seeds_needed or SEEDS, MORE)
            second, _, others = by(frozenset(chosen + spare[: count - SEEDS]))
            row = _tested(second[need], others[NEEDS[need]], unclear=whole[need] is None)
            later[need].append(row | {"seeds": count})
    needs = {
        need: _summary(rows) | {"followed": _followed(later[need]), "all_seeds": whole[need]}
        for need, rows in found.items()
        if rows
    }
    rows = sorted({run.label for run in runs})
    nulls = {"null": null_test(runs, seeds), "null_shuffled": shuffled_null_test(runs)}
    return {"rows": rows, "seeds": len(seeds), "needs": needs, **nulls}


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
    row, best = advised.row or REFERENCE, _best(advised.eligible, losses)
    limit = AREA if min(losses.values()) < 0 else NLL * losses["plain"]
    distance = losses[row] - losses[best]
    return {
        "row": row,
        "given": advised.row is not None,
        "near": distance <= limit,
        "right": distance <= limit or (advised.row is None and unclear),
        "worse": losses[row] > losses[REFERENCE],
    }


def _best(eligible: Sequence[str], losses: Mapping[str, float]) -> str:
    return min((label for label in eligible if label in losses), key=lambda label: losses[label])


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {row: sum(one["row"] == row for one in rows) for row in sorted({one["row"] for one in rows})}
    shares = {
        name: statistics.fmean(one[name] for one in rows) for name in ("given", "near", "right", "worse", "by_mean")
    }
    advised = [one["near"] for one in rows if one["given"]]
    return {**shares, "near_given": statistics.fmean(advised) if advised else None, "rows": counts}


def _followed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.fmean(one[name] for one in rows) for name in ("seeds", "given", "right", "worse")}


def null_test(runs: list[Run], seeds: Sequence[int]) -> float:
    """Return the share of the repetitions that recommend a plain network of other seeds, at its temperature."""
    plain = {int(run.seed): run for run in runs if run.name == "plain"}
    ensembles = {int(run.seed): run for run in runs if run.rows("metrics", "members")}
    generator, recommended = random.Random(1), 0
    for _ in range(REPETITIONS):
        order = generator.sample(seeds, len(seeds))
        parts = [order[start : start + SEEDS] for start in range(0, len(order) - SEEDS + 1, SEEDS)]
        made = [
            _renamed(plain[seed], number, position)
            for number, part in enumerate(parts)
            for position, seed in enumerate(part)
        ]
        first = enumerate(parts[0])
        made += [_members(ensembles[seed], position) for position, seed in first if seed in ensembles]
        recommended += verdict(grouped(made)[0]).choice is not None
    return recommended / REPETITIONS


def shuffled_null_test(runs: list[Run]) -> float | None:
    """Return the share of the repetitions that recommend a plain network; None with too few plain networks."""
    plain = [run for run in runs if run.name == "plain"]
    networks = [run.part("metrics", "tempered") for run in plain]
    networks += [dict(member) for run in runs for member in run.rows("metrics", "members")[1:]]  # the first is plain
    if len(networks) < SEEDS * (MEMBERS + COPIES):
        return None
    generator, recommended = random.Random(3), 0
    for _ in range(SHUFFLES):
        dealt = iter(generator.sample(networks, len(networks)))
        recommended += verdict(grouped(_shuffled(plain, dealt))[0]).choice is not None
    return recommended / SHUFFLES


def _shuffled(plain: Sequence[Run], dealt: Iterator[Any]) -> Iterator[Run]:
    """Yield a plain row, the members of an ensemble, and `COPIES` rows, all of them networks that are dealt out."""
    for seed, run in enumerate(plain[:SEEDS]):
        first = next(dealt)
        record = {**run.record, "seed": seed, "from_plain": True, "metrics": {**first, "tempered": first}}
        yield Run(f"plain/seed{seed}", record)
        members = [{**(next(dealt) if k else first), "seed": seed + 1000 * k} for k in range(MEMBERS)]
        ensemble = {"name": "deep_ensemble", "label": "deep_ensemble", "fields": {}}
        alone = {"from_plain": False, "method": ensemble, "metrics": {"members": members}}
        yield Run(f"members/seed{seed}", {**record, **alone})
        for copy in range(1, COPIES + 1):
            yield _renamed(Run("", {**record, "metrics": {"tempered": next(dealt)}}), copy, seed)


def _renamed(run: Run, number: int, seed: int) -> Run:
    """Return a plain run as seed `seed` of method `number`; number 0 stays the plain network."""
    record: dict[str, Any] = {**run.record, "seed": seed, "from_plain": not number}
    if number:
        record["method"] = {"name": f"copy{number}", "label": f"copy{number}", "fields": {}}
        record["metrics"] = run.part("metrics", "tempered")
    return Run(f"copy{number}/seed{seed}", record)


def _members(run: Run, seed: int) -> Run:
    """Return the members of an ensemble as a run of seed `seed` without figures of its own."""
    moved = [dict(one) | {"seed": one["seed"] - int(run.seed) + seed} for one in run.rows("metrics", "members")]
    return Run(f"members/seed{seed}", {**run.record, "seed": seed, "metrics": {"members": moved}})


def mean_table(found: Mapping[str, Any]) -> str:
    """Return (a) of the rule next to that of the row with the best mean, where either is below 90 %, as a table."""
    lines = ["| data | need | (a) the rule | (a) best mean of three seeds |", "| --- | --- | ---: | ---: |"]
    for name, data in found.items():
        for need, one in data["needs"].items():
            if min(one["right"], one["by_mean"]) < 0.9:
                lines.append(f"| {name} | {need} | {100 * one['right']:.1f} % | {100 * one['by_mean']:.1f} % |")
    return "\n".join(lines)


def before_table(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the outcomes with the plain row as the reference of every row, next to those of the rule, as a table."""
    lines = [
        "| data | need | (a) plain row | (a) the rule | (b) plain row | (b) the rule | near the best, plain row | "
        "near the best, the rule |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, data in now.items():
        for need, one in data["needs"].items():
            pairs = [(before[name]["needs"][need][key], one[key]) for key in ("right", "worse", "near_given")]
            cells = ["-" if share is None else f"{100 * share:.1f} %" for pair in pairs for share in pair]
            lines.append(f"| {name} | {need} | {' | '.join(cells)} |")
        null = f"{100 * before[name]['null']:.1f} % | {100 * data['null']:.1f} %"
        lines.append(f"| {name} | (c) plain networks alone: recommended | {null} |  |  |  |  |")
    return "\n".join(lines)


def spread(runs: list[Run]) -> dict[str, dict[str, list[float]]]:
    """Return mean and standard deviation of the gain of the deep ensemble over both references, by figure."""
    group, found = _group(runs, lambda seed: True), {}
    reads = {"NLL": lambda g: losses_of(g, ("test", "nll")), "NLL, corrupted": lambda g: losses_of(g, ("shift", "nll"))}
    for name, read_losses in {**reads, "AUROC": ood_losses}.items():
        each: Compared = compared(group, read_losses, REFERENCE)
        numbers = []
        for losses in (each.losses, each.paired):
            gains = [losses[REFERENCE][seed] - loss for seed, loss in losses["deep_ensemble"].items()]
            numbers += [statistics.fmean(gains), statistics.stdev(gains)]
        found[name] = numbers
    return found


def spread_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the gains of the deep ensemble over both references as a table."""
    lines = [
        "| data | figure | gain over the plain row | standard deviation | gain over all plain networks | "
        "standard deviation |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for data, by_figure in found.items():
        for name, numbers in by_figure.items():
            lines.append(f"| {data} | {name} | {' | '.join(f'{number:.4f}' for number in numbers)} |")
    return "\n".join(lines)


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


def simulate_references() -> list[dict[str, Any]]:
    """Return how often a row is clear by chance, and how often an ensemble is found, by the reference of rows.

    A seed has K plain networks with the noise sigma. "continued" rows have a correlation of 0.95 with the first one,
    "own" rows have none with any. The ensemble has the mean loss of the K networks, noise of 0.2 sigma, and gains
    1.5 sigma. Continued rows keep the first network as their reference, others get the mean of K.
    """
    kinds = {"8 own": (0, 8), "4 continued, 4 own": (4, 4), "8 continued": (8, 0)}
    found = []
    for (name, (continued, own)), seeds, networks in itertools.product(kinds.items(), (3, 5), (4, 5)):
        source = np.random.default_rng(0)
        counts = {kind: dict.fromkeys(("plain", "mean"), 0) for kind in ("chance", "gain")}
        for _, kind in itertools.product(range(SIMULATED), counts):
            plain = source.normal(size=(networks, seeds))
            late = 0.95 * plain[0] + (1 - 0.95**2) ** 0.5 * source.normal(size=(continued, seeds))
            losses = _losses(np.concatenate([plain[:1], source.normal(size=(own, seeds)), late]))
            alone = {str(row + 1) for row in range(own)}
            if kind == "gain":
                ensemble = plain.mean(0) + 0.2 * source.normal(size=seeds) - 1.5
                losses["ensemble"] = dict(enumerate(map(float, ensemble)))
                alone |= {"ensemble"}
            by_seed = {seed: [float(one) for one in plain[:, seed]] for seed in range(seeds)}
            paired = with_mean_reference(losses, "0", by_seed, alone)
            for reference, some in (("plain", losses), ("mean", paired)):
                clear = {label for label, gain in gains_of(some, "0", 0.0).items() if gain.clear}
                counts[kind][reference] += "ensemble" in clear if kind == "gain" else bool(clear)
        shares = {kind: {name: n / SIMULATED for name, n in by.items()} for kind, by in counts.items()}
        found.append({"rows": name, "seeds": seeds, "networks": networks, **shares})
    return found


def reference_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the simulations of both references as a table."""
    lines = [
        "| rows | seeds | plain networks of a seed | by chance, plain row | by chance, mean | found, plain row | "
        "found, mean |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        cells = [
            f"{100 * one[kind][reference]:.1f} %" for kind in ("chance", "gain") for reference in ("plain", "mean")
        ]
        lines.append(f"| {one['rows']} | {one['seeds']} | {one['networks']} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
        for title, key in (("(c) plain networks alone", "null"), ("(c) all plain networks shuffled", "null_shuffled")):
            if data.get(key) is not None:
                lines.append(f"| {name} | {title} |  |  | {100 * data[key]:.1f} % |  |  |  |  |  |  |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
