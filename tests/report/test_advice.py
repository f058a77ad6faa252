"""The rule of the advice, on hand-made losses with known answers."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from leanbayes.report.advice import cheapest, choose, gains_of, not_clearly_worse


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


def test_the_threshold_is_students_quantile_times_the_pooled_error():
    losses = {"plain": by_seed(1.0, 2.0, 3.0), "a": by_seed(0.9, 1.7, 2.8), "b": by_seed(1.1, 2.3, 2.9)}
    gains = gains_of(losses, "plain", smallest=0.0)
    a, b = [0.1, 0.3, 0.2], [-0.1, -0.3, 0.1]
    squares = sum(sum((x - sum(d) / 3) ** 2 for x in d) for d in (a, b))
    error = math.sqrt(squares / 4 / 3)
    assert gains["a"].mean == pytest.approx(0.2)
    assert gains["a"].error == pytest.approx(error)
    assert gains["b"].error == pytest.approx(error)
    assert gains["a"].threshold == pytest.approx(stats.t.ppf(1 - 0.05 / 2, 4) * error)


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


def test_the_cheapest_row_that_is_not_clearly_worse_than_the_best():
    losses = {
        "best": by_seed(0.30, 0.31, 0.32),
        "near": by_seed(0.305, 0.312, 0.321),
        "worse": by_seed(0.50, 0.51, 0.52),
    }
    good = not_clearly_worse(losses, "best", smallest=0.003)
    assert good == ["best", "near"]
    assert cheapest({"best": 16.0, "near": 4.0, "worse": 1.0}, good) == "near"
    assert cheapest({"worse": 1.0}, good) is None
