"""The verdict: the row to take, by a stated rule, and one line for each need.

`advice` has the statistical rule. Here are the needs, their figures, and the sentences.
"""

from __future__ import annotations

import base64
import binascii
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from leanbayes.evaluation.statistics import Estimate
from leanbayes.report.advice import about_as_good, best_of, cheapest, Choice, choose
from leanbayes.report.columns import Column, Key, test_columns
from leanbayes.report.load import BASELINES, Contender, Group, Run, TEMPERED
from leanbayes.report.losses import Compared, compared, losses_of, ood_losses, seed_of, shifted_losses, tempered_losses
from leanbayes.report.table import decimals_of, estimates_of, quartile_costs

HEADLINE: dict[str, Key] = {"classification": ("test", "nll"), "regression": ("test", "lpd")}
LIMITS = {  # the largest acceptable costs
    "training_ratio": 2.0,  # trainings of the plain network
    "answer_passes": 20.0,  # passes of the plain network: 16 draws, the default, and a quarter more
    "parameter_ratio": 2.0,  # plain networks
}
FLOORS = {  # cost and value below which a limit does not decide
    "training_ratio": ("train_seconds", 60.0),
    "answer_passes": ("answer_ms", 1.0),
    "parameter_ratio": ("parameters", 1e6),
}
SMALLEST_SHARE, SMALLEST_NATS, SMALLEST_AREA = 0.01, 0.01, 0.005  # smallest gains of NLL, LPD and AUROC that count
FINDS, CHANCE = "Finds out-of-distribution inputs", 0.5  # AUROC of a guess
NARROW, COVERED = "Narrow intervals", ("test", "coverage_validated")
LEVEL, COVERAGE_ERRORS = 0.95, 2.0  # of the intervals; standard errors by which their test coverage may be lower
NOTHING = Estimate(0.0, None, 0)
RULE = (
    f"Rule: a row stays within the limits if its training costs at most {LIMITS['training_ratio']:g} trainings of the "
    f"plain network, one answer at most {LIMITS['answer_passes']:g} of its passes (draws or members times the cost of "
    f"a pass), and if it has at most {LIMITS['parameter_ratio']:g} times its parameters. A cost does not decide if the "
    "training takes less than a minute, an answer less than 1 ms a row, or the network has fewer than a million "
    "parameters. Each row is compared with the plain network at a temperature from held-out training rows (without "
    "such rows, with the plain network), by differences paired by seed. A row that does not continue the training of "
    "the plain network is compared with the mean of all plain networks of its seed, where the members of a deep "
    "ensemble count as plain networks. A difference is clear if it is larger than its standard error times the "
    "quantile of Student's distribution at 5 % divided by the number of rows, and at least 1 % of the NLL or the width "
    "(0.01 nats of the LPD, 0.005 of the AUROC). The variance over seeds is the median of all rows, or the row's own "
    "if that is larger. By Jensen's inequality a gain in NLL or LPD is expected of an ensemble, so it is tested alone: "
    "at 5 %, with its own variance. If some row is clearly better, the row with the largest "
    "gain less one standard error is named, of those with at least two. A row is about as good as the best if it is "
    "worse by at most one standard error or that smallest "
    "difference. Widths count if the intervals hold at most two standard errors less than 95 % of the test targets. "
    "The row named by NLL or LPD among those within the limits is recommended. With one seed the standard error is "
    "that of the test rows, and nothing is recommended."
)


@dataclass(frozen=True)
class Candidate:
    """A contender with its quality and costs.

    Attributes:
        contender: the contender.
        quality: the deciding figure.
        written: the same as text.
        costs: the measured costs, by the names of LIMITS.
        free: names of the costs that are too small to decide.
        quartiles: the costs, and `answer_ms`, at the lower and at the upper quartile of the measured times.
    """

    contender: Contender
    quality: Estimate
    written: str
    costs: dict[str, Estimate]
    free: frozenset[str] = frozenset()
    quartiles: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})

    @property
    def label(self) -> str:
        return self.contender.label

    @property
    def excess(self) -> float | None:
        """The largest cost that decides, relative to its limit; None unless all were measured."""
        if self.contender.name in BASELINES:
            return 0.0
        if len(self.costs) < len(LIMITS):
            return None
        return max(
            (cost.mean / LIMITS[name] for name, cost in self.costs.items() if name not in self.free), default=0.0
        )

    @property
    def affordable(self) -> bool:
        return self.excess is not None and self.excess <= 1

    @property
    def near_limit(self) -> bool:
        """Whether the row is within the limits at one quartile of its measured times, and beyond at the other."""
        if self.excess is None or self.contender.name in BASELINES or self.contender.is_plain:
            return False
        return self._affordable_at(0) != self._affordable_at(1)

    def _affordable_at(self, end: int) -> bool:
        found = self.quartiles[end]
        free = set(self.free)
        for name, (cost, floor) in FLOORS.items():
            if cost in found:
                free = free | {name} if found[cost] < floor else free - {name}
        return all(found.get(name, cost.mean) <= LIMITS[name] for name, cost in self.costs.items() if name not in free)

    @property
    def price(self) -> str:
        written = {name: _WORDS[name](self.costs[name].mean) for name in LIMITS if name in self.costs}
        return _list(list(written.values())) if written else "a cost that was not measured"


