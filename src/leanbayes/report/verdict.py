"""The verdict: which method is worth its cost, by a stated rule."""

from __future__ import annotations

from dataclasses import dataclass

from leanbayes.evaluation.statistics import difference_error, Estimate
from leanbayes.report.columns import Column, Key, test_columns
from leanbayes.report.load import Contender, Group
from leanbayes.report.table import decimals_of, estimates_of

CLEAR = 2.0  # standard errors of the difference
HEADLINE: dict[str, Key] = {"classification": ("test", "nll"), "regression": ("test", "lpd")}
LIMITS = {  # the largest acceptable costs
    "training_ratio": 2.0,  # trainings of the plain network
    "answer_passes": 20.0,  # passes of the plain network: 16 draws, the default, and a quarter more
    "parameter_ratio": 2.0,  # plain networks
}
RULE = (
    f"Rule: a method stays within the limits if its training costs at most {LIMITS['training_ratio']:g} trainings of "
    f"the plain network, one answer at most {LIMITS['answer_passes']:g} of its passes (draws or members times the "
    f"cost of a pass), and if it has at most {LIMITS['parameter_ratio']:g} times its parameters. Of the methods within "
    "the limits, the one with the best mean log-likelihood on the test set (NLL, or LPD for real targets) is "
    f"recommended if it beats the plain network by more than {CLEAR:g} standard errors of the difference. The best row "
    "is always named."
)


@dataclass(frozen=True)
class Candidate:
    """A contender with its quality and costs.

    Attributes:
        contender: the contender.
        quality: the deciding figure.
        written: the same as text.
        costs: the measured costs, by the names of LIMITS.
    """

    contender: Contender
    quality: Estimate
    written: str
    costs: dict[str, Estimate]

    @property
    def label(self) -> str:
        return self.contender.label

    @property
    def excess(self) -> float | None:
        """The largest cost relative to its limit; None unless all were measured."""
        if len(self.costs) < len(LIMITS):
            return None
        return max(cost.mean / LIMITS[name] for name, cost in self.costs.items())

    @property
    def affordable(self) -> bool:
        return self.excess is not None and self.excess <= 1

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
class Verdict:
    """The sentences, and the label of the recommended contender, if any."""

    sentence: str
    choice: str | None = None


def headline(task: str) -> Column:
    """Return the deciding figure: NLL for classes, log predictive density for real targets."""
    key = HEADLINE.get(task, HEADLINE["classification"])
    return next(column for column in test_columns(task) if column.key == key)


def verdict(group: Group) -> Verdict:
    """Return which method of a group is worth its cost, by RULE, and which row is the best."""
    column = headline(group.task)
    ranked = candidates(group)
    plain = next((c for c in ranked if c.contender.is_reference), None)
    rivals = [c for c in ranked if c.affordable and not c.contender.is_reference]
    choice = None
    if not ranked:
        reason = f"no run came to its end with a test {column.title}"
    elif plain is None:
        reason = "the plain network did not run, so no gain can be weighed against a cost"
    elif not rivals:
        reason = _without_rivals(group, plain, ranked)
    else:
        choice, reason = _weigh(column, plain, rivals[0])
        reason += _near(rivals, choice)
    first = f"On {group.data} with {group.network}, {reason}{_unmeasured(ranked)}."
    return Verdict(f"{first}{_best(column, ranked, choice)}", choice.label if choice else None)


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
        if contender.is_reference:
            costs = dict.fromkeys(LIMITS, Estimate(1.0, None, 1))
        ranked.append(Candidate(contender, found[column.key], f"{mean} ± {sem}" if sem else mean, costs))
    return sorted(ranked, key=lambda c: column.sign * c.quality.mean, reverse=True)


def _without_rivals(group: Group, plain: Candidate, ranked: list[Candidate]) -> str:
    """Return why no method is within the limits: there is none, or its cost is unknown or too high."""
    title = headline(group.task).title
    if len(group.contenders) == 1 and not group.failures:
        return f"only the plain network was run ({title} {plain.written}): there is no method to weigh against it"
    if len(ranked) == 1:
        return f"only the plain network came to its end with a test {title} ({plain.written})"
    known = [(c.excess, c) for c in ranked if c.excess is not None and not c.contender.is_reference]
    if not known:
        return f"no method can be weighed against the plain network ({title} {plain.written})"
    _, nearest = min(known, key=lambda pair: pair[0])
    return (
        f"no method stays within the limits, so stay with the plain network ({title} {plain.written}); the nearest to "
        f"them is {nearest.label} ({nearest.written}), at {nearest.price}"
    )


def _weigh(column: Column, plain: Candidate, best: Candidate) -> tuple[Candidate | None, str]:
    """Return the recommended contender, if any, and the reason."""
    title = column.title
    gain = column.sign * (best.quality.mean - plain.quality.mean)
    if best.quality.sem is None or plain.quality.sem is None:
        order = "better than" if gain > 0 else "worse than"
        return None, (
            f"one seed is too few to decide: of the methods within the limits {best.label} is the best ({title} "
            f"{best.written}), {order} the plain network ({plain.written}), but chance may have done it; run more seeds"
        )
    if gain <= CLEAR * difference_error(best.quality, plain.quality):
        return None, (
            f"stay with the plain network ({title} {plain.written}): no method within the limits beats it by more than "
            f"{CLEAR:g} standard errors; the best of them is {best.label} ({best.written})"
        )
    return best, (
        f"{best.label} is worth its cost: {title} {best.written} against {plain.written} of the plain network, for "
        f"{best.price}"
    )


def _near(rivals: list[Candidate], choice: Candidate | None) -> str:
    near = [c.label for c in rivals if choice and _may_equal(c, choice)]
    return f"; {_list(near)} {'is' if len(near) == 1 else 'are'} within one standard error of it" if near else ""


def _unmeasured(ranked: list[Candidate]) -> str:
    unknown = [c.label for c in ranked if c.excess is None]
    return f"; the cost of {_list(unknown)} was not measured" if unknown else ""


def _best(column: Column, ranked: list[Candidate], choice: Candidate | None) -> str:
    """Return the best row with its cost, unless it is recommended or the only one."""
    if not ranked or ranked[0] is choice or (len(ranked) == 1 and ranked[0].contender.is_reference):
        return ""
    best = ranked[0]
    if best.contender.is_reference:
        return f" The plain network itself has the best {column.title} ({best.written})."
    beyond = ", beyond the limits" if best.excess is not None and not best.affordable else ""
    return f" {best.label} has the best {column.title} of all ({best.written}), at {best.price}{beyond}."


def _may_equal(one: Candidate, other: Candidate) -> bool:
    gap = abs(one.quality.mean - other.quality.mean)
    return one is not other and 0 < difference_error(one.quality, other.quality) >= gap


def _list(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
