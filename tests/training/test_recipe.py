"""What a recipe refuses, and in which words."""

from __future__ import annotations

import json

import pytest

from leanbayes.training import Recipe


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
        ({"milestones": (4, 2)}, r"expected milestones to be rising epochs, got \(4, 2\)"),
    ],
)
def test_a_wrong_field_says_what_was_expected(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Recipe(**fields)


def test_fields_go_through_json():
    recipe = Recipe(milestones=(2, 4), clip_norm=1.0)
    fields = json.loads(json.dumps(recipe.fields()))
    assert Recipe(**fields) == recipe