_WORDS = {
    "training_ratio": "{:.3g} times the training of the plain network".format,
    "answer_passes": "{:.3g} of its passes for an answer".format,
    "parameter_ratio": lambda ratio: f"{100 * (ratio - 1):.3g} % more parameters",
}


@dataclass(frozen=True)
class Need:
    """One need, the advice for it in a sentence, and the label of the row to take, if one is clear.

    Attributes:
        seeds_needed: the number of seeds with which the best row would be clearly better, if its gain stays.
    """

    name: str
    sentence: str
    choice: str | None = None
    seeds_needed: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The sentences, the label of the recommended contender, a line for each need, and seeds_needed as there."""

    sentence: str
    choice: str | None = None
    needs: tuple[Need, ...] = ()
    seeds_needed: int | None = None


def headline(task: str) -> Column:
    """Return the deciding figure: NLL for classes, log predictive density for real targets."""
    key = HEADLINE.get(task, HEADLINE["classification"])
    return next(column for column in test_columns(task) if column.key == key)


def verdict(group: Group) -> Verdict:
    """Return which row of a group to take, by RULE, and the best row for each need."""
    column, ranked = headline(group.task), candidates(group)
    where = f"On the data set {group.data}, with the network {group.network},"
    reference = _reference(ranked)
    if not ranked:
        return Verdict(f"{where} no run came to its end with a test {column.title}.")
    if reference is None:
        best = f"The best {column.title} has {ranked[0].label} ({ranked[0].written})."
        return Verdict(f"{where} the plain network did not run, so no gain can be measured against it. {best}")
    if all(candidate.contender.is_plain for candidate in ranked):
        only = f"{where} only the plain network came to its end ({column.title} {reference.written})."
        return Verdict(f"{only} There is no method to compare it with.")
    losses = compared(group, partial(losses_of, key=column.key, sign=-column.sign), reference.label)
    choice_among = partial(
        choose,
        losses.paired,
        reference.label,
        _smallest(group.task, reference),
        row_errors=_row_errors(group, reference.contender),
        mixtures=losses.mixtures,
    )
    chosen = choice_among(eligible=[candidate.label for candidate in ranked if candidate.affordable])
    named = {candidate.label: candidate for candidate in ranked}
    sentence = f"{where} {_advice(column, named, reference, chosen, losses)}{_beyond(column, ranked, chosen)}"
    if chosen.recommended is None:
        sentence += at_own_temperatures(group, reference, [each.label for each in ranked if each.affordable])
    needs = _needs(group, column, reference, ranked, losses)
    sentence += could_change(ranked, lambda labels: choice_among(eligible=labels))
    return Verdict(sentence + _unmeasured(ranked), chosen.recommended, tuple(needs), chosen.seeds_needed)


def at_own_temperatures(group: Group, reference: Candidate, eligible: list[str]) -> str:
    """Return a sentence if a row is clearly better than the reference once it has a temperature of its own, else "".

    The table has the rows as they were trained, and only the plain network with a temperature, too.
    """
    if reference.contender.name != TEMPERED:
        return ""
    losses = compared(group, tempered_losses, reference.label)
    smallest = _smallest(group.task, reference)
    found = choose(losses.paired, reference.label, smallest, eligible=eligible, mixtures=losses.mixtures)
    if found.recommended is None:
        return ""
    nll = {label: f"{_mean(losses.losses[label]):.4g}" for label in (found.recommended, reference.label)}
    return (
        f" At a temperature of its own, {found.recommended} is clearly better: NLL {nll[found.recommended]} against "
        f"{nll[reference.label]}{losses.note(found.recommended)}. leanbayes predict --temperature applies it."
    )


def could_change(ranked: Sequence[Candidate], choice_among: Callable[[list[str]], Choice]) -> str:
    """Return a sentence if another row would be named within the quartiles of the measured costs, else "".

    Each row that is near a limit is taken to be on its other side in turn. With several seeds the recommended row
    counts, with one the best row within the limits. `ranked` has the best row first.
    """

    def row_named(labels: list[str]) -> str | None:
        choice = choice_among(labels)
        return next(iter(labels), None) if choice.single else choice.recommended

    within = [candidate.label for candidate in ranked if candidate.affordable]
    now = row_named(within)
    near = []
    for candidate in (candidate for candidate in ranked if candidate.near_limit):
        other = set(within) ^ {candidate.label}
        if row_named([each.label for each in ranked if each.label in other]) != now:
            near.append(candidate.label)
    if not near:
        return ""
    costs = f"the cost of {near[0]} is" if len(near) == 1 else f"the costs of {_list(near)} are"
    return f" Within the spread of the measured costs this could change: {costs} near a limit."


def candidates(group: Group) -> list[Candidate]:
    """Return the contenders with the deciding figure, the best first."""
    column = headline(group.task)
    known = [
        (who, found) for who, found in zip(group.contenders, estimates_of(group), strict=True) if column.key in found
    ]
    decimals = decimals_of(column, [found[column.key] for _, found in known])
    ranked = []
    for contender, found in known:
        mean, sem = column.write(found[column.key], decimals)
        costs = {name: found[("cost", name)] for name in LIMITS if ("cost", name) in found}
        if extra := found.get(("cost", "extra_percent")):
            costs["parameter_ratio"] = Estimate(1 + extra.mean / 100, extra.sem and extra.sem / 100, extra.count)
        if contender.is_plain:
            costs = dict.fromkeys(LIMITS, Estimate(1.0, None, 1))
        small = {
            name
            for name, (cost, floor) in FLOORS.items()
            if (value := found.get(("cost", cost))) is not None and value.mean < floor
        }
        written = f"{mean} ± {sem}" if sem else mean
        quartiles = _mean_quartiles(contender.runs, 0), _mean_quartiles(contender.runs, 1)
        ranked.append(Candidate(contender, found[column.key], written, costs, frozenset(small), quartiles))
    return sorted(ranked, key=lambda c: column.sign * c.quality.mean, reverse=True)


def _mean_quartiles(runs: Sequence[Run], end: int) -> dict[str, float]:
    """Return the costs at one quartile, as means over seeds."""
    found = [quartile_costs(run, end) for run in runs]
    names = {name for costs in found for name in costs}
    return {name: statistics.fmean(costs[name] for costs in found if name in costs) for name in names}


def _reference(ranked: Sequence[Candidate]) -> Candidate | None:
    """Return the plain network at its temperature; without held-out rows, the plain network."""
    tempered = (candidate for candidate in ranked if candidate.contender.name == TEMPERED)
    plain = (candidate for candidate in ranked if candidate.contender.is_reference)
    return next(tempered, None) or next(plain, None)


def _smallest(task: str, reference: Candidate) -> float:
    return SMALLEST_NATS if task == "regression" else SMALLEST_SHARE * abs(reference.quality.mean)


def _row_errors(group: Group, reference: Contender) -> dict[str, float]:
    """Return the standard errors over test rows of the differences to the reference, of the first seed of each row."""
    there = {seed_of(run): _losses_by_row(run) for run in reference.runs}
    errors: dict[str, float] = {}
    for contender in group.contenders:
        for run in contender.runs[:1]:
            mine, other = _losses_by_row(run), there.get(seed_of(run))
            if mine is not None and other is not None and len(mine) == len(other) > 1:
                errors[contender.label] = float(np.std(other - mine, ddof=1) / math.sqrt(len(mine)))
    return errors


def _losses_by_row(run: Run) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    text = run.part("figures", "losses", "test")
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<f2").astype(np.float64)
    except (TypeError, ValueError, binascii.Error):
        return None


def _advice(column: Column, named: dict[str, Candidate], reference: Candidate, chosen: Choice, losses: Compared) -> str:
    """Return the advice: with one seed the best row of this training, else the recommended one."""
    title, rows = column.title, [c for c in named.values() if c.affordable]
    best = max(rows, key=lambda c: column.sign * c.quality.mean, default=reference)
    if chosen.recommended is not None:
        choice = named[chosen.recommended]
        first = f"take {choice.label}: {title} {choice.written} against {reference.written} of {reference.label}"
        first += losses.note(choice.label, -column.sign)
        if choice.contender.name in BASELINES:
            return f"{first}.{_by_another(chosen)}{_best_network(column, named)}"
        return f"{first}, for {choice.price}.{_by_another(chosen)}"
    if chosen.single:
        if best is reference:
            first = f"for this one training, {reference.label} has the best {title} ({best.written})"
        else:
            gain = chosen.gains.get(best.label)
            sure = "by more than chance over the test rows" if gain is not None and gain.clear else "within chance"
            first = (
                f"for this one training, {best.label} has the best {title} within the limits ({best.written} against "
                f"{reference.written} of {reference.label}), {sure}"
            )
        return f"{first}. One seed recommends nothing: run more, with --seeds 0,1,2."
    other = "" if best is reference else f"; the best row within the limits is {best.label} ({best.written})"
    more = ""
    if chosen.seeds_needed is not None:
        seeds = ",".join(map(str, range(chosen.seeds_needed)))
        more = f" If the gain of {chosen.promising} stays, about {chosen.seeds_needed} seeds show it: --seeds {seeds}."
    return f"there is no clear difference: stay with {reference.label} ({title} {reference.written}){other}.{more}"


def _by_another(chosen: Choice) -> str:
    """Say so if the recommended row is not clearly better by itself; "" if it is."""
    label, gains = chosen.recommended, chosen.gains
    if label is None or gains[label].clear:
        return ""
    less = [name for name, gain in gains.items() if gain.clear and gain.seeds > 1 and gain.least < gains[label].least]
    return f" Clearly better is {_list(less)}; {label} gains more, even when one standard error is subtracted."


def _best_network(column: Column, named: dict[str, Candidate]) -> str:
    networks = [c for c in named.values() if not c.contender.is_plain and c.contender.name not in BASELINES]
    if not networks:
        return ""
    best = max(networks, key=lambda c: column.sign * c.quality.mean)
    return f" The best network with a split uncertainty is {best.label} ({best.written}), at {best.price}."


def _beyond(column: Column, ranked: list[Candidate], chosen: Choice) -> str:
    """Name the best row of all, with its price, if it is beyond the limits."""
    best = ranked[0]
    if best.affordable or best.label == chosen.recommended:
        return ""
    reason = "at a cost that was not measured" if best.excess is None else f"at {best.price}, beyond the limits"
    return f" {best.label} has the best {column.title} of all ({best.written}), {reason}."


def _unmeasured(ranked: list[Candidate]) -> str:
    unknown = [c.label for c in ranked if c.excess is None]
    return f" The cost of {_list(unknown)} was not measured." if unknown else ""


def _needs(group: Group, column: Column, reference: Candidate, ranked: list[Candidate], losses: Compared) -> list[Need]:
    """Return a line for each need that has data, and the flag that would add the data of another."""
    errors = _row_errors(group, reference.contender)
    smallest = _smallest(group.task, reference)
    lines = [_line("Best probabilities", column.title, losses, reference.label, smallest, errors, -column.sign)]
    lines += [_robust(group, column, reference.label)]
    lines += [_narrow(group, reference.label)] if group.task == "regression" else []
    areas = replace(compared(group, ood_losses, reference.label), mixtures=frozenset())  # an AUROC is no log loss
    if areas.losses:
        score = "total" if group.task == "classification" else "epistemic"
        title = f"AUROC by {score} uncertainty"
        lines.append(_line(FINDS, title, areas, reference.label, SMALLEST_AREA, sign=-1))
        if (largest := -min(map(_mean, areas.losses.values()))) < CHANCE:
            told = f"No row: the largest {title} is {largest:.4g}. Below 0.5, out-of-distribution inputs look familiar."
            lines[-1] = Need(FINDS, told)
    else:
        lines.append(Need(FINDS, "Not measured: add --ood with the name of a data set."))
    best = ranked[0].label if losses.mean is None else best_of(losses.paired) or ranked[0].label
    good = about_as_good(losses.paired, best, smallest, errors)
    for name, key, unit in (("Smallest file", "size", "parameters"), ("Cheapest answer", "answer_passes", "passes")):
        lines.append(_cheapest_line(group, name, key, unit, good, best))
    return lines


def _robust(group: Group, column: Column, reference: str) -> Need:
    """Return the line on shifted rows: the mean over the sets of --shift-data, else over the corruptions of images."""
    moved = compared(group, partial(shifted_losses, figure=column.key[-1], sign=-column.sign), reference)
    if moved.losses:
        share = SMALLEST_NATS if group.task == "regression" else _share(moved.losses, reference)
        return _line("Robust to shift", f"mean {column.title}", moved, reference, share, sign=-column.sign)
    corrupted = compared(group, partial(losses_of, key=("shift", "nll")), reference)
    if corrupted.losses:
        share = _share(corrupted.losses, reference)
        return _line("Robust to corrupted images", "mean NLL", corrupted, reference, share)
    flag = "--shift-data with a file of rows and targets"
    return Need("Robust to shift", f"Not measured: add {flag}; images may have --shift instead.")


def _narrow(group: Group, reference: str) -> Need:
    """Return the line on the width of intervals that hold 95 % of the held-out rows, if they also hold test rows."""
    widths = losses_of(group, ("test", "interval_width_validated"))
    if not widths:
        return Need(NARROW, "Not measured: add --validation with a share of the training rows.")
    held = {label: _mean(by) for label, by in losses_of(group, COVERED).items()}
    rows = min((run.number("data", "test") or 1 for run in group.runs), default=1)
    least = LEVEL - COVERAGE_ERRORS * math.sqrt(LEVEL * (1 - LEVEL) / max(rows, 1))
    good = {label: by for label, by in widths.items() if held.get(label, 1.0) >= least}
    short = [f"{label} {100 * held[label]:.3g} %" for label in widths if label not in good]
    missed = f" Not counted, for they hold too few test targets: {_list(short)}." if short else ""
    if not good:
        return Need(NARROW, f"No row.{missed}")
    found = _line(NARROW, "width at 95 % validation coverage", Compared(good, good), reference, _share(good, reference))
    return replace(found, sentence=found.sentence + missed)


def _mean(by_seed: Mapping[int, float]) -> float:
    return statistics.fmean(by_seed.values())


def _share(losses: Mapping[str, Mapping[int, float]], reference: str) -> float:
    """Return the smallest gain that counts: a share of the reference's mean; 0 without a reference."""
    base = losses.get(reference, {})
    return SMALLEST_SHARE * abs(_mean(base)) if base else 0.0


