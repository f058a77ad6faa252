"""Finding, reading and grouping result files."""

from __future__ import annotations

import json

import pytest

from leanbayes.report import build, load_results, markdown
from leanbayes.report.page import render
from leanbayes.report.provenance import provenance
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


def test_runs_with_other_settings_are_contenders_of_their_own(tmp_path):
    for seed, epochs, lr in ((0, 1, 0.1), (1, 6, 0.2), (2, 6, 0.2)):
        record = make.classification("plain", seed, make.METHODS["plain"])
        record["recipe"] |= {"epochs": epochs, "lr": lr}
        record["settings"] = {"recipe": record["recipe"], "judging": {"samples": 4}}
        make.write(tmp_path, record)
    (group,) = load_results(tmp_path).groups
    told = [(contender.label, len(contender.runs)) for contender in group.contenders]
    assert told == [("plain (recipe.epochs=1)", 1), ("plain (recipe.epochs=6)", 2)]  # lr tells nothing more
    assert "epochs" in dict(provenance(group).facts)["Recipes"]


def test_settings_of_the_evaluation_and_other_data_tell_runs_apart_and_machines_do_not(tmp_path):
    for seed, samples, digest, device in ((0, 4, "ab", "cpu"), (1, 16, "ab", "cpu"), (2, 16, "cd", "cpu"),
                                          (3, 16, "cd", "cuda")):  # fmt: skip
        record = make.classification("rank1", seed, make.METHODS["rank1"])
        record["method"]["label"] = "mine"
        record["data"]["sha256"] = 32 * digest
        record["settings"] = {
            "recipe": record["recipe"] | {"accelerator": device}, "judging": {"samples": samples},
        }  # fmt: skip
        make.write(tmp_path, record, "mine")
    (group,) = load_results(tmp_path).groups
    assert [(contender.label, [run.seed for run in contender.runs]) for contender in group.contenders] == [
        ("mine (samples=4, sha256=abababab)", ["0"]),
        ("mine (samples=16, sha256=abababab)", ["1"]),
        ("mine (samples=16, sha256=cdcdcdcd)", ["2", "3"]),
    ]


def test_a_setting_that_older_results_lack_does_not_part_them_from_younger_ones(tmp_path):
    for seed, more in ((0, {}), (1, {"compile_mode": "fast"})):
        record = make.classification("plain", seed, make.METHODS["plain"])
        record["recipe"] |= more
        make.write(tmp_path, record)
    assert [contender.label for contender in load_results(tmp_path).groups[0].contenders] == ["plain"]


def test_a_seed_counts_once_and_the_report_says_which_run(tmp_path):
    for place, created in (("a", "2026-03-02T10:00:00Z"), ("b", "2026-03-01T10:00:00Z")):
        record = make.classification("plain", 0, make.METHODS["plain"]) | {"created": created}
        make.write(tmp_path / place, record)
    (group,) = load_results(tmp_path).groups
    (contender,) = group.contenders
    assert [run.path[0] for run in contender.runs] == ["a"]  # the latest
    history = provenance(group)
    assert dict(history.facts)["Seeds"] == "0"
    assert history.remarks == [
        "plain, seed 0 was run more than once with equal settings: a/digits/lenet/plain/seed0/result.json counts, "
        "b/digits/lenet/plain/seed0/result.json does not."
    ]


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


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("cost", "predict_ratio"), -1.0, "expected `cost.predict_ratio` to be above 0, got -1.0"),
        (("cost", "train_step_ratio"), 0, "expected `cost.train_step_ratio` to be above 0, got 0"),
        (("cost", "passes"), -16, "expected `cost.passes` to be above 0, got -16"),
        (("cost", "extra_percent"), -100.0, "expected `cost.extra_percent` to be above -100, got -100.0"),
        (("cost", "parameters"), 10**400, "expected `cost.parameters` to be at most 1e+100, got 1000000000"),
        (("metrics", "test", "nll"), 1e300, "expected `metrics.test.nll` to be at most 1e+100, got 1e+300"),
        (("history",), [{"epoch": 1, "loss": -(10**400)}], "expected `history.0.loss` to be at most 1e+100"),
        (("recipe", "epochs"), -3, "expected `recipe.epochs` to be above 0, got -3"),
        (("seed",), 10**400, "expected `seed` to be at most 1e+100"),
        (("settings",), json.loads('{"a":' * 400 + "1" + "}" * 400), "expected at most 30 levels, got more in `sett"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_number_that_cannot_be_true_is_named_and_other_runs_are_shown(tmp_path, path, value, told):
    make.tree(tmp_path, TWO, seeds=1)
    file = tmp_path / "digits" / "lenet" / "rank1" / "seed0" / "result.json"
    record = part = json.loads(file.read_text())
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    file.write_text(json.dumps(record))
    results = load_results(tmp_path)
    (sentence,) = results.damaged
    assert sentence.startswith(f"digits/lenet/rank1/seed0/result.json: {told}")
    assert len(sentence) < 250
    text = build(tmp_path).read_text()
    assert [c.label for c in results.groups[0].contenders] == ["plain"]
    assert "digits/lenet/rank1/seed0/result.json" in text


ODD = (-1, 0, 1e99, -1e99, 10**400, float("nan"), float("inf"), True, None, "", "x" * 300, [], {}, [None], {"a": [{}]})


def places(value, path=()):
    """Yield the path of every value inside a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def test_no_odd_value_anywhere_stops_the_report(tmp_path):
    """Every ninth place of a result in turn has an odd value: the report names the file or shows the rest."""
    good = make.classification("rank1", 0, make.METHODS["rank1"])
    make.write(tmp_path, make.classification("plain", 0, make.METHODS["plain"]))
    file = make.write(tmp_path, good)
    for i, path in enumerate(list(places(good))[::9]):
        record = json.loads(json.dumps(good))
        part = record
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = ODD[i % len(ODD)]
        file.write_text(json.dumps(record))
        results = load_results(tmp_path)
        assert "plain" in render(results), path
        assert markdown(results)


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
