"""Figures of answers in detail: confusions, targets, kept answers, detection, and wide axes."""

from __future__ import annotations

import json
import math
import re

import pytest

from leanbayes.report import load_results
from leanbayes.report.columns import test_columns as columns_of
from leanbayes.report.examples import galleries
from leanbayes.report.figures import figures
from leanbayes.report.figures.distributions import pooled_histograms
from leanbayes.report.page import _section as section_of
from leanbayes.report.page import line_of, render
from leanbayes.report.svg import Figure, log_axis, Numbers, Panel, wide_axis
from leanbayes.report.table import comparison
from tests.report import make

THREE = {name: make.METHODS[name] for name in ("plain", "deep_ensemble", "rank1")}


def group_of(folder):
    (group,) = load_results(folder).groups
    return group


def named(group, key, preferred=None):
    return next((figure for figure in figures(group, preferred) if figure.key == key), None)


def change(folder, update):
    for path in folder.rglob("result.json"):
        record = json.loads(path.read_text())
        update(record)
        path.write_text(json.dumps(record))
    return folder


def test_confusions_of_the_plain_and_the_preferred_network_are_summed_over_seeds(tmp_path):
    group = group_of(make.tree(tmp_path, THREE))
    figure = named(group, "confusion", group.contenders[2])
    assert [panel.title for panel in figure.panels] == ["plain", "rank1"]
    assert figure.numbers.head == ("Method", "True class", *make.CLASSES)
    rows = {row[:2]: row[2:] for row in figure.numbers.rows}
    assert rows["rank1", "3"] == ("0", "0", "3", "102", *["0"] * 6)
    assert "<title>3 of 3 taken for 2</title>" in figure.panels[1].svg


@pytest.mark.parametrize("broken", [None, 3, [], [[1]], [[1, 2], [3]], [[1, "x"], [0, 1]], [[1, -1], [0, 1]]])
def test_a_broken_confusion_matrix_is_left_out(tmp_path, broken):
    change(make.tree(tmp_path, THREE, seeds=1), lambda record: record["figures"].update(confusion=broken))
    assert named(group_of(tmp_path), "confusion") is None


def test_kept_answers_are_means_over_seeds(tmp_path):
    figure = named(group_of(make.tree(tmp_path, THREE)), "selective")
    assert figure.title == "Accuracy against coverage"
    rows = {row[:2]: row[2] for row in figure.numbers.rows}
    assert rows["rank1", "5"].startswith("100")
    whole = float(rows["rank1", "100"].split(" ± ")[0])
    assert whole == pytest.approx(95, abs=0.5)


def test_targets_are_plotted_with_their_intervals_and_misses(tmp_path):
    change(make.regression_tree(tmp_path), lambda record: record["data"].update(target="strength", unit="MPa"))
    group = group_of(tmp_path)
    figure = named(group, "predicted")
    assert figure.numbers.head[2] == "True strength, MPa"
    assert len(figure.numbers.rows) == 4 * 40
    missed = [row for row in figure.numbers.rows if not float(row[4]) <= float(row[2]) <= float(row[5])]
    told = [int(n) for panel in figure.panels for n in re.findall(r"(\d+) of 40 intervals miss it", panel.svg)]
    assert sum(told) == len(missed) > 0
    assert figure.panels[0].svg.count('class="dots') == 1, "one mark for all points keeps the page small"
    assert named(group, "selective").panels[0].title == "RMSE, units of strength, MPa"


def test_least_certain_rows_of_real_targets_are_listed(tmp_path):
    group = group_of(make.regression_tree(tmp_path, seeds=1))
    found = galleries(group)
    assert [gallery.contender.label for gallery in found] == ["plain", "deep_ensemble", "mean_field", "rank1"]
    (_, certain), (title, rows) = found[0].tables
    assert (title, len(certain), len(rows)) == ("Least certain", 6, 6)
    assert rows[0].cells[:2] == ("0", "10")
    for row in rows:
        _, target, _, low, high, *_ = map(float, row.cells)
        assert row.inside == (low <= target <= high)


