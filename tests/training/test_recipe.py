"""Fields that a recipe refuses, and its schedules against their closed forms."""

from __future__ import annotations

import json
import math

import pytest

from leanbayes.training import Recipe
from leanbayes.training import recipe as schedule

from .problems import short


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"epochs": 0}, "expected epochs to be a whole number of at least 1, got 0"),
        ({"batch_size": 1.5}, "expected batch_size to be a whole number of at least 1, got 1.5"),
        ({"seed": -1}, "expected seed to be a whole number of at least 0, got -1"),
        ({"devices": True}, "expected devices to be a whole number of at least 1, got True"),
        ({"optimizer": "lion"}, "expected optimizer to be one of sgd, adam, got 'lion'"),
        ({"optimizer": "adam"}, "expected lr to be below 0.1 for adam, got 0.1; 1e-3 is usual"),
        ({"schedule": "exp"}, "expected schedule to be one of cosine, step, linear, straight, constant, got 'exp'"),
        ({"posterior_schedule": "x"}, "expected posterior_schedule to be one of same, constant, got 'x'"),
        ({"aggregate": "sum"}, "expected aggregate to be one of average, mixture, got 'sum'"),
        ({"aggregate": "mixture"}, "expected aggregate='mixture' to have draws to mix: set tile, tile_last_epochs or"),
        ({"deal": "all"}, "expected deal to be one of rows, draws, got 'all'"),
        ({"deal": "draws"}, "expected deal='draws' to have several draws of a row to deal: set samples"),
        ({"augment": "mixup"}, "expected augment to be one of none, flip, crop, crop_flip, got 'mixup'"),
        ({"precision": "16"}, "expected precision to be one of 32-true, bf16-mixed, got '16'"),
        ({"lr": float("nan")}, "expected lr to be a positive number, got nan"),
        ({"posterior_lr": 0}, "expected posterior_lr to be a positive number, got 0"),
        ({"clip_norm": -1}, "expected clip_norm to be a positive number, got -1"),
        ({"weight_decay": -1}, "expected weight_decay to be a number of at least zero, got -1"),
        ({"momentum": 1.0}, "expected momentum to be at least 0 and below 1, got 1.0"),
        ({"decay": 0}, "expected decay to be above 0 and at most 1, got 0"),
        ({"epochs": 5, "convert_at_epoch": 5}, "expected convert_at_epoch to be below the 5 epochs, got 5"),
        ({"epochs": 5, "warmup_epochs": 6}, "expected warmup_epochs to be below the 5 epochs, got 6"),
        ({"epochs": 5, "tile_last_epochs": 6}, "expected tile_last_epochs to be at most the 5 epochs, got 6"),
        ({"restart_at_conversion": -1}, "expected restart_at_conversion to be a number of at least zero, got -1"),
        ({"milestones": (4, 2)}, r"expected milestones to be rising epochs, got \(4, 2\)"),
        ({"milestones": 5}, "expected milestones to be rising epochs, got 5"),
        ({"milestones": "36"}, "expected milestones to be rising epochs, got '36'"),
        ({"milestones": (3, "6")}, r"expected milestones to be rising epochs, got \(3, '6'\)"),
        ({"freeze": "no"}, "expected freeze to be True or False, got 'no'"),
        ({"compile": "False"}, "expected compile to be True or False, got 'False'"),
        ({"tile": None}, "expected tile to be True or False, got None"),
        ({"momentum": None}, "expected momentum to be at least 0 and below 1, got None"),
        ({"decay": "0.1"}, "expected decay to be above 0 and at most 1, got '0.1'"),
    ],
)
def test_a_wrong_field_says_what_was_expected(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Recipe(**fields)


def test_fields_go_through_json():
    recipe = Recipe(milestones=(2, 4), clip_norm=1.0)
    fields = json.loads(json.dumps(recipe.fields()))
    assert Recipe(**fields) == recipe


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


RESTARTED = {"epochs": 10, "convert_at_epoch": 4, "restart_at_conversion": 0.5, "warmup_epochs": 1}


@pytest.mark.parametrize("fields", [
    {"schedule": "cosine"}, {"schedule": "straight"}, {"schedule": "linear"}, {"schedule": "constant"},
    {"schedule": "step", "milestones": (3, 7)},
])  # fmt: skip
def test_a_restart_runs_the_whole_schedule_again_in_the_epochs_after_the_conversion(fields):
    """After the warm-up 9 epochs are left; the restart runs through them in 6."""
    recipe, without = short(**RESTARTED | fields), short(**RESTARTED | fields | {"restart_at_conversion": 0.0})
    for t in (0, 0.5, 1, 3.9):
        assert schedule.rate(recipe, t) == schedule.rate(without, t)
    for t in (4, 4.5, 7.2, 9.9):
        expected = 0.5 * schedule.rate(without, 1 + (t - 4) * 9 / 6)
        assert schedule.rate(recipe, t) == schedule.posterior_rate(recipe, t) == pytest.approx(expected, rel=1e-9)


def test_a_cosine_has_spent_its_rates_at_a_late_conversion():
    """docs/recipes.md says 5 %."""
    recipe = short(epochs=40, warmup_epochs=3)
    rates = [schedule.rate(recipe, step / 100) for step in range(4000)]
    assert sum(rates[2800:]) / sum(rates) == pytest.approx(0.05, abs=0.005)


def test_the_restarted_cosine_ends_at_zero():
    recipe = short(**RESTARTED, schedule="cosine")
    assert [schedule.rate(recipe, t) for t in (4, 7, 10)] == pytest.approx([0.5, 0.25, 0])


def test_a_restart_is_after_a_conversion_and_before_further_epochs():
    """A constant posterior stays; a network that is converted first has no restart."""
    recipe = short(**RESTARTED, extra_epochs=2, extra_rate=0.3, posterior_schedule="constant")
    assert [schedule.rate(recipe, t) for t in (10, 11.5)] == [0.3, 0.3]
    assert {schedule.posterior_rate(recipe, t) for t in (0, 5, 9)} == {1.0}
    first = {"epochs": 10, "warmup_epochs": 1}
    rates = [[schedule.rate(short(**first, restart_at_conversion=r), t) for t in (0, 0.5, 5)] for r in (0.0, 0.5)]
    assert rates[0] == rates[1]


def test_a_recipe_without_a_restart_has_the_fields_of_older_ones():
    assert "restart_at_conversion" not in Recipe(convert_at_epoch=3).fields()
    assert Recipe(restart_at_conversion=0.5).fields()["restart_at_conversion"] == 0.5


def test_a_recipe_that_deals_rows_has_the_fields_of_older_ones():
    assert "deal" not in Recipe(samples=2).fields()
    assert Recipe(samples=2, deal="draws").fields()["deal"] == "draws"


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
