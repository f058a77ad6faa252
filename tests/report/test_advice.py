"""The rule of the advice, on hand-made losses with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from leanbayes.report.advice import about_as_good, cheapest, choose, gains_of, with_mean_reference


def by_seed(*losses):
    return dict(enumerate(losses))


REFERENCE = by_seed(0.50, 0.52, 0.48)

CASES = {
    "one row clearly better": (
        {"plain": REFERENCE, "a": by_seed(0.40, 0.42, 0.38), "b": by_seed(0.50, 0.51, 0.49)},
        "a",
        "a",
    ),
    "nothing clearly better": (
        {"plain": REFERENCE, "a": by_seed(0.45, 0.56, 0.47), "b": by_seed(0.53, 0.47, 0.52)},
        "a",
        None,
    ),
    "the reference is the best": ({"plain": REFERENCE, "a": by_seed(0.60, 0.62, 0.58)}, "plain", None),
    "two clearly better, the better one is taken": (
        {"plain": REFERENCE, "a": by_seed(0.40, 0.42, 0.38), "b": by_seed(0.35, 0.37, 0.33)},
        "b",
        "b",
    ),
    "a tiny gain counts as none, however sure": (
        {"plain": REFERENCE, "a": by_seed(0.498, 0.518, 0.478)},
        "a",
        None,
    ),
    "pairing by seed removes the variation of seeds": (
        {"plain": by_seed(0.3, 0.9, 0.6), "a": by_seed(0.28, 0.88, 0.58)},
        "a",
        "a",
    ),
    "a noisy row makes all errors larger": (
        {"plain": REFERENCE, "a": by_seed(0.48, 0.50, 0.46), "b": by_seed(0.1, 0.9, 0.5)},
        "a",
        None,
    ),
    "one seed recommends nothing": ({"plain": by_seed(0.5), "a": by_seed(0.1)}, "a", None),
    "a row with one seed among rows with several is not recommended": (
        {"plain": REFERENCE, "a": by_seed(0.1), "b": by_seed(0.40, 0.42, 0.38)},
        "a",
        "b",
    ),
    "a row with one seed does not decide which seeds count": (
        {"plain": by_seed(0.52, 0.40, 0.40), "a": by_seed(0.50, 0.60, 0.60), "one": by_seed(0.55)},
        "plain",
        None,
    ),
    "a larger gain with two errors is taken if another one is clear": (
        {
            "plain": REFERENCE,
            "steady": by_seed(0.44, 0.46, 0.42),
            "typical": by_seed(0.500, 0.521, 0.479),
            "larger": by_seed(0.40, 0.46, 0.36),
        },
        "larger",
        "larger",
    ),
    "a larger gain with less than two errors is not": (
        {
            "plain": REFERENCE,
            "steady": by_seed(0.44, 0.46, 0.42),
            "typical": by_seed(0.500, 0.521, 0.479),
            "larger": by_seed(0.30, 0.52, 0.42),
        },
        "larger",
        "steady",
    ),
    "of two similar gains the more certain one is taken": (
        {"plain": REFERENCE, "certain": by_seed(0.40, 0.42, 0.38), "larger": by_seed(0.355, 0.415, 0.415)},
        "larger",
        "certain",
    ),
    "without the reference nothing is recommended": ({"a": REFERENCE, "b": by_seed(0.1, 0.1, 0.1)}, "b", None),
    "seeds that only one row has do not count": (
        {"plain": REFERENCE, "a": {0: 0.40, 1: 0.42, 2: 0.38, 7: 9.0}},
        "a",
        "a",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rule_on_hand_made_tables(name):
    losses, best, recommended = CASES[name]
    choice = choose(losses, "plain", smallest=0.005)
    assert (choice.best, choice.recommended) == (best, recommended)


def test_of_two_rows_the_mean_variance_counts_or_the_larger_own_one():
    losses = {"plain": by_seed(1.0, 2.0, 3.0), "a": by_seed(0.9, 1.7, 2.8), "b": by_seed(1.1, 2.3, 2.9)}
    gains = gains_of(losses, "plain", smallest=0.0)
    a, b = (np.var(each, ddof=1) for each in ([0.1, 0.3, 0.2], [-0.1, -0.3, 0.1]))
    assert gains["a"].mean == pytest.approx(0.2)
    assert gains["a"].error == pytest.approx(math.sqrt((a + b) / 2 / 3))
    assert gains["b"].error == pytest.approx(math.sqrt(b / 3))
    assert gains["a"].threshold == pytest.approx(stats.t.ppf(1 - 0.05 / 2, 4) * gains["a"].error)


def test_the_variance_is_that_of_the_median_row_and_a_noisy_row_is_tested_by_its_own():
    """Three rows gain 0.1 with a standard deviation of 0.01, 0.02 and 0.5."""
    steps = np.array([-1.0, 0.0, 1.0])
    gains_by_row = {"calm": 0.1 + 0.01 * steps, "usual": 0.1 + 0.02 * steps, "noisy": 0.1 + 0.5 * steps}
    losses = {"plain": by_seed(1.0, 1.0, 1.0)} | {row: by_seed(*(1 - gain)) for row, gain in gains_by_row.items()}
    gains = gains_of(losses, "plain", smallest=0.0)
    typical = 0.02**2 / (stats.chi2.ppf(0.5, 2) / 2)
    for row in ("calm", "usual"):
        assert gains[row].error == pytest.approx(math.sqrt(typical / 3))
        assert gains[row].threshold == pytest.approx(stats.t.ppf(1 - 0.05 / 3, 6) * gains[row].error)
        assert gains[row].clear
    assert gains["noisy"].error == pytest.approx(0.5 / math.sqrt(3))
    assert gains["noisy"].threshold == pytest.approx(stats.t.ppf(1 - 0.05 / 3, 2) * gains["noisy"].error)


def test_a_noisy_row_hides_no_gain_and_is_not_recommended_by_chance():
    """Ten rows equal the reference, and two more have ten times its noise; then one of the ten gains three sigma."""
    draw = np.random.default_rng(0).normal
    found = {0.0: 0, 0.3: 0}
    for gain in found:
        for _ in range(400):
            losses = {"plain": by_seed(*draw(5.0, 0.1, 3)), "a": by_seed(*draw(5.0 - gain, 0.1, 3))}
            losses |= {f"b{row}": by_seed(*draw(5.0, 0.1, 3)) for row in range(9)}
            losses |= {f"c{row}": by_seed(*draw(5.0, 1.0, 3)) for row in range(2)}
            found[gain] += choose(losses, "plain", smallest=0.0).recommended is not None
    assert found[0.0] / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert found[0.3] / 400 >= 0.4  # with one variance for all rows it was 0.03


def test_rows_that_are_equal_to_the_reference_are_rarely_recommended():
    """Null case: twelve equal rows, three seeds; some row is recommended in about 5 % of the comparisons or fewer."""
    import random

    random.seed(0)
    recommended = 0
    for _ in range(400):
        losses = {
            name: by_seed(*(random.gauss(0.5, 0.02) for _ in range(3))) for name in ("plain", *map(str, range(6)))
        }
        recommended += choose(losses, "plain", smallest=0.005).recommended is not None
    # The reference is common to all gains, so that they are correlated: the level of single tests is an upper bound.
    assert recommended / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_with_one_seed_the_error_is_that_of_the_test_rows():
    losses = {"plain": by_seed(0.5), "a": by_seed(0.3), "b": by_seed(0.49)}
    choice = choose(losses, "plain", smallest=0.005, row_errors={"a": 0.01, "b": 0.01})
    assert choice.single
    assert choice.recommended is None
    assert choice.gains["a"].clear
    assert not choice.gains["b"].clear


def test_only_eligible_rows_are_recommended():
    losses = {"plain": REFERENCE, "a": by_seed(0.40, 0.42, 0.38), "b": by_seed(0.35, 0.37, 0.33)}
    assert choose(losses, "plain", 0.005, eligible=["plain", "a"]).recommended == "a"


def test_the_cheapest_row_that_is_about_as_good_as_the_best():
    """The noisy row is not clearly worse, as its own error is large, but too much worse."""
    losses = {
        "best": by_seed(0.30, 0.31, 0.32),
        "near": by_seed(0.305, 0.312, 0.321),
        "worse": by_seed(0.50, 0.51, 0.52),
        "noisy": by_seed(0.30, 0.61, 0.92),
    }
    assert not gains_of(losses, "noisy", smallest=0.003)["best"].clear
    good = about_as_good(losses, "best", smallest=0.003)
    assert good == ["best", "near"]
    assert cheapest({"best": 16.0, "near": 4.0, "worse": 1.0}, good) == "near"
    assert cheapest({"worse": 1.0}, good) is None


def test_a_larger_gain_is_not_clear_by_itself_in_the_hand_made_table():
    losses = CASES["a larger gain with two errors is taken if another one is clear"][0]
    found = choose(losses, "plain", smallest=0.005).gains
    assert found["steady"].clear
    assert not found["larger"].clear
    assert found["larger"].mean > 2 * found["larger"].error


def test_rows_that_are_not_eligible_neither_win_nor_make_another_win():
    losses = CASES["a larger gain with two errors is taken if another one is clear"][0]
    assert choose(losses, "plain", 0.005, eligible=["larger", "typical"]).recommended is None


def test_seeds_needed_are_the_fewest_that_show_a_gain_of_this_size_in_four_of_five_comparisons():
    losses = {"plain": by_seed(0.50, 0.52, 0.48), "a": by_seed(0.45, 0.49, 0.47), "b": by_seed(0.51, 0.53, 0.47)}
    choice = choose(losses, "plain", smallest=0.005)
    assert choice.recommended is None
    assert choice.seeds_needed is not None
    assert choice.promising == "a"
    gain = choice.gains["a"]

    def threshold(seeds):  # two rows, so two degrees of freedom for each seed but the first
        error = gain.error * math.sqrt(3 / seeds)
        return float(stats.t.ppf(1 - 0.05 / 2, 2 * (seeds - 1)) + stats.norm.ppf(0.8)) * error

    assert threshold(choice.seeds_needed) <= gain.mean < threshold(choice.seeds_needed - 1)


def test_no_seeds_are_proposed_for_nothing():
    better = {"plain": REFERENCE, "a": by_seed(0.40, 0.42, 0.38), "b": by_seed(0.50, 0.51, 0.49)}
    assert choose(better, "plain", 0.005).seeds_needed is None  # decided
    worse = {"plain": REFERENCE, "a": by_seed(0.60, 0.62, 0.58)}
    assert choose(worse, "plain", 0.005).seeds_needed is None  # nothing to gain
    noise = {"plain": REFERENCE, "a": by_seed(0.30, 0.70, 0.48)}
    assert choose(noise, "plain", 0.005).seeds_needed is None  # a hundred seeds would not show it
    assert choose({"plain": by_seed(0.5), "a": by_seed(0.1)}, "plain", 0.005).seeds_needed is None  # one seed


def test_more_seeds_are_proposed_for_a_row_that_has_several():
    """An ensemble of the seeds' networks has one figure, and is the best."""
    losses = {"plain": by_seed(0.50, 0.52, 0.48), "a": by_seed(0.45, 0.49, 0.47), "b": by_seed(0.51, 0.53, 0.47)}
    choice = choose(losses | {"ensemble": {0: 0.3}}, "plain", smallest=0.005)
    assert (choice.best, choice.promising) == ("ensemble", "a")
    assert choice.seeds_needed is not None