def test_old_results_without_the_new_figures_still_give_a_page(tmp_path):
    def older(record):
        for name in ("log_histograms", "selective", "confusion", "predicted", "examples"):
            record["figures"].pop(name, None)
        for name in ("answer_ms", "answer_ms_one"):
            record["cost"].pop(name, None)
        for row in record["history"]:
            row.pop("valid_nll", None)

    make.regression_tree(make.tree(tmp_path, THREE))
    text = render(load_results(change(tmp_path, older)))
    assert "Quality against cost" in text
    assert "Confusion matrix" not in text
    assert "ms/row" not in text


def test_both_areas_are_columns_and_those_below_chance_are_marked(tmp_path):
    def reverse(record):
        if record["method"]["name"] == "rank1":
            record["metrics"]["ood"]["noise"]["scores"]["mutual_information"]["auroc"] = 0.31

    group = group_of(change(make.tree(tmp_path, THREE), reverse))
    table = comparison(group)
    keys = [column.key for column in table.columns if column.place != "rest"]
    assert {("ood", "noise", "auroc"), ("ood", "noise", "mutual_information", "auroc")} <= set(keys)
    at = [column.key for column in table.columns].index(("ood", "noise", "mutual_information", "auroc"))
    plain, ensemble, rank1 = (row.cells[at] for row in table.rows)
    assert plain is None, "a plain network has no epistemic uncertainty"
    assert (ensemble.reversed, rank1.reversed) == (False, True)
    assert rank1.text.endswith("(reversed)")
    figure = named(group, "ood")
    assert [panel.title for panel in figure.panels] == ["letters", "noise"]
    (cells,) = [row for row in figure.numbers.rows if row[:2] == ("rank1", "noise")]
    assert cells[3] == "0.31 ± 0 (reversed)"


def test_the_price_of_an_answer_is_in_passes_and_milliseconds(tmp_path):
    group = group_of(make.tree(tmp_path, THREE))
    keys = [column.key for column in comparison(group).columns if column.place != "rest"]
    assert {("cost", "answer_passes"), ("cost", "answer_ms"), ("cost", "answer_ms_one")} <= set(keys)
    figure = named(group, "cost")
    assert [panel.title for panel in figure.panels] == ["Training", "One answer", "One answer, time", "Parameters"]
    at = figure.numbers.head.index("One answer, time, ms a row, many rows at once")
    assert {row[0]: row[at] for row in figure.numbers.rows}["deep_ensemble"] == "0.08 ± 0"


def test_every_method_has_a_histogram_even_one_without_epistemic_uncertainty(tmp_path):
    def narrow(record):
        if record["method"]["name"] == "rank1":  # all inputs in the first of the common bins
            edges = [i * 1e-4 for i in range(31)]
            shares = {name: [1 / 30] * 30 for name in ("test", "letters", "noise")}
            record["figures"]["histograms"]["epistemic"] = {"edges": edges, "counts": shares}

    group = group_of(change(make.tree(tmp_path, THREE), narrow))
    figure = named(group, "epistemic-histogram")
    assert [panel.title for panel in figure.panels] == ["plain", "deep_ensemble", "rank1"]
    assert "logarithmic" in figure.caption
    assert {len(row) for row in figure.numbers.rows} == {len(figure.numbers.head)}


def test_logarithmic_histograms_keep_all_inputs(tmp_path):
    group = group_of(make.tree(tmp_path, THREE))
    for histogram in pooled_histograms([contender.runs for contender in group.contenders], "epistemic"):
        for name, shares in histogram.shares.items():
            assert sum(shares) + histogram.below.get(name, 0) == pytest.approx(1, abs=1e-3)


def test_one_huge_divergence_does_not_flatten_the_others():
    axis = wide_axis("", [0.2, 0.3, 2.0, 60_000.0])
    assert axis.share(2.0) - axis.share(0.2) > 0.15
    assert axis.share(60_000.0) > 0.9
    mixed = wide_axis("", [-1.2, -1.0, -0.8, 0.1, 500.0])
    assert mixed.share(0.1) - mixed.share(-1.2) > 0.1
    assert 0 in mixed.ticks


