"""Scores of a sweep against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from leanbayes import shift


def row(corruption, severity, accuracy, **others):
    return {"corruption": corruption, "severity": severity, "accuracy": accuracy, "nll": 1.0, "ece": 0.0, **others}


PLAIN = [
    row("clean", 0, 0.9),
    row("fog", 1, 0.8),
    row("fog", 2, 0.6),
    row("snow", 1, 0.7),
    row("snow", 2, 0.5),
]
BETTER = [
    row("clean", 0, 0.95, nll=0.1, ece=0.9, epistemic=0.0),
    row("fog", 1, 0.9, nll=0.5, ece=0.1, epistemic=0.1),
    row("fog", 2, 0.8, nll=0.7, ece=0.2, epistemic=0.3),
    row("snow", 1, 0.7, nll=0.9, ece=0.3, epistemic=0.3),
    row("snow", 2, 0.6, nll=1.1, ece=0.4, epistemic=0.7),
]


def test_corrupted_means_leave_clean_rows_out():
    means = shift.corrupted_means(BETTER)
    assert means == {"accuracy": pytest.approx(0.75), "nll": pytest.approx(0.8), "ece": pytest.approx(0.25)}


def test_the_curve_goes_up_the_severities_from_clean():
    assert shift.severity_curve(BETTER[::-1], "epistemic") == [0, pytest.approx(0.2), pytest.approx(0.5)]
    assert shift.severity_curve(BETTER[1:], "accuracy") == [pytest.approx(0.8), pytest.approx(0.7)]


def test_mce_sums_over_severities_before_it_divides():
    # Fog: (0.1 + 0.2) / (0.2 + 0.4); snow: (0.3 + 0.4) / (0.3 + 0.5).
    assert shift.mean_corruption_error(BETTER, PLAIN) == pytest.approx((0.3 / 0.6 + 0.7 / 0.8) / 2)
    # Less the clean error at both severities: 0.05 each here, 0.1 each for the plain network.
    assert shift.relative_mean_corruption_error(BETTER, PLAIN) == pytest.approx((0.2 / 0.4 + 0.6 / 0.6) / 2)


def test_the_plain_network_is_the_unit():
    assert shift.mean_corruption_error(PLAIN, PLAIN[::-1]) == pytest.approx(1)
    assert shift.relative_mean_corruption_error(PLAIN, PLAIN) == pytest.approx(1)


def test_ratios_to_nothing_are_nan():
    perfect = [row("clean", 0, 1.0), row("fog", 1, 1.0)]
    assert math.isnan(shift.mean_corruption_error(perfect, perfect))
    assert math.isnan(shift.relative_mean_corruption_error(perfect, perfect))


def test_rows_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="same corruptions and severities"):
        shift.mean_corruption_error(BETTER, PLAIN[:-1])
    with pytest.raises(ValueError, match="same corruptions"):
        shift.mean_corruption_error([], [])
    with pytest.raises(ValueError, match=r"one clean row .* got 0"):
        shift.relative_mean_corruption_error(BETTER[1:], PLAIN)
    with pytest.raises(ValueError, match="severity 1 to 5, got none"):
        shift.corrupted_means(BETTER[:1])
