"""Losses of a comparison by row and seed, each row with its reference.

The reference of a row is the plain network of its seed, at its temperature. A row that does not continue the training
of this network is compared with the mean over all plain networks of the seed. The members of a deep ensemble are plain
networks, trained alike from other seeds; its results have their figures (`metrics.members`). The equation is in
`advice`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from leanbayes.evaluation.result import MACHINE
from leanbayes.evaluation.statistics import number
from leanbayes.report.advice import Losses, with_mean_reference
from leanbayes.report.columns import Key
from leanbayes.report.load import Contender, Group, Look, Run, TEMPERED
from leanbayes.report.table import facts, mean_rows

Read = Callable[[Group], Losses]
"""Returns a loss of a group by label and seed; lower is better."""

SCORE = {"classification": "entropy", "regression": "mutual_information"}  # finds out-of-distribution inputs
WITHOUT_EFFECT = {
    *("posterior_lr", "posterior_schedule", "beta", "anneal_epochs", "tile", "tile_last_epochs", "samples"),
    *("aggregate", "alternate_epochs", "seed", *MACHINE),
}
"""Fields of a recipe that do not change the training of a plain network."""


@dataclass(frozen=True)
class Compared:
    """The losses that the rule compares.

    Attributes:
        losses: as measured, by row and seed.
        paired: the same, moved so that the gain of each row is over its own reference.
        mean: the mean loss of all plain networks; None without members.
        networks: the number of plain networks.
        rows: those whose reference is the mean over plain networks.
        mixtures: those of them that mix plain networks of the seed.
    """

    losses: Losses
    paired: Losses
    mean: float | None = None
    networks: int = 0
    rows: frozenset[str] = frozenset()
    mixtures: frozenset[str] = frozenset()

    def note(self, row: str, sign: int = 1) -> str:
        """Return the figure of all plain networks in words, if it is the reference of a row; else ""."""
        if self.mean is None or row not in self.rows:
            return ""
        return f" and {sign * self.mean:.4g} over all {self.networks} plain networks, which decides"


def compared(group: Group, read: Read, reference: str) -> Compared:
    """Return the losses of a group, each row with its reference; `reference` is the label of the plain network."""
    losses = read(group)
    there = losses.get(reference, {})
    members = read(_members(group)) if len(there) > 1 else {}
    networks = {
        seed: [plain, *(by_seed[seed] for by_seed in members.values() if seed in by_seed)]
        for seed, plain in there.items()
    }
    every = [loss for each in networks.values() for loss in each]
    rows = frozenset(each.label for each in group.contenders if each.label in losses and _on_its_own(each))
    if not rows or len(every) == len(there):
        return Compared(losses, losses)
    paired = with_mean_reference(losses, reference, networks, rows)
    mixtures = rows.intersection(each.label for each in group.contenders if _mixes_plain_networks(each, group))
    return Compared(losses, paired, statistics.fmean(every), len(every), rows, mixtures)


def _on_its_own(contender: Contender) -> bool:
    """Return whether no run of a row is, or continues, the training of the plain network; older files do not say."""
    return all(run.part("from_plain") is False for run in contender.runs)


def _mixes_plain_networks(contender: Contender, group: Group) -> bool:
    """Return whether every run of a row is a mixture of the plain network of its seed and others that trained alike."""
    plain = {run.seed: run for run in group.plain.runs} if group.plain else {}
    return all(
        run.seed in plain and len(run.rows("metrics", "members")) > 1 and _trained_alike(run, plain[run.seed])
        for run in contender.runs
    )


def _members(group: Group) -> Group:
    """Return the members of all ensembles as rows of their own, each network once; without the plain row's own."""
    plain = {run.seed: run for run in group.plain.runs} if group.plain else {}
    found: dict[int, dict[str, Run]] = {}
    for run in group.runs:
        there = plain.get(run.seed)
        if there is None or not _trained_alike(run, there):
            continue
        for member in run.rows("metrics", "members"):
            seed = number(member.get("seed"))
            distance = 0 if seed is None else int(seed) - seed_of(run)
            if distance:
                method = {"name": TEMPERED, "label": f"member {distance}", "fields": {}}
                record = {**run.record, "method": method, "metrics": member}
                found.setdefault(distance, {}).setdefault(run.seed, Run(f"{run.path}, member {distance}", record))
    rows = (Contender(str(n), TEMPERED, tuple(runs.values()), Look(0, 0, 0), str(n)) for n, runs in found.items())
    return replace(group, contenders=tuple(rows))


def _trained_alike(run: Run, plain: Run) -> bool:
    """Return whether the members of an ensemble are trained and evaluated as the plain row, but for their seeds."""
    recipes = [one.part("recipe") or {} for one in (run, plain)]
    names = (recipes[0].keys() & recipes[1].keys()) - WITHOUT_EFFECT
    shared = {name for name in run.settings.keys() & plain.settings.keys() if name.startswith(("data.", "judging."))}
    return all(recipes[0][name] == recipes[1][name] for name in names) and all(
        run.settings[name] == plain.settings[name] for name in shared
    )


def losses_of(group: Group, key: Key, sign: int = 1) -> dict[str, dict[int, float]]:
    """Return a figure by label and seed, times `sign`; lower is better."""
    plain = mean_rows(group.plain.runs) if group.plain else []
    found: dict[str, dict[int, float]] = {}
    for contender in group.contenders:
        values = {seed_of(run): facts(run, plain).get(key) for run in contender.runs}
        found[contender.label] = {seed: sign * value for seed, value in values.items() if value is not None}
    return {label: by_seed for label, by_seed in found.items() if by_seed}


def tempered_losses(group: Group) -> dict[str, dict[int, float]]:
    """Return the NLL of every row at the temperature of its own held-out rows, by label and seed."""
    found: dict[str, dict[int, float]] = {}
    for contender in group.contenders:
        place = ("test",) if contender.name == TEMPERED else ("tempered", "test")
        values = {seed_of(run): run.number("metrics", *place, "nll") for run in contender.runs}
        found[contender.label] = {seed: value for seed, value in values.items() if value is not None}
    return {label: by_seed for label, by_seed in found.items() if by_seed}


def ood_losses(group: Group) -> dict[str, dict[int, float]]:
    """Return minus the mean AUROC over the out-of-distribution sets, by label and seed, by one fixed score."""
    score = SCORE.get(group.task, "entropy")
    return _means(group, "ood", lambda run, name: run.number("metrics", "ood", name, "scores", score, "auroc"), -1)


def shifted_losses(group: Group, figure: str, sign: int = 1) -> dict[str, dict[int, float]]:
    """Return the mean of a figure over the sets of shifted rows, by label and seed, times `sign`."""
    return _means(group, "shift_data", lambda run, name: run.number("metrics", "shift_data", name, figure), sign)


def _means(
    group: Group, section: str, figure: Callable[[Run, str], float | None], sign: int
) -> dict[str, dict[int, float]]:
    """Return the mean of a figure over the sets of a section of the metrics, by label and seed, times `sign`."""
    found: dict[str, dict[int, float]] = {}
    for contender in group.contenders:
        for run in contender.runs:
            sets = run.part("metrics", section)
            values = [figure(run, name) for name in (sets if isinstance(sets, Mapping) else {})]
            known = [value for value in values if value is not None]
            if known:
                found.setdefault(contender.label, {})[seed_of(run)] = sign * statistics.fmean(known)
    return found


def seed_of(run: Run) -> int:
    """Return the seed of a run."""
    return int(run.number("seed") or 0)
