"""The comparison: means against numpy, marks, columns that appear only where there are numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from leanbayes.evaluation.statistics import Estimate
from leanbayes.report import load_results
from leanbayes.report.columns import Column, duration, short_number
from leanbayes.report.table import comparison
from tests.report import make

THREE = {name: make.METHODS[name] for name in ("plain", "deep_ensemble", "rank1")}


def table_of(folder):
    (group,) = load_results(folder).groups
    return comparison(group)


def column(table, *key):
    i = [c.key for c in table.columns].index(key)
    return {row.contender.label: row.cells[i] for row in table.rows}


def values(folder, method, *path):
    """Read one figure of every seed straight from the files."""
    found = []
    for file in sorted(folder.glob(f"*/*/{method}/*/result.json")):
        value = json.loads(file.read_text())
        for key in path:
            value = value[key]
        found.append(value)
    return np.array(found)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (("test", "nll"), ("metrics", "test", "nll")),
        (("ood", "letters", "auroc"), ("metrics", "ood", "letters", "auroc")),
        (("ood", "letters", "confidence", "auroc"), ("metrics", "ood", "letters", "scores", "confidence", "auroc")),
        (("cost", "train_step_ratio"), ("cost", "train_step_ratio")),
    ],
)
def test_cells_are_means_and_standard_errors_over_seeds(tmp_path, key, path):
    table = table_of(make.tree(tmp_path, THREE))
    for method in THREE:
        expected = values(tmp_path, method, *path)
        found = column(table, *key)[method].estimate
        assert found.mean == pytest.approx(expected.mean())
        assert found.sem == pytest.approx(expected.std(ddof=1) / np.sqrt(3))


def test_corrupted_figures_leave_the_clean_images_out(tmp_path):
    table = table_of(make.tree(tmp_path, THREE, seeds=1))
    (rows,) = values(tmp_path, "rank1", "metrics", "shift")
    expected = np.mean([row["nll"] for row in rows if row["severity"] > 0])
    assert column(table, "shift", "nll")["rank1"].estimate.mean == pytest.approx(expected)


def test_mce_is_relative_to_the_plain_network(tmp_path):
    """mCE = mean over corruptions of (sum of errors over severities) / (the same of the plain network)."""
    table = table_of(make.tree(tmp_path, THREE))

    def errors(rows):
        names = dict.fromkeys(row["corruption"] for row in rows if row["severity"])
        return np.array([sum(1 - r["accuracy"] for r in rows if r["corruption"] == name) for name in names])

    plain = np.mean([errors(rows) for rows in values(tmp_path, "plain", "metrics", "shift")], axis=0)
    seeds = [np.mean(errors(rows) / plain) for rows in values(tmp_path, "rank1", "metrics", "shift")]
    found = column(table, "shift", "mce")
    assert found["rank1"].estimate.mean == pytest.approx(np.mean(seeds))
    assert found["plain"].estimate.mean == pytest.approx(1.0)


def test_without_a_plain_network_there_is_no_mce(tmp_path):
    keys = [c.key for c in table_of(make.tree(tmp_path, {"rank1": make.METHODS["rank1"]})).columns]
    assert ("shift", "nll") in keys
    assert ("shift", "mce") not in keys


def test_an_mce_that_means_nothing_is_absent(tmp_path):
    """A plain network without errors leaves nothing to divide by; without clean images nothing is relative to them."""
    for name, accuracy in (("plain", 1.0), ("rank1", 0.9)):
        record = make.record(name, 0, "digits", "lenet", "classification")
        row = {
            "corruption": "blur",
            "severity": 1,
            "accuracy": accuracy,
            "nll": 0.1,
            "ece": 0,
            "epistemic": 0,
            "aleatoric": 0,
        }
        make.write(tmp_path, record | {"metrics": {"shift": [row]}})
    keys = [c.key for c in table_of(tmp_path).columns]
    assert ("shift", "accuracy") in keys
    assert not {("shift", "mce"), ("shift", "relative_mce")} & set(keys)


def test_ensemble_equivalents_lie_on_a_curve_of_one_over_the_number_of_networks(tmp_path):
    table = table_of(make.tree(tmp_path, THREE))
    cnll = {name: values(tmp_path, name, "metrics", "test", "cnll").mean() for name in THREE}
    expected = 1 / np.interp(-cnll["rank1"], [-cnll["plain"], -cnll["deep_ensemble"]], [1, 1 / 4])
    found = column(table, "test", "ensemble_equivalent")
    assert found["rank1"].estimate.mean == pytest.approx(expected)
    assert found["deep_ensemble"].mean == "4.0"
    assert found["plain"].mean == "1.0"


def nll_tree(folder, seeds):
    """Write results; only their NLL matters: {method: [nll of each seed]}."""
    for name, figures in seeds.items():
        for seed, nll in enumerate(figures):
            record = make.record(name, seed, "digits", "lenet", "classification")
            record["metrics"] = {"test": {"nll": nll}}
            record["cost"] = {"train_seconds": 10.0 + seed}
            make.write(folder, record)
    return folder


def test_the_best_and_what_may_be_as_good_are_marked(tmp_path):
    # Standard errors are 0.01 each, of a difference 0.0141: 0.314 is near 0.30, 0.315 is not.
    seeds = {"a": [0.29, 0.31], "b": [0.304, 0.324], "c": [0.305, 0.325], "plain": [0.5, 0.6]}
    table = table_of(nll_tree(tmp_path, seeds))
    assert {name: cell.mark for name, cell in column(table, "test", "nll").items()} == {
        "plain": "", "a": "best", "b": "near", "c": "",
    }  # fmt: skip


def test_with_one_seed_only_the_best_and_its_equals_are_marked(tmp_path):
    table = table_of(nll_tree(tmp_path, {"a": [0.3], "b": [0.3], "c": [0.301]}))
    assert [cell.mark for cell in column(table, "test", "nll").values()] == ["best", "best", ""]
    assert all(cell.sem == "" for cell in column(table, "test", "nll").values())


@pytest.mark.parametrize(
    ("seeds", "written", "marks"),
    [
        ({"a": [0.12341], "b": [0.12344], "c": [0.2]}, ["0.12341", "0.12344", "0.20000"], ["best", "", ""]),
        ({"a": [0.1234], "b": [0.1234001], "c": [0.2]}, ["0.123", "0.123", "0.200"], ["best", "best", ""]),
        ({"a": [0.1234], "b": [0.1234001]}, ["0.123", "0.123"], ["", ""]),
        ({"a": [0.1, 0.2], "b": [0.1, 0.2001], "c": [0.9, 0.9]}, ["0.150", "0.150", "0.900"], ["best", "best", ""]),
    ],
    ids=["a digit more shows it", "no digit shows it", "none is seen to be better", "chance is no reason for digits"],
)
def test_what_reads_alike_is_marked_alike(tmp_path, seeds, written, marks):
    cells = column(table_of(nll_tree(tmp_path, seeds)), "test", "nll").values()
    assert [cell.mean for cell in cells] == written
    assert [cell.mark for cell in cells] == marks


def test_where_all_are_equal_none_is_best(tmp_path):
    table = table_of(nll_tree(tmp_path, {"a": [0.3], "b": [0.3]}))
    assert [cell.mark for cell in column(table, "test", "nll").values()] == ["", ""]


def test_costs_and_lone_contenders_are_not_marked(tmp_path):
    assert column(table_of(nll_tree(tmp_path / "x", {"a": [0.3]})), "test", "nll")["a"].mark == ""
    two = table_of(nll_tree(tmp_path / "y", {"a": [0.3], "b": [0.4]}))
    assert {cell.mark for cell in column(two, "cost", "train_seconds").values()} == {""}


def test_columns_without_numbers_are_absent_and_gaps_stay_empty(tmp_path):
    folder = nll_tree(tmp_path, {"a": [0.3], "b": [None]})
    table = table_of(folder)
    assert [c.key for c in table.columns] == [("test", "nll"), ("cost", "train_seconds")]
    assert column(table, "test", "nll")["b"] is None


def test_regression_has_its_own_columns(tmp_path):
    table = table_of(make.regression_tree(tmp_path)).only("brief", "main")
    assert [c.title for c in table.columns][:4] == ["RMSE", "LPD", "CRPS", "Coverage of 95\u00a0% interval"]
    assert column(table, "test", "lpd")["deep_ensemble"].mark == "best"
    assert column(table, "test", "rmse")["deep_ensemble"].mark == "best"


def test_a_row_without_a_network_has_no_passes(tmp_path):
    make.regression_tree(tmp_path, seeds=1)
    record = make.regression("plain", 0)
    record["method"], record["cost"] = {"name": "boosting", "fields": {}}, {"train_seconds": 1.0, "answer_ms": 0.05}
    record["settings"] = {"judging": {"samples": 16}}
    make.write(tmp_path, record)
    passes = column(table_of(tmp_path), "cost", "passes")
    assert passes["boosting"] is None
    assert passes["rank1"].text


def test_groups_of_columns_span_all_columns(tmp_path):
    table = table_of(make.tree(tmp_path, THREE, seeds=1)).only("brief", "main")
    groups = table.groups()
    assert [name for name, _ in groups] == ["Test set", "Corrupted", "Out-of-distribution inputs", "Cost"]
    assert sum(span for _, span in groups) == len(table.columns)


@pytest.mark.parametrize(
    ("means", "sem", "written"),
    [
        ((0.234, 0.166), 0.002, ("0.234", "0.002")),
        ((0.0213, 0.0181), 0.0004, ("0.0213", "0.0004")),
        ((123.4, 130.2), None, ("123", "")),
        ((0.5, 0.4), 0.00003, ("0.50000", "0.00003")),
        ((0.0, 0.0), None, ("0.0", "")),
        ((7.653e-10, 9.1e-10), None, ("0.000000000765", "")),
        ((0.5, 0.4), 1e-9, ("0.50000", "<0.00001")),
    ],
)
def test_decimals_suit_values_and_errors(means, sem, written):
    figure = Column(key=("test", "x"), title="X", group="Test set", better="lower", help="")
    estimates = [Estimate(mean, sem, 3) for mean in means]
    assert figure.write(estimates[0], figure.decimals(estimates)) == written


def test_seeds_that_agree_have_an_error_of_zero_and_constant_costs_have_none():
    figure = Column(key=("test", "x"), title="X", group="Test set", better="lower", help="")
    assert figure.write(Estimate(0.5, 0.0, 3), 2) == ("0.50", "0.00")
    cost = Column(key=("cost", "x"), title="X", group="Cost", better="lower", help="", marked=False)
    assert cost.write(Estimate(0.5, 0.0, 3), 2) == ("0.50", "")


def test_zero_has_no_sign():
    figure = Column(key=("test", "x"), title="X", group="Test set", better="lower", help="")
    assert figure.write(Estimate(-1e-7, None, 1), 4) == ("0.0000", "")
    assert figure.write(Estimate(-0.1, None, 1), 4) == ("-0.1000", "")


def test_an_error_too_small_to_write_is_not_written_as_zero():
    figure = Column(key=("test", "x"), title="X", group="Test set", better="lower", help="")
    assert figure.write(Estimate(0.5, 0.0001, 3), 2) == ("0.50", "<0.01")


@pytest.mark.parametrize(("seconds", "text"), [(4.25, "4.2 s"), (90, "1.5 min"), (5400, "1.5 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0.0151, "0.0151"), (9.737, "9.74"), (1503.2, "1,503"), (753.4, "753")])
def test_short_numbers_have_no_exponent(value, text):
    assert short_number(value) == text
