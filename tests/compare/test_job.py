"""The syntax of `--methods`, and recipes of a budget with another number of epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leanbayes.cli.compare import _recipe, comparison_options, parse
from leanbayes.compare.experiment import load
from leanbayes.compare.job import DataSpec, parse_methods, recipe, stretched
from leanbayes.methods import all_methods
from leanbayes.training.recipe import rate


def test_names_stand_for_methods_as_they_are():
    assert [spec.name for spec in parse_methods("plain, rank1,mc-dropout,rank1")] == [
        "plain",
        "rank1",
        "mc_dropout",
    ]
    assert [version.name for version in parse_methods("all")] == ["plain", *all_methods()]
    assert {version.label for version in parse_methods("all")} == {""}


def test_brackets_give_fields():
    one, two, three = parse_methods("patch,patch[crossed=true,components=3], rank1[posterior=cauchy,init-std=0.03]")
    assert (one.fields, one.label) == ({}, "")
    assert (two.fields, two.label) == ({"crossed": True, "components": 3}, "patch[crossed=true,components=3]")
    assert three.fields == {"posterior": "cauchy", "init_std": 0.03}
    assert three.label == "rank1[posterior=cauchy,init_std=0.03]"
    assert parse_methods("patch[crossed=True]")[0].fields == {"crossed": True}
    assert parse_methods("patch[bias_precision=None]")[0].fields == {"bias_precision": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one method among plain"),
        ("rank2", "expected methods among plain, .*got 'rank2'"),
        (
            "patch[cross=true]",
            "expected FIELD=VALUE with a field among components, crossed.* of patch, got 'cross=true'",
        ),
        ("patch[crossed]", "expected FIELD=VALUE with a field among .*, got 'crossed'"),
        ("plain[x=1]", "a field among none of plain, got 'x=1'"),
        ("patch[crossed=true", r"expected methods such as plain,rank1,patch\[crossed=true\], got"),
    ],
)
def test_wrong_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_methods(text)


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 6, 7, 8, 50, 125])
def test_milestones_of_a_budget_keep_their_shares_with_few_epochs_too(epochs):
    """Shares are rounded to whole epochs, at least to the first; steps that meet in one epoch are one step."""
    full = recipe("full", kind="image", rows=50_000, augment="crop_flip", side=32)
    assert full.milestones == (100, 200, 225)
    found = stretched(full, epochs)
    steps = sorted({max(1, round(share * epochs)) for share in (0.4, 0.8, 0.9)})
    assert found.milestones == tuple(steps)
    assert found.warmup_epochs == pytest.approx(epochs / 250)
    for epoch in range(epochs):
        assert rate(found, epoch + 0.5) == pytest.approx(0.2 ** sum(step <= epoch for step in steps))


@pytest.mark.parametrize("more", [[], ["--recipe.schedule", "linear"], ["--recipe.milestones", "1"]])
def test_the_full_budget_of_augmented_images_takes_two_epochs(more):
    images = replace(load(DataSpec(name="digits")), augment="crop_flip")
    flags = ["--budget", "full", "--recipe.epochs", "2", *more]
    found, _ = _recipe(parse(comparison_options(), flags, "compare"), images)
    assert found.epochs == 2
    assert found.milestones == ((1,) if "--recipe.milestones" in more else (1, 2))
