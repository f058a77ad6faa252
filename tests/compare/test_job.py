"""The syntax of `--methods`."""

from __future__ import annotations

import pytest

from leanbayes.compare.job import parse_methods
from leanbayes.methods import all_methods


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
