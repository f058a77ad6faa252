"""Schedules against their closed forms."""

from __future__ import annotations

import math

import pytest

from leanbayes.training import recipe as schedule

from .problems import short


def test_cosine_goes_from_one_to_zero_after_the_warm_up():
    recipe = short(epochs=11, schedule="cosine", warmup_epochs=1)
    assert [schedule.rate(recipe, t) for t in (0, 0.25, 1)] == [0, 0.25, 1]
    assert schedule.rate(recipe, 6) == pytest.approx(0.5)
    assert schedule.rate(recipe, 3.5) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert schedule.rate(recipe, 11) == pytest.approx(0, abs=1e-12)


def test_steps_go_down_at_the_milestones():
    recipe = short(epochs=10, schedule="step", milestones=(2, 5), decay=0.1)
    assert [schedule.rate(recipe, t) for t in (0, 1.99, 2, 4.5, 5, 9.9)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert short(epochs=200, schedule="step").steps_down == (60, 120, 160)


def test_linear_is_the_implicit_paper_s():
    recipe = short(epochs=100, schedule="linear")
    wanted = {0: 1, 50: 1, 60: 1 - 0.99 / 4, 70: 1 - 0.99 / 2, 90: 0.01, 99: 0.01}
    assert [schedule.rate(recipe, t) for t in wanted] == pytest.approx(list(wanted.values()))


def test_straight_goes_down_to_zero_in_a_line():
    recipe = short(epochs=11, schedule="straight", warmup_epochs=1)
    assert [schedule.rate(recipe, t) for t in (0.5, 1, 6, 11)] == pytest.approx([0.5, 1, 0.5, 0])


def test_constant_stays_and_a_posterior_may_stay_while_weights_go_down():
    assert {schedule.rate(short(schedule="constant"), t) for t in (0, 1.5, 2.9)} == {1}
    recipe = short(epochs=10, posterior_schedule="constant", warmup_epochs=2)
    assert [schedule.posterior_rate(recipe, t) for t in (0, 5, 9)] == [1, 1, 1]
    assert schedule.posterior_rate(short(epochs=10), 5) == schedule.rate(short(epochs=10), 5) == pytest.approx(0.5)


def test_annealing_counts_from_the_conversion():
    recipe = short(epochs=10, beta=0.5, anneal_epochs=4, convert_at_epoch=3)
    assert [schedule.beta(recipe, t) for t in (0, 2.9, 3, 4, 5.5, 7, 9)] == [0, 0, 0, 0.125, 0.3125, 0.5, 0.5]
    assert schedule.beta(short(), 0) == 1


def test_the_last_epochs_are_tiled():
    recipe = short(epochs=5, tile_last_epochs=2)
    assert [schedule.tile(recipe, epoch) for epoch in range(5)] == [False, False, False, True, True]
    assert schedule.tile(short(tile=True), 0)


def test_weights_and_posterior_rest_in_turn_after_the_conversion():
    recipe = short(epochs=10, convert_at_epoch=2, alternate_epochs=2)
    found = [schedule.fixed_part(recipe, t) for t in (0, 1.9, 2, 3.9, 4, 5.5, 6)]
    assert found == [None, None, "posterior", "posterior", "weights", "weights", "posterior"]
    assert schedule.fixed_part(short(epochs=10), 5) is None
