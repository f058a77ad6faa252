"""Which row of a comparison to take for a need: the statistical rule, on losses by seed alone.

A loss is lower for a better row: NLL, or minus the AUROC. The reference is the plain network with a temperature. With
the losses l_ms of row m and p_s of the reference for seed s, and P_s the mean loss of all plain networks of that seed
(the reference, and the members of a deep ensemble, each with its own temperature), the gain is

    g_ms = p_s - l_ms    for a row that continues the training of the plain network,
    g_ms = P_s - l_ms    for any other row.

Both have the same mean over seeds. The first row shares the luck of its plain network, which cancels. Any other row
has luck of its own, and that of one plain network would only be added. Over n seeds

    mean gain g_m = mean_s g_ms,      error e_m = sqrt(V_m / n),      V_m = max(V, s_m^2),

where s_m^2 is the variance of row m over the seeds and V that of a typical row: the median of s_m^2, divided by the
median of chi^2_(n-1) / (n - 1), so that it is right on average for normal gains. One noisy row does not hide the gains
of the others. A gain is clear if it is above t e_m and at least the smallest gain that counts. t is the quantile
1 - 0.05 / M of Student's distribution for M rows, with the degrees of freedom of all rows. A row with s_m^2 > 3 V is
unlike the others, and has its own n - 1.

A mixture of these plain networks is one planned comparison for a log loss: by Jensen's inequality it loses at most the
mean of its members at every row, so a gain is expected before any data. (Members have temperatures of their own, the
mixture has none, so the inequality is only nearly true of the figures.) Its gain is clear from t e_m on with its own
variance, and t the quantile 0.95 with n - 1 degrees of freedom.

If some row has a clear gain, one of the rows with gains of at least 2 e_m is recommended, by the largest g_m - e_m: the
clear row says that there is something to gain, the means say where, and of two similar means the more certain one
counts. With one seed, the error is that of the mean over test rows, and nothing is recommended: another training may
turn out differently.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import chi2  # type: ignore[import-untyped]
from scipy.stats import t as student

LEVEL = 0.05
"""Probability that some row is called clearly better if none is."""

UNLIKE = 3.0
"""A row with more than this multiple of the typical variance is tested by its own. One in twenty normal rows has it
with three seeds; simulations with rows of different noise are in docs/results/rule.md."""

STEADY = 2.0
"""Standard errors that a gain needs to be recommended next to a clear one."""

MOST_SEEDS, POWER = 12, 0.8
"""More seeds than these are not proposed; the probability that those proposed show a true gain of the size measured."""

Losses = Mapping[str, Mapping[int, float]]
"""Loss by row and seed."""


@dataclass(frozen=True)
class Gain:
    """The mean gain of a row over the reference.

    Attributes:
        mean: positive if the row is better.
        error: its standard error; None if unknown.
        threshold: the least gain that is clear.
        seeds: number of seeds that both have.
        freedom: degrees of freedom of the error.
        level: of the test, a share of LEVEL for each of several rows.
    """

    mean: float
    error: float | None
    threshold: float
    seeds: int
    freedom: float = math.inf
    level: float = LEVEL

    @property
    def clear(self) -> bool:
        return self.error is not None and self.mean >= self.threshold

    @property
    def least(self) -> float:
        """The gain less one standard error."""
        return self.mean - (self.error or 0.0)

    def steady(self, smallest: float) -> bool:
        """Return whether the gain counts and has two standard errors, without regard to the number of rows."""
        return self.error is not None and self.mean >= max(smallest, STEADY * self.error)


@dataclass(frozen=True)
class Choice:
    """The advice for one need.

    Attributes:
        best: the row with the lowest mean loss; None if no row was measured.
        recommended: the row to take, if one with several seeds is clearly better than the reference; None if none is.
        gains: the gain of every other row over the reference.
        single: whether there is only one seed.
        promising: the row with several seeds and the largest gain, where nothing is recommended.
        seeds_needed: the number of seeds with which its gain would be clear in four comparisons of five, if it
            and its variance are true; None if something is recommended, the gain is too small to count, or more than
            MOST_SEEDS are needed.
    """

    best: str | None
    recommended: str | None
    gains: dict[str, Gain]
    single: bool
    promising: str | None = None
    seeds_needed: int | None = None


def choose(
    losses: Losses,
    reference: str,
    smallest: float,
    *,
    row_errors: Mapping[str, float] | None = None,
    eligible: Sequence[str] | None = None,
    mixtures: Collection[str] = (),
) -> Choice:
    """Return the best row, and the row to recommend instead of the reference.

    Args:
        losses: loss by row and seed.
        reference: the row that gains are measured against.
        smallest: the smallest gain that counts.
        row_errors: standard errors over test rows of the differences to the reference, for one seed.
        eligible: rows that may be recommended; default all.
        mixtures: rows that mix plain networks, if the loss is a log loss.
    """
    measured = {label: by_seed for label, by_seed in losses.items() if by_seed}
    best = best_of(measured)
    gains = gains_of(measured, reference, smallest, row_errors or {}, mixtures)
    single = max((len(by_seed) for by_seed in measured.values()), default=0) < 2
    allowed = set(measured if eligible is None else eligible)
    several = {label: gain for label, gain in gains.items() if gain.seeds > 1 and label in allowed}
    if single or not any(gain.clear for gain in several.values()):
        largest = None if single else max(several, key=lambda label: several[label].mean, default=None)
        needed = None if largest is None else _seeds_needed(several[largest], smallest)
        return Choice(best, None, gains, single, largest, needed)
    steady = [label for label, gain in several.items() if gain.clear or gain.steady(smallest)]
    return Choice(best, max(steady, key=lambda label: gains[label].least), gains, single)


def _seeds_needed(gain: Gain, smallest: float) -> int | None:
    """Return the least n with gain >= (t_n + z) sqrt(V / n), z the normal quantile of POWER; None above MOST_SEEDS."""
    if gain.error is None or gain.mean < smallest:
        return None
    deviation, by_seed = gain.error * math.sqrt(gain.seeds), gain.freedom / (gain.seeds - 1)
    spare = statistics.NormalDist().inv_cdf(POWER)
    for seeds in range(gain.seeds + 1, MOST_SEEDS + 1):
        quantile = float(student.ppf(1 - gain.level, by_seed * (seeds - 1)))
        if gain.mean >= (quantile + spare) * deviation / math.sqrt(seeds):
            return seeds
    return None


def with_mean_reference(
    losses: Losses, reference: str, networks: Mapping[int, Sequence[float]], rows: Collection[str]
) -> dict[str, dict[int, float]]:
    """Return losses l_ms + p_s - P_s of the named rows: their gains p_s - (l_ms + p_s - P_s) are P_s - l_ms.

    Args:
        losses: loss by row and seed.
        reference: the row with the losses p_s.
        networks: losses of all plain networks by seed, whose mean is P_s; a seed without them keeps its loss.
        rows: the rows whose reference is P_s. Others stay unchanged.
    """
    luck = {seed: losses[reference][seed] - statistics.fmean(each) for seed, each in networks.items()}
    return {
        label: {seed: loss + (luck.get(seed, 0.0) if label in rows else 0.0) for seed, loss in by_seed.items()}
        for label, by_seed in losses.items()
    }


def best_of(losses: Losses) -> str | None:
    """Return the row with the lowest mean loss over the seeds that all rows with several seeds share."""
    several = [set(by_seed) for by_seed in losses.values() if len(by_seed) > 1]
    common = set.intersection(*several) if several else set()
    means = {}
    for label, by_seed in losses.items():
        shared = [loss for seed, loss in by_seed.items() if seed in common]
        means[label] = statistics.fmean(shared or by_seed.values())
    return min(means, key=lambda label: means[label], default=None)


def gains_of(
    losses: Losses,
    reference: str,
    smallest: float,
    row_errors: Mapping[str, float] | None = None,
    mixtures: Collection[str] = (),
) -> dict[str, Gain]:
    """Return the gain of every row over the reference; none if the reference was not measured."""
    there = losses.get(reference, {})
    paired = {
        label: [there[seed] - by_seed[seed] for seed in sorted(there.keys() & by_seed.keys())]
        for label, by_seed in losses.items()
        if label != reference
    }
    paired = {label: found for label, found in paired.items() if found}
    own = {label: statistics.variance(found) for label, found in paired.items() if len(found) > 1}
    freedom = sum(len(paired[label]) - 1 for label in own)
    typical = _typical([(own[label], len(paired[label]) - 1) for label in own])
    gains = {}
    for label, found in paired.items():
        error, free, level = (row_errors or {}).get(label), math.inf, LEVEL / len(paired)
        if label in mixtures and label in own:
            error, free, level = math.sqrt(own[label] / len(found)), len(found) - 1, LEVEL
        elif typical is not None:
            variance = own.get(label, 0.0)
            error = math.sqrt(max(typical, variance) / len(found))
            free = len(found) - 1 if variance > UNLIKE * typical else freedom
        quantile = float(student.ppf(1 - level, free))
        threshold = max(smallest, quantile * (error or 0.0))
        gains[label] = Gain(statistics.fmean(found), error, threshold, len(found), free, level)
    return gains


def _typical(variances: Sequence[tuple[float, int]]) -> float | None:
    """Return the variance of a typical row from those of all rows with their degrees of freedom; None without any.

    Two rows have no median that one of them could not move: their mean counts.
    """
    if len(variances) < 3:
        return statistics.fmean(variance for variance, _ in variances) if variances else None
    return statistics.median(variance * free / float(chi2.ppf(0.5, free)) for variance, free in variances)


def about_as_good(
    losses: Losses, best: str, smallest: float, row_errors: Mapping[str, float] | None = None
) -> list[str]:
    """Return the best row, and those at most one standard error, or the smallest gain that counts, worse than it.

    A row that is not clearly worse may be much worse, if it is noisy: one standard error does not let it through.
    """
    behind = gains_of(losses, best, smallest, row_errors)  # gains over the best row are losses of quality
    near = [label for label, gain in behind.items() if -gain.mean <= max(smallest, gain.error or 0.0)]
    return [best, *near]


def cheapest(prices: Mapping[str, float], candidates: Sequence[str]) -> str | None:
    """Return the candidate with the lowest price; None if no price is known."""
    known = [label for label in candidates if label in prices]
    return min(known, key=lambda label: prices[label], default=None)