def test_the_gain_over_the_mean_of_all_plain_networks_of_a_seed():
    """The plain network is lucky in one seed and unlucky in another; the ensemble moves with all three networks."""
    networks = {0: (0.50, 0.54, 0.52), 1: (0.60, 0.44, 0.46), 2: (0.40, 0.50, 0.48)}
    losses = {
        "plain": {seed: each[0] for seed, each in networks.items()},
        "ensemble": {seed: sum(each) / 3 - 0.03 for seed, each in networks.items()},
        "late": {seed: each[0] - 0.001 * seed for seed, each in networks.items()},
    }
    paired = with_mean_reference(losses, "plain", networks, {"ensemble"})
    gains = gains_of(paired, "plain", smallest=0.005)
    assert gains["ensemble"].mean == pytest.approx(0.03)
    assert gains["late"].mean == pytest.approx(0.001)
    assert choose(losses, "plain", 0.005).recommended is None
    assert choose(paired, "plain", 0.005).recommended == "ensemble"
    assert paired["plain"] == losses["plain"]
    assert paired["late"] == losses["late"]


NOISY = {"a": by_seed(0.55, 0.46, 0.52), "b": by_seed(0.46, 0.58, 0.43), "c": by_seed(0.53, 0.45, 0.55)}


def test_a_mixture_of_plain_networks_is_tested_by_its_own_variance():
    """Noisy rows hide a gain that is certain: the errors are 0.005, 0.006 and 0.005."""
    losses = {"plain": REFERENCE, "mixture": by_seed(0.465, 0.480, 0.445)} | NOISY
    assert choose(losses, "plain", 0.005).recommended is None
    found = choose(losses, "plain", 0.005, mixtures={"mixture"})
    assert found.recommended == "mixture"
    gain = found.gains["mixture"]
    assert gain.error == pytest.approx(np.std([0.035, 0.040, 0.035], ddof=1) / math.sqrt(3))
    assert gain.threshold == pytest.approx(max(0.005, stats.t.ppf(0.95, 2) * gain.error))
    others = choose(losses, "plain", 0.005).gains
    assert all(found.gains[label] == others[label] for label in NOISY)


