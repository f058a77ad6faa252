"""Finding, reading and grouping result files."""

from __future__ import annotations

import json

import pytest

from leanbayes.report import load_results
from tests.report import make

TWO = {name: make.METHODS[name] for name in ("rank1", "plain")}


def test_runs_are_grouped_by_data_and_network_then_method(tmp_path):
    make.tree(tmp_path, TWO)
    make.tree(tmp_path, TWO, net="mlp")
    make.regression_tree(tmp_path)
    groups = load_results(tmp_path).groups
    assert [(g.data, g.network, g.task) for g in groups] == [
        ("concrete", "mlp", "regression"),
        ("digits", "lenet", "classification"),
        ("digits", "mlp", "classification"),
    ]
    assert [len(c.runs) for c in groups[1].contenders] == [3, 3]
    assert [run.seed for run in groups[1].contenders[0].runs] == ["0", "1", "2"]


def test_plain_comes_first_then_names(tmp_path):
    make.tree(tmp_path, seeds=1)
    labels = [contender.label for contender in load_results(tmp_path).groups[0].contenders]
    assert labels[0] == "plain"
    assert labels[1:] == sorted(labels[1:])


def test_runs_that_call_themselves_something_are_called_so(tmp_path):
    for label in ("rank1-both", "rank1-mixture"):
        record = make.classification("rank1", 0, make.METHODS["rank1"])
        record["method"]["label"] = label
        make.write(tmp_path, record, label)
    (group,) = load_results(tmp_path).groups
    assert [contender.label for contender in group.contenders] == ["rank1-both", "rank1-mixture"]


def test_a_method_with_several_settings_is_told_apart_by_what_differs(tmp_path):
    for components in (4, 16):
        record = make.classification("rank1", 0, make.METHODS["rank1"])
        record["method"]["fields"] = {"components": components, "prior": "normal", "factors": "both"}
        make.write(tmp_path, record, f"rank1-{components}")
    labels = [contender.label for contender in load_results(tmp_path).groups[0].contenders]
    assert labels == ["rank1 (components=4)", "rank1 (components=16)"]


def test_a_failed_run_is_listed_and_not_averaged(tmp_path):
    make.tree(tmp_path, TWO, seeds=2)
    make.write(tmp_path, make.failed("rank1", 1, "ValueError: loss is NaN"))
    make.write(tmp_path, make.failed("nested", 0, "Killed"))
    group = load_results(tmp_path).groups[0]
    assert [(c.label, len(c.runs)) for c in group.contenders] == [("plain", 2), ("rank1", 1)]
    assert [(f.label, f.seed, f.error) for f in group.failures] == [
        ("nested", "0", "Killed"),
        ("rank1", "1", "ValueError: loss is NaN"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{ not json", "is not readable JSON"),
        ("[" * 100_000, "is not readable JSON"),
        ("[]", "expected a result of schema 1, got a list"),
        ('{"schema": 7}', "expected a result of schema 1, got 7"),
        ('{"schema": 1, "status": "done", "metrics": [1]}', "expected `metrics` to be a dict, got a list"),
        ('{"schema": 1, "status": "done"}', "expected method.name, network.name, data.name"),
        (
            '{"schema": 1, "method": {"name": "a"}, "network": {"name": "b"}, "data": {"name": "c"}}',
            "expected status",
        ),
    ],
)
def test_a_damaged_file_is_named_in_a_sentence(tmp_path, text, complaint):
    make.tree(tmp_path, TWO, seeds=1)
    bad = tmp_path / "digits" / "lenet" / "rank1" / "seed0" / "result.json"
    bad.write_text(text)
    results = load_results(tmp_path)
    assert [c.label for c in results.groups[0].contenders] == ["plain"]
    (sentence,) = results.damaged
    assert sentence.startswith("digits/lenet/rank1/seed0/result.json")
    assert complaint in sentence
    assert "run it again" in sentence


def test_bytes_that_are_no_text_are_damage_too(tmp_path):
    (tmp_path / "result.json").write_bytes(b"\xff\xfe\x00")
    assert "is not readable JSON" in load_results(tmp_path).damaged[0]


def test_an_empty_folder_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="found none; `leanbayes compare"):
        load_results(tmp_path)


def test_a_run_answers_none_where_a_path_breaks_off(tmp_path):
    record = make.record("plain", 0, "digits", "lenet", "classification")
    record["metrics"] = {"test": {"nll": "much"}, "shift": "none"}
    make.write(tmp_path, record)
    run = load_results(tmp_path).groups[0].runs[0]
    assert run.number("metrics", "test", "nll") is None
    assert run.part("metrics", "test", "nll", "deeper") is None
    assert run.rows("metrics", "shift") == []
    assert json.loads((tmp_path / run.path).read_text()) == run.record
