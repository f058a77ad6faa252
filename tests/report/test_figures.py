"""Figures draw the numbers of the files, and nothing else."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from leanbayes.report import load_results
from leanbayes.report.examples import galleries
from leanbayes.report.figures import figures
from leanbayes.report.figures.distributions import pooled_histograms, pooled_reliability, rebin
from leanbayes.report.load import Look
from leanbayes.report.svg import Axis, Chart, LARGE, linear_axis, ratio_axis, SMALL, write_tick
from tests.report import make

THREE = {name: make.METHODS[name] for name in ("plain", "deep_ensemble", "rank1")}
FIVE = THREE | {name: make.METHODS[name] for name in ("mean_field", "variance")}
KEYS = [
    "cost", "reliability", "selective", "confusion", "severity", "ood", "total-histogram", "epistemic-histogram",
    "training",
]  # fmt: skip


def group_of(folder):
    (group,) = load_results(folder).groups
    return group


def one_run(folder, **parts):
    """Return a group of one run that has nothing but these parts."""
    make.write(folder, make.record("plain", 0, "digits", "lenet", "classification") | parts)
    return group_of(folder)


def test_every_figure_is_drawn_from_full_results(tmp_path):
    found = {figure.key: figure for figure in figures(group_of(make.tree(tmp_path, THREE)))}
    assert list(found) == KEYS
    assert len(found["cost"].panels) == 4
    assert [panel.title for panel in found["reliability"].panels] == ["plain", "deep_ensemble", "rank1"]
    assert len(found["severity"].panels) == 5
    assert [panel.title for panel in found["epistemic-histogram"].panels] == ["plain", "deep_ensemble", "rank1"]
    assert [panel.title for panel in found["training"].panels] == [
        "Loss, nats per input",
        "NLL, nats per input",
        "Validation NLL, nats per input",
        "KL, nats",
    ]


def test_no_name_of_a_point_covers_a_whisker(tmp_path):
    make.tree(tmp_path)
    for path in tmp_path.rglob("result.json"):  # costs that vary: long flat whiskers
        record = json.loads(path.read_text())
        record["cost"]["predict_ratio"] *= 1 + 0.15 * record["seed"]
        path.write_text(json.dumps(record))
    found = next(figure for figure in figures(group_of(tmp_path)) if figure.key == "cost")
    for panel in found.panels:
        root = ElementTree.fromstring(panel.svg)
        whiskers = [
            np.array([pair.split(",") for pair in node.get("points").split()], float)
            for node in root.iter("polyline")
            if "whisker" in node.get("class")
        ]
        names = [node for node in root.iter("text") if node.get("class") == "label"]
        assert len(names) >= 5
        for node in names:
            x, y, wide = float(node.get("x")), float(node.get("y")), 6 * len(node.text)
            left = x - wide if node.get("text-anchor") == "end" else x
            for (x0, y0), (x1, y1) in whiskers:
                beside = max(x0, x1) < left or left + wide < min(x0, x1)
                assert beside or max(y0, y1) < y - 9 or min(y0, y1) > y, (panel.title, node.text)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_charts_are_well_formed_named_and_inside_their_frame(tmp_path, task):
    folder = make.tree(tmp_path, FIVE) if task == "classification" else make.regression_tree(tmp_path)
    for figure in figures(group_of(folder)):
        assert figure.numbers.rows
        assert {len(row) for row in figure.numbers.rows} == {len(figure.numbers.head)}
        for panel in figure.panels:
            root = ElementTree.fromstring(panel.svg)
            assert root.get("role") == "img"
            assert root.get("aria-label")
            width, height = map(float, root.get("viewBox").split()[2:])
            for node in root.iter("polyline"):
                points = np.array([pair.split(",") for pair in node.get("points").split()], float)
                assert (points >= 0).all()
                assert (points <= (width, height)).all()


def test_points_tell_their_numbers(tmp_path):
    severity = next(f for f in figures(group_of(make.tree(tmp_path, THREE))) if f.key == "severity")
    assert re.search(r"<title>rank1, severity 3: [\d.]+ ± [\d.]+</title>", severity.panels[0].svg)


def test_results_without_figures_have_none(tmp_path):
    assert figures(one_run(tmp_path, metrics={"test": {"nll": 0.3}})) == []


@pytest.mark.parametrize(
    "broken",
    [
        {"figures": {"reliability": None, "histograms": None, "examples": None}},
        {"figures": {"reliability": {"bins": [None, {"confidence": None}]}, "histograms": {"total": {"edges": [0]}}}},
        {"figures": {"histograms": {"total": {"edges": [0, 0, 0], "counts": {"test": [1, 0]}}}}},
        {"figures": {"histograms": {"total": {"edges": [0, 1, 2], "counts": {"test": [1]}}}}},
        {"figures": {"histograms": {"total": {"edges": [0, 1, 2], "counts": {"test": [1, "x"]}}}}},
        {"metrics": {"shift": [{"corruption": "clean", "severity": 0, "accuracy": None}]}},
        {"metrics": {"shift": None, "ood": None, "test": None}},
        {"history": [{"epoch": None, "loss": 1.0}, 3]},
        {"history": [{"epoch": 1, "loss": 1.0}]},
    ],
)
def test_null_and_broken_parts_leave_no_empty_frame(tmp_path, broken):
    group = one_run(tmp_path, **broken)
    assert figures(group) == []
    assert galleries(group) == []


def test_regression_draws_levels_and_training(tmp_path):
    found = figures(group_of(make.regression_tree(tmp_path)))
    assert [figure.key for figure in found] == ["cost", "reliability", "selective", "predicted", "training"]
    assert found[1].numbers.head == ("Method", "Level", "Coverage")
    assert found[1].panels[0].note == "Coverage of 95\u00a0% interval: 91.0 %"
    assert [panel.title for panel in found[-1].panels] == ["Loss, nats per input", "NLL, nats per input"]


def test_reliability_pools_the_inputs_of_all_seeds(tmp_path):
    """Empty bins are left out of the files; bins are matched by confidence and weigh their counts."""
    rows = [
        [{"confidence": 0.50, "accuracy": 0.4, "count": 10}, {"confidence": 0.95, "accuracy": 0.9, "count": 90}],
        [{"confidence": 0.94, "accuracy": 1.0, "count": 10}],
    ]
    for seed, bins in enumerate(rows):
        record = make.record("plain", seed, "digits", "lenet", "classification")
        make.write(tmp_path, record | {"figures": {"reliability": {"bins": bins}}})
    low, high = pooled_reliability(group_of(tmp_path).runs)
    assert (low.confidence, low.accuracy, low.count) == (0.5, 0.4, 10)
    assert high.confidence == pytest.approx((90 * 0.95 + 10 * 0.94) / 100)
    assert high.accuracy == pytest.approx((90 * 0.9 + 10 * 1.0) / 100)
    assert high.count == 100


def test_bins_with_few_inputs_are_faint(tmp_path):
    bins = [{"confidence": c, "accuracy": c, "count": n} for c, n in ((0.3, 1), (0.6, 500), (0.9, 600))]
    (figure,) = figures(one_run(tmp_path, figures={"reliability": {"bins": bins}}))
    assert figure.panels[0].svg.count("sparse") == 1
    assert len(figure.numbers.rows) == 3


def test_rebinning_keeps_shares_and_agrees_with_a_cumulative_interpolation():
    rng = np.random.default_rng(0)
    edges, shares = np.linspace(0, 1.7, 31), rng.dirichlet(np.ones(30))
    wanted = np.linspace(0, 2.3, 31)
    cumulative = np.interp(wanted, edges, np.concatenate([[0], shares.cumsum()]))
    moved = rebin(edges.tolist(), shares.tolist(), wanted.tolist())
    np.testing.assert_allclose(moved, np.diff(cumulative), atol=1e-12)
    assert sum(moved) == pytest.approx(1)


def test_histograms_share_their_edges(tmp_path):
    group = group_of(make.tree(tmp_path, THREE))
    found = pooled_histograms([contender.runs for contender in group.contenders], "total")
    tops = [run.part("figures", "histograms", "total", "edges")[-1] for run in group.runs]
    assert [h.edges[-1] for h in found] == pytest.approx([max(tops)] * 3)
    assert all(sum(shares) == pytest.approx(1) for h in found for shares in h.shares.values())


@pytest.mark.parametrize("values", [(0.1, 0.9), (-3.2, -2.9), (0, 0), (5, 5), (1e-4, 3e-4), (12, 90_000)])
def test_linear_axes_hold_their_values_between_round_ticks(values):
    axis = linear_axis("x", values)
    assert axis.low <= min(values)
    assert max(values) <= axis.high
    assert 2 <= len(axis.ticks) <= 9
    steps = np.diff(axis.ticks)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    assert axis.share(axis.low) == 0
    assert axis.share(axis.high) == 1


@pytest.mark.parametrize("size", [LARGE, SMALL])
@pytest.mark.parametrize("values", [(-6.3864, -6.3861), (0, 1), (-123.456, -123.452)])
def test_the_name_of_an_axis_stands_clear_of_its_numbers(size, values):
    chart = Chart(linear_axis("x", (0, 1)), linear_axis("LPD (higher is better)", values), size)
    root = ElementTree.fromstring(chart.render(""))
    ends = [(float(n.get("x")), len(n.text)) for n in root.iter("text") if n.get("text-anchor") == "end"]
    assert min(end - 6.4 * letters for end, letters in ends) >= 11 + 4, "the name's baseline is at 11"
    assert all(end < chart.at(0, values[0])[0] for end, _ in ends)


def test_the_clean_images_of_a_sweep_are_said_to_be_a_subset(tmp_path):
    severity = next(f for f in figures(group_of(make.tree(tmp_path, THREE))) if f.key == "severity")
    assert "not the whole test set" in severity.caption


def test_ratio_axes_are_logarithmic_and_hold_one():
    axis = ratio_axis("x", [1.1, 4.0])
    assert axis.low < 1 < 4 < axis.high
    assert {1, 2, 4} <= set(axis.ticks)
    assert axis.share(4) - axis.share(2) == pytest.approx(axis.share(2) - axis.share(1))


@pytest.mark.parametrize("values", [[0.0, 3.0], [1e-9, 1.0], [5.0, 1e9], [250.0]])
def test_ratio_axes_hold_costs_of_any_size(values):
    axis = ratio_axis("x", values)
    assert 2 <= len(axis.ticks) <= 10
    assert all(0 <= axis.share(value) <= 1 for value in values)


def test_the_chart_of_an_answer_counts_passes(tmp_path):
    """deep_ensemble takes four passes and rank1 sixteen: four members stand left of sixteen draws."""
    costs = {"deep_ensemble": (1.2, 4), "rank1": (1.1, 16), "plain": (1.0, 1)}
    for name, (ratio, passes) in costs.items():
        record = make.classification(name, 0, make.METHODS[name])
        record["cost"] |= {"predict_ratio": ratio, "passes": passes}
        make.write(tmp_path, record)
    cost = next(figure for figure in figures(group_of(tmp_path)) if figure.key == "cost")
    (head,) = [i for i, name in enumerate(cost.numbers.head) if name == "One answer, passes of the plain network"]
    assert {row[0]: row[head] for row in cost.numbers.rows} == {"plain": "1", "deep_ensemble": "4.8", "rank1": "17.6"}
    assert re.search(r"<title>rank1: [\d.]+ at 17.6 passes of the plain network</title>", cost.panels[1].svg)
    places = re.findall(r"marker n(\d)[^>]*translate\(([\d.]+)", cost.panels[1].svg)
    assert [float(x) for _, x in places] == sorted(float(x) for _, x in places)


@pytest.mark.parametrize(("value", "text"), [(0.25, "0.25"), (2500, "2500"), (40_000, "40k"), (2e7, "20M"), (-3, "-3")])
def test_ticks_are_short(value, text):
    assert write_tick(value) == text


def test_charts_escape_what_they_are_told():
    chart = Chart(Axis("<b>", 0, 1, (0, 1)), Axis('"&', 0, 1, (0, 1)))
    chart.marker((0.5, 0.5), Look(1, 1, 1), "</title><script>")
    chart.text((3, 3), "<i>", "start")
    root = ElementTree.fromstring(chart.render('"><img>'))
    assert root.get("aria-label") == '"><img>'
    assert not list(root.iter("script"))


def test_examples_show_the_likeliest_classes_and_the_true_one(tmp_path):
    example = {
        "image": make.png(np.zeros((8, 8))), "label": 9, "predicted": 0,
        "probabilities": [0.5, 0.2, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.005], "spread": [0.6] + [0.01] * 9,
        "total": 1.5, "aleatoric": 1.0, "epistemic": 0.5,
    }  # fmt: skip
    (gallery,) = galleries(one_run(tmp_path, figures={"examples": {"uncertain": [example] * 6, "certain": []}}))
    ((title, cards),) = gallery.shelves
    assert (title, len(cards)) == ("Least certain", 4)
    card = cards[0]
    assert card.image.startswith("data:image/png;base64,iVBOR")
    assert [bar.name for bar in card.bars] == ["0", "1", "2", "9"]
    assert (card.bars[0].percent, card.bars[0].low, card.bars[0].high) == (50, 0, 100)
    assert [bar.is_label for bar in card.bars] == [False, False, False, True]
    assert not card.right
    assert card.uncertainties == [("epistemic", "0.500"), ("aleatoric", "1.000")]


@pytest.mark.parametrize("image", [None, "not base64!", "aGVsbG8=", "A" * 70_000, 7])
def test_what_is_no_small_png_is_not_shown(tmp_path, image):
    example = {"image": image, "label": 1, "predicted": 1, "probabilities": [], "spread": []}
    (gallery,) = galleries(one_run(tmp_path, figures={"examples": {"certain": [example]}}))
    assert gallery.shelves[0][1][0].image is None


def test_bins_are_not_narrower_than_those_of_the_runs(tmp_path):
    """All inputs are in the last of 30 bins: one bar says so, thirty equal ones would invent a distribution."""
    edges = [i / 10 for i in range(24)]
    counts = {"test": [0.0] * 22 + [1.0], "noise": [0.0] * 22 + [1.0]}
    group = one_run(tmp_path, figures={"histograms": {"total": {"edges": edges, "counts": counts}}})
    (found,) = pooled_histograms([group.runs], "total")
    assert found.edges == pytest.approx([2.2, 2.3])
    assert found.shares["test"] == pytest.approx([1.0])


def test_uncertainties_of_a_target_in_a_large_unit_are_not_zero(tmp_path):
    for name, unit in (("plain", 0.0), ("rank1", 1e-15)):
        edges = [unit * i for i in range(5)]
        found = {"epistemic": {"edges": edges, "counts": {"test": [0.1, 0.2, 0.3, 0.4]}}}
        record = make.record(name, 0, "concrete", "mlp", "regression")
        make.write(tmp_path, record | {"figures": {"histograms": found}})
    (figure,) = (figure for figure in figures(group_of(tmp_path)) if figure.key == "epistemic-histogram")
    assert [panel.note for panel in figure.panels] == ["zero for all", ""]
    plain, rank1 = pooled_histograms([c.runs for c in group_of(tmp_path).contenders], "epistemic", rooted=True)
    assert plain.shares["test"][0] == pytest.approx(1.0)
    assert rank1.edges[-1] == pytest.approx(2e-15**0.5 * 2**0.5)


def test_a_curve_of_one_epoch_is_a_point(tmp_path):
    """The KL of a network that is converted for its last epoch."""
    history = [{"epoch": e, "loss": 3 - e / 10, "kl": 40.0 * (e == 3)} for e in (1, 2, 3)]
    found = next(figure for figure in figures(one_run(tmp_path, history=history)) if figure.key == "training")
    marks = {panel.title: panel.svg.count('class="marker') for panel in found.panels}
    assert marks == {"Loss, nats per input": 0, "KL, nats": 1}
    assert "epoch 3: 40" in next(panel.svg for panel in found.panels if panel.title == "KL, nats")


@pytest.mark.parametrize(("seconds", "shown"), [(30.0, False), (90.0, True)])
def test_a_limit_that_does_not_decide_is_not_shown(tmp_path, seconds, shown):
    make.tree(tmp_path, THREE)
    for path in tmp_path.rglob("result.json"):
        record = json.loads(path.read_text())
        record["cost"]["train_seconds"] = seconds
        path.write_text(json.dumps(record))
    found = next(figure for figure in figures(group_of(tmp_path)) if figure.key == "cost")
    training = next(panel for panel in found.panels if panel.title == "Training")
    assert ("limit 2" in training.svg) == shown