@pytest.mark.parametrize("mixture", [by_seed(0.497, 0.517, 0.477), by_seed(0.45, 0.525, 0.475)])
def test_a_mixture_with_a_tiny_or_an_uncertain_gain_is_not_recommended(mixture):
    losses = {"plain": REFERENCE, "mixture": mixture} | NOISY
    assert choose(losses, "plain", 0.005, mixtures={"mixture"}).recommended is None


def test_a_mixture_without_a_gain_is_called_better_in_one_of_twenty_comparisons():
    source, seeds, count = np.random.default_rng(0), 3, 4000
    clear = 0
    for gains in source.normal(size=(count, seeds)):
        losses = {"plain": by_seed(*[0.0] * seeds), "mixture": by_seed(*-gains)} | NOISY
        clear += choose(losses, "plain", 0.0, mixtures={"mixture"}).gains["mixture"].clear
    assert abs(clear / count - 0.05) < 3 * (0.05 * 0.95 / count) ** 0.5


def test_seeds_of_a_mixture_are_proposed_by_its_own_test():
    losses = {"plain": by_seed(0.50, 0.50, 0.50), "mixture": by_seed(0.45, 0.50, 0.46)} | NOISY
    choice = choose(losses, "plain", 0.005, mixtures={"mixture"})
    assert choice.promising == "mixture"
    assert choice.seeds_needed is not None
    gain = choice.gains["mixture"]

    def threshold(seeds):
        return (stats.t.ppf(0.95, seeds - 1) + stats.norm.ppf(0.8)) * gain.error * math.sqrt(3 / seeds)

    assert threshold(choice.seeds_needed) <= gain.mean < threshold(choice.seeds_needed - 1)


