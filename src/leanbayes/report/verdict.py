"""The answer in one sentence: which method is worth its cost, by a rule that is stated beside it."""

from __future__ import annotations

from dataclasses import dataclass

from leanbayes.report.columns import Column, Key, test_columns
from leanbayes.report.estimate import difference_error, Estimate
from leanbayes.report.load import Contender, Group
from leanbayes.report.marks import decimals_of
from leanbayes.report.table import estimates_of

AFFORDABLE = 2.0  # plain networks
CLEAR = 2.0  # standard errors of the difference
HEADLINE: dict[str, Key] = {"classification": ("test", "nll"), "regression": ("test", "lpd")}
RULE = (
    "Rule: of the methods whose training, prediction (pass for pass) and parameters each cost at most "
    f"{AFFORDABLE:g} times the plain network's, the one with the best mean log-likelihood on the test set (NLL, or LPD "
    f"for real targets) is recommended if it beats the plain network by more than {CLEAR:g} standard errors of the "
    "difference."
)
COSTS = {  # what is measured, and how it is called in a sentence
    "training_ratio": "training",
    "predict_ratio": "prediction (pass for pass)",
    "parameter_ratio": "parameters",
}


@dataclass(frozen=True)
class Candidate:
    """A contender as the rule sees it.

    Attributes:
        contender: who.
        quality: the deciding figure.
        written: the same as text.
        ratios: training, prediction and parameters in those of the plain network, as far as measured.
        passes: passes through the network that one answer takes, if known.
    """

    contender: Contender
    quality: Estimate
    written: str
    ratios: dict[str, Estimate]
    passes: Estimate | None

    @property
    def label(self) -> str:
        """The contender's label."""
        return self.contender.label

    @property
    def cost(self) -> float | None:
        """The largest of the three ratios; None unless all were measured."""
        return max(ratio.mean for ratio in self.ratios.values()) if len(self.ratios) == len(COSTS) else None

    @property
    def price(self) -> str:
        """The largest of the three ratios in words, with what it is a ratio of."""
        name, ratio = max(self.ratios.items(), key=lambda pair: pair[1].mean)
        return f"{ratio.mean:.3g} times the plain network's {COSTS[name]}"

    @property
    def affordable(self) -> bool:
        """Whether the cost is known and within bounds."""
        return self.cost is not None and self.cost <= AFFORDABLE


@dataclass(frozen=True)
class Verdict:
    """The sentence, and the label of the contender that it recommends (None: none)."""

    sentence: str
    choice: str | None = None


def headline(task: str) -> Column:
    """Return the figure that decides: NLL for classes, log predictive density for real targets."""
    key = HEADLINE.get(task, HEADLINE["classification"])
    return next(column for column in test_columns(task) if column.key == key)


def verdict(group: Group) -> Verdict:
    """Say which method of a group is worth its cost, by RULE."""
    column = headline(group.task)
    ranked = candidates(group)
    plain = next((c for c in ranked if c.contender.is_reference), None)
    rivals = [c for c in ranked if c.affordable and not c.contender.is_reference]
    if not ranked:
        choice, told = None, f"no run came to its end with a test {column.title}"
    elif plain is None:
        choice, told = None, _without_plain(column, ranked[0])
    elif not rivals:
        choice, told = None, _without_rivals(group, plain, ranked) + _others(column, plain, ranked)
    else:
        choice, told = _weigh(column, plain, rivals[0])
        told += _others(column, rivals[0] if choice else plain, ranked)
    return Verdict(f"On {group.data} with {group.network}, {told}.", choice)


def candidates(group: Group) -> list[Candidate]:
    """Return the contenders that have the deciding figure, the best first."""
    column = headline(group.task)
    known = [
        (who, found) for who, found in zip(group.contenders, estimates_of(group), strict=True) if column.key in found
    ]
    decimals = decimals_of(column, [found[column.key] for _, found in known])
    ranked = []
    for contender, found in known:
        mean, sem = column.write(found[column.key], decimals)
        ratios = dict.fromkeys(COSTS, Estimate(1.0, None, 1)) if contender.is_reference else cost_ratios(found)
        written = f"{mean} ± {sem}" if sem else mean
        ranked.append(Candidate(contender, found[column.key], written, ratios, found.get(("cost", "passes"))))
    return sorted(ranked, key=lambda c: _sign(column) * c.quality.mean, reverse=True)