def _line(
    name: str,
    title: str,
    losses: Compared,
    reference: str,
    smallest: float,
    errors: dict[str, float] | None = None,
    sign: int = 1,
) -> Need:
    chosen = choose(losses.paired, reference, smallest, row_errors=errors, mixtures=losses.mixtures)
    assert chosen.best is not None

    def written(label: str) -> str:
        return f"{label} ({title} {sign * _mean(losses.losses[label]):.4g})"

    if chosen.recommended is not None:
        note = losses.note(chosen.recommended, sign)
        against = f" against {written(reference)}{note}" if reference in losses.losses else ""
        return Need(name, f"{written(chosen.recommended)}{against}.{_by_another(chosen)}", chosen.recommended)
    if chosen.single:
        return Need(name, f"For this one training {written(chosen.best)}.")
    best = best_of(losses.losses) or reference if chosen.best == reference else chosen.best
    if best == reference:
        return Need(name, f"No clear difference; the best is {written(reference)}.")
    needed = chosen.seeds_needed
    more = "" if needed is None else f" If the gain of {chosen.promising} stays, about {needed} seeds show it."
    other = f", {written(reference)}{losses.note(best, sign)}" if reference in losses.losses else ""
    return Need(name, f"No clear difference: {written(best)}{other}.{more}", None, needed)