@pytest.mark.parametrize("values", [(0.9, 1.1), (1e-6, 3e4), (0.3, 2.0), (5.0, 5.0)])
def test_logarithmic_axes_hold_their_values_and_have_few_ticks(values):
    axis = log_axis("", values)
    assert axis.low < min(values) <= max(values) < axis.high
    assert len(axis.ticks) <= 7
    assert axis.bend is math.log


def test_validation_curves_are_shown_next_to_training(tmp_path):
    figure = named(group_of(make.tree(tmp_path, THREE)), "training")
    assert [panel.title.split(",")[0] for panel in figure.panels] == ["Loss", "NLL", "Validation NLL", "KL"]


@pytest.mark.parametrize(("small", "counts"), [(True, {8: 4, 7: 4, 6: 6, 13: 5, 1: 1}), (False, {4: 2, 3: 3, 5: 3})])
def test_charts_are_spread_evenly_over_rows(small, counts):
    for count, columns in counts.items():
        panels = [Panel("", "")] * count
        figure = Figure(key="", title="", caption="", panels=panels, numbers=Numbers((), []), small=small)
        assert figure.columns == columns


def test_the_open_examples_are_those_of_the_recommended_row_else_of_the_best(tmp_path):
    make.tree(tmp_path / "three", THREE)
    chosen = section_of("a", group_of(tmp_path / "three"))
    assert chosen.open_gallery == chosen.verdict.choice == "rank1"
    make.tree(tmp_path / "one", THREE, seeds=1)
    single = section_of("a", group_of(tmp_path / "one"))
    assert single.verdict.choice is None
    assert single.open_gallery == "deep_ensemble"


def test_a_line_of_the_first_table_agrees_with_the_verdict(tmp_path):
    line = line_of(section_of("a", group_of(make.tree(tmp_path, THREE))))
    assert (line.advice, line.label, line.figure, line.seeds) == ("take", "rank1", "NLL", 3)
    assert line.value.split(" ± ")[0] in line.section.verdict.sentence
    assert float(line.answer) == pytest.approx(16 * 1.03, rel=0.05)


def test_facts_of_a_table_are_shown(tmp_path):
    def add(record):
        record["data"] |= {"notes": ["left out: id"], "largest_class": {"name": "yes <b>", "share": 0.613}}

    text = render(load_results(change(make.tree(tmp_path, THREE, seeds=1), add)))
    assert "The largest class, yes &lt;b&gt;, has 61.3 % of the rows." in text
    assert "<dt>Columns</dt><dd>left out: id</dd>" in text


def test_an_ensemble_of_the_seeds_counts_as_a_measured_ensemble(tmp_path):
    record = make.classification("deep_ensemble", 0, make.METHODS["deep_ensemble"])
    record["method"] = {"name": "seed_ensemble", "fields": {"components": 3, "members": [0, 1, 2]}}
    make.write(make.tree(tmp_path, {name: THREE[name] for name in ("plain", "rank1")}), record)
    table = comparison(group_of(tmp_path))
    at = [column.title for column in table.columns].index("Ensemble equivalent")
    found = {row.contender.label: row.cells[at].mean for row in table.rows}
    assert (found["plain"], found["seed_ensemble"]) == ("1.0", "3.0")
    assert 1 < float(found["rank1"]) < 3


def test_every_column_and_term_is_explained_on_the_page(tmp_path):
    text = render(load_results(make.tree(tmp_path, THREE)))
    opened = set(re.findall(r'popovertarget="(\w+)"', text))
    assert opened == set(re.findall(r'<div popover id="(\w+)"', text))
    for column in columns_of("classification"):
        assert text.count(column.help.replace("'", "&#39;")) >= 1, column.title


def test_rows_of_real_targets_keep_their_numbers_and_their_differences(tmp_path):
    record = make.regression("plain", 0)
    row = {"row": 12345, "target": 1_000_003.5, "predicted": 1_000_001.25, "low": 999_995.5, "high": 1_000_006.0}
    row |= {"std": 2.6789, "epistemic_std": 0.1}
    record["figures"]["examples"] = {"certain": [row]}
    make.write(tmp_path, record)
    (gallery,) = galleries(group_of(tmp_path))
    ((_, (found,)),) = gallery.tables
    assert found.cells == ("12345", "1000003.5", "1000001.2", "999995.5", "1000006", "2.679", "0.1")