def cost_ratios(found: dict[Key, Estimate]) -> dict[str, Estimate]:
    """Return training, prediction and parameters, as far as measured, in those of the plain network."""
    ratios = {name: found[("cost", name)] for name in COSTS if ("cost", name) in found}
    if extra := found.get(("cost", "extra_percent")):
        ratios["parameter_ratio"] = Estimate(1 + extra.mean / 100, extra.sem and extra.sem / 100, extra.count)
    return ratios


def _sign(column: Column) -> int:
    return 1 if column.better == "higher" else -1


def _clearly_better(column: Column, one: Candidate, other: Candidate) -> bool:
    """Whether one mean beats another by more than CLEAR standard errors of the difference."""
    gap = _sign(column) * (one.quality.mean - other.quality.mean)
    known = one.quality.sem is not None and other.quality.sem is not None
    return known and gap > CLEAR * difference_error(one.quality, other.quality)


def _without_plain(column: Column, best: Candidate) -> str:
    return (
        f"the plain network did not run, so no gain can be weighed against a cost; {best.label} has the best "
        f"{column.title} ({best.written})"
    )


def _without_rivals(group: Group, plain: Candidate, ranked: list[Candidate]) -> str:
    """Say why no method is affordable: there is none, or its cost is unknown or too high."""
    title = headline(group.task).title
    if len(group.contenders) == 1 and not group.failures:
        return f"only the plain network was run ({title} {plain.written}): there is no method to weigh against it"
    if len(ranked) == 1:
        return f"only the plain network came to its end with a test {title} ({plain.written})"
    known = [(c.cost, c) for c in ranked if c.cost is not None and not c.contender.is_reference]
    if not known:
        return f"no method can be weighed against the plain network ({title} {plain.written})"
    _, cheapest = min(known, key=lambda pair: pair[0])
    return (
        f"no method costs at most {AFFORDABLE:g} times the plain network ({title} {plain.written}); "
        f"the cheapest is {cheapest.label} ({cheapest.written}), at {cheapest.price}"
    )


def _weigh(column: Column, plain: Candidate, best: Candidate) -> tuple[str | None, str]:
    """Weigh the best affordable method against the plain network; return whom to take, and why."""
    title = column.title
    if best.quality.sem is None or plain.quality.sem is None:
        order = "ahead of" if _sign(column) * (best.quality.mean - plain.quality.mean) > 0 else "behind"
        return None, (
            f"one seed is too few to decide: {best.label} is the best affordable method ({title} {best.written}), "
            f"{order} the plain network ({plain.written}), but chance may have done it; run more seeds"
        )
    if not _clearly_better(column, best, plain):
        return None, (
            f"stay with the plain network ({title} {plain.written}): no method that costs at most {AFFORDABLE:g} "
            f"times as much beats it by more than {CLEAR:g} standard errors; the best is {best.label} ({best.written})"
        )
    train, predict, parameters = (best.ratios[name].mean for name in COSTS)
    return best.label, (
        f"{best.label} is worth its cost: {title} {best.written} against {plain.written} of the plain network, for "
        f"{train:.2f} times its training, {predict:.2f} times its forward pass{_passes(best)} and "
        f"{100 * (parameters - 1):.3g} % more parameters"
    )


def _passes(candidate: Candidate) -> str:
    return f" ({candidate.passes.mean:.0f} for an answer)" if candidate.passes else ""


def _others(column: Column, choice: Candidate, ranked: list[Candidate]) -> str:
    """Mention who may be as good as the choice, who is better but dearer, and whose cost nobody measured."""
    parts = []
    near = [c.label for c in ranked if c.affordable and not c.contender.is_reference and _may_equal(c, choice)]
    if near and not choice.contender.is_reference:
        parts.append(f"; {_list(near)} {'is' if len(near) == 1 else 'are'} within one standard error of it")
    dearer = [c for c in ranked if c.cost is not None and not c.affordable and _clearly_better(column, c, choice)]
    if dearer:
        best = dearer[0]
        parts.append(f"; {best.label} is better ({best.written}), at {best.price}")
    unknown = [c.label for c in ranked if c.cost is None]
    if unknown:
        parts.append(f"; the cost of {_list(unknown)} was not measured")
    return "".join(parts)


def _may_equal(one: Candidate, other: Candidate) -> bool:
    gap = abs(one.quality.mean - other.quality.mean)
    return one is not other and 0 < difference_error(one.quality, other.quality) >= gap


def _list(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