def _cheapest_line(group: Group, name: str, key: str, unit: str, good: Sequence[str], best: str) -> Need:
    prices: dict[str, float] = {}
    estimates = estimates_of(group)
    plain = next((found for who, found in zip(group.contenders, estimates, strict=True) if who.is_reference), {})
    one_pass = plain.get(("cost", "answer_ms"), NOTHING).mean
    for contender, found in zip(group.contenders, estimates, strict=True):
        if key == "size":
            parts = [found.get(("cost", part)) for part in ("parameters", "extra_parameters")]
            known = [part.mean for part in parts if part is not None]
            if known and parts[0] is not None:
                prices[contender.label] = sum(known)
        elif ("cost", key) in found:
            prices[contender.label] = found[("cost", key)].mean
        elif ("cost", "answer_ms") in found and one_pass > 0:  # a row without a network: its time in passes
            prices[contender.label] = found[("cost", "answer_ms")].mean / one_pass
    label = cheapest(prices, good)
    if label is None:
        return Need(name, f"No network is about as good as {best}." if prices else "Not measured.")
    same = "the best row itself" if label == best else f"about as good as {best}"
    price = f"{prices[label]:,.0f}" if prices[label] >= 1000 else f"{prices[label]:.3g}"
    counted = f"{price} {unit.removesuffix('es') if price == '1' else unit}"
    return Need(name, f"{label} ({counted}), {same}.", label)


def _list(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