def test_a_mixture_has_at_most_the_mean_log_loss_of_its_members():
    """Jensen's inequality, at every row, for classes and for Gaussian densities."""
    source = np.random.default_rng(0)
    p = source.dirichlet(np.ones(4), size=(5, 1000))[..., 0]
    assert (-np.log(p.mean(0)) <= -np.log(p).mean(0)).all()
    densities = stats.norm.pdf(source.normal(size=1000), source.normal(size=(5, 1)), source.uniform(0.5, 2, (5, 1)))
    assert (-np.log(densities.mean(0)) <= -np.log(densities).mean(0)).all()


@pytest.mark.parametrize(("late", "own", "most"), [(0, 8, 0.05), (4, 4, None)])
def test_the_mean_of_all_plain_networks_finds_an_ensemble_and_raises_no_false_alarms(late, own, most):
    """Some rows continue the plain training, correlation 0.95, others do not; an ensemble gains 1.5 sigma.

    Rows of both kinds have different noise. That raises false alarms with one reference, too, so both are compared.
    """
    draw, count = np.random.default_rng(0).normal, 300
    chance, found = dict.fromkeys(("plain row", "all networks"), 0), dict.fromkeys(("plain row", "all networks"), 0)
    for _ in range(count):
        plain = draw(5.0, 0.1, (4, 3))
        continued = 5.0 + 0.95 * (plain[0] - 5.0) + math.sqrt(1 - 0.95**2) * draw(0.0, 0.1, (late, 3))
        rows = {f"late{row}": by_seed(*losses) for row, losses in enumerate(continued)}
        rows |= {f"own{row}": by_seed(*losses) for row, losses in enumerate(draw(5.0, 0.1, (own, 3)))}
        rows |= {"plain": by_seed(*plain[0])}
        alone, networks = {f"own{row}" for row in range(own)}, dict(enumerate(plain.T.tolist()))
        ensemble = {"ensemble": by_seed(*(plain.mean(0) + draw(-0.15, 0.02, 3)))}
        for name, pair in (
            ("plain row", lambda losses: losses),
            ("all networks", lambda losses: with_mean_reference(losses, "plain", networks, alone | {"ensemble"})),  # noqa: B023
        ):
            chance[name] += choose(pair(rows), "plain", 0.0).recommended is not None
            found[name] += choose(pair(rows | ensemble), "plain", 0.0).recommended == "ensemble"
    before, after = (chance[name] / count for name in ("plain row", "all networks"))
    level = before if most is None else most
    assert after <= level + 3 * math.sqrt(level * (1 - level) / count)
    power_before, power_after = (found[name] / count for name in ("plain row", "all networks"))
    assert power_after - power_before > 3 * math.sqrt(0.5 / count)
