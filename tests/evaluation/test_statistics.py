"""Means and standard errors against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from leanbayes.evaluation.statistics import curve, difference_error, Estimate, estimate, number


@pytest.mark.parametrize("count", [2, 3, 7])
def test_mean_and_standard_error_are_those_of_numpy(count):
    values = np.random.default_rng(count).normal(size=count)
    found = estimate(values.tolist())
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    assert found.sem == pytest.approx(values.std(ddof=1) / np.sqrt(count), abs=1e-12)
    assert found.count == count


def test_one_seed_has_no_standard_error_and_none_has_no_estimate():
    assert estimate([0.5]) == Estimate(0.5, None, 1)
    assert estimate([]) is None
    assert estimate([None, None]) is None


def test_missing_values_do_not_count():
    assert estimate([1.0, None, 3.0]) == Estimate(2.0, 1.0, 2)


def test_a_curve_is_estimated_point_by_point():
    points = curve([{2: 1.0, 1: 0.0}, {1: 1.0, 3: None}])
    assert list(points) == [1, 2]
    assert points[1] == estimate([0.0, 1.0])
    assert points[2] == Estimate(1.0, None, 1)


def test_errors_of_a_difference_add_in_squares():
    assert difference_error(Estimate(0, 3.0, 3), Estimate(1, 4.0, 3)) == 5.0
    assert difference_error(Estimate(0, 3.0, 3), Estimate(1, None, 1)) == 3.0


@pytest.mark.parametrize("value", [None, "0.5", True, math.nan, math.inf, [1], {}])
def test_what_is_no_finite_number_is_none(value):
    assert number(value) is None
