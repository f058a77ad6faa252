"""The suites of nested dropout: trainings, equal evaluation, and tiny runs on the digits."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.core.conversion import stochastic_layers
from leanbayes_papers import SUITES
from leanbayes_papers.harness import Run
from leanbayes_papers.harness.suite import run_suite
from leanbayes_papers.nested import networks, student, tables, widths
from tests.papers.pages import few_rows, lacking, records_of, RESULTS

pytest.importorskip("matplotlib")

SUITE_NAMES = ("nested-widths", "nested-limited", "nested-student")
BY_CHANCE = 0.5  # points of accuracy that a width may lose to the next smaller one


@pytest.fixture
def two_epochs(monkeypatch):
    """Train for two epochs of 200 rows, with few widths, repeats and draws."""
    monkeypatch.setattr(Run, "source", few_rows)
    monkeypatch.setattr(widths, "WIDTHS", (0.5, 1.0))
    monkeypatch.setattr(
        tables, "ratios", lambda *given: {"train": 1.5, "test": 2.5}
    )  # of measure_cost, tested elsewhere
    monkeypatch.setattr(tables, "DRAWS", 5)
    monkeypatch.setattr(student, "SHARES", (0.5, 1.0))
    monkeypatch.setattr(student, "CORRELATED", (0.5, 1.0))
    monkeypatch.setattr(Run, "recipe", lambda self, recipe: replace(recipe, epochs=2, accelerator="cpu"))


def test_nested_networks_are_the_papers():
    bn3 = networks.spec(Run(budget="full"), "cifar10", "bn3", networks.bn3("cifar10"))
    assert (bn3.net, bn3.recipe.epochs, bn3.recipe.lr, bn3.recipe.milestones) == ("vgg11-bn", 600, 0.1, (150, 300, 450))
    assert (bn3.recipe.batch_size, bn3.recipe.anneal_epochs) == (128, 400)
    assert (bn3.method.groups, bn3.method.always_on, bn3.method.tail) == (32, 2, "learned")
    fixed = networks.fn3("cifar10")
    assert (fixed.tail, fixed.weight_noise) == ("categorical", False)


def test_an_individual_network_is_narrow_noisy_and_has_no_order():
    individual = networks.individual(Run(data=("digits",)), "digits", 0.5)
    model = individual.make(individual.load(individual.source), 0)
    convolutions = [m for m in lb.mean(model).modules() if isinstance(m, nn.Conv2d)]
    assert [conv.out_channels for conv in convolutions] == [16, 16, 16]
    assert not any(layer.ordered for _, layer in stochastic_layers(model))
    assert lb.kl(model) > 0


def test_sizes_are_those_of_the_mean_network():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    found = networks.size_of(lb.convert(net, lb.NestedDropout(groups=4, min_cut=0)), torch.zeros(1, 6))
    assert found == {"parameters": 6 * 8 + 8 + 8 * 3 + 3, "multiply_adds": 6 * 8 + 8 * 3}


def test_what_pruning_leaves_are_kept_weights_and_all_that_is_never_pruned():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    bnn = lb.convert(net, lb.VarianceLayers(parameterization="additive"))
    (_, layer), *others = stochastic_layers(bnn)
    with torch.no_grad():
        layer.posterior.log_sigma.fill_(-10.0)
        layer.posterior.log_sigma[:, :2] = 10.0
    pruned = lb.phase.prune(bnn)
    zeros = int((pruned.model[0].base.weight == 0).sum())
    assert not others
    assert zeros == 16
    assert tables.weights_left(pruned) == (6 * 8 + 8) + 2 * 8 + (8 * 3 + 3) - zeros


def test_times_are_written_from_the_smallest_to_the_largest_repeat():
    runs = [{"train": 2.5, "test": 6.6}, {"train": 2.0, "test": 6.1}, {"train": 2.25, "test": 6.4}]
    ours, paper = tables.TIMES.lines([{"method": "BN3"} | run for run in runs])
    assert ours == ["BN3", "ours", "2.00 to 2.50", "6.10 to 6.60"]
    assert paper == ["", "paper", "14.9", "-"]


PUBLISHED = {
    "widths": widths.TABLE,
    "times": tables.TIMES,
    "limited": tables.LIMITED,
    "student": student.TABLE,
    "correlation": student.CORRELATIONS,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_tables_are_those_of_their_files(name):
    assert lacking("nested", [PUBLISHED[name].lines(records_of("nested", f"{name}-cifar10"))]) == []


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("trials", ("accuracy", "nll")),
        ("longer", ("accuracy", "nll")),
        ("law", ("accuracy", "nll")),
        ("fashion-mnist", ("accuracy", "nll", "ece")),
    ],
)
def test_the_tables_of_the_page_are_those_of_their_files(name, fields):
    lines = (RESULTS / "nested.md").read_text().splitlines()
    for row, found in json.loads((RESULTS / "nested" / f"{name}.json").read_text())["rows"].items():
        cells = [", ".join(f"{one[f]:.{1 if f == 'accuracy' else 3}f}" for f in fields) for one in found.values()]
        assert any(line.startswith(f"| {row} |") and " | ".join(cells) in line for line in lines)


def test_the_layers_of_the_pruned_network_are_those_of_their_file():
    page, found = (RESULTS / "nested.md").read_text(), json.loads((RESULTS / "nested" / "svb.json").read_text())
    for path, layer in found["layers"].items():
        assert f"| {path} | {layer['weights']:,} | {layer['kept']:,} | {layer['outputs']} |\n" in page
    assert sum(layer["kept"] for layer in found["layers"].values()) == found["cuts"]["3"]["kept"]


@pytest.mark.parametrize("name", SUITE_NAMES)
def test_a_tiny_run_leaves_records_and_figures(name, two_epochs, tmp_path):
    run = Run(device="cpu", data=("digits",), out=tmp_path)
    outcome = run_suite(name, SUITES[name](run), run)
    assert outcome.complete
    assert not outcome.remarks
    for study in outcome.suite.studies:
        assert all(table.lines(outcome.records[study.name]) for table in study.tables)
        assert (tmp_path / "studies" / f"{study.name}.svg").read_text().lstrip().startswith("<?xml")
    trained = sorted((tmp_path / "trained").glob("*/seed0/checkpoint/*"))
    again = run_suite(name, SUITES[name](run), run)
    assert again.records == outcome.records
    assert trained == sorted((tmp_path / "trained").glob("*/seed0/checkpoint/*"))


@pytest.mark.slow
def test_widths_on_fashion_mnist_rise_with_width(tmp_path):
    """Half an hour on two cores: the claims of nested-widths that a small network can show."""
    run = Run(budget="short", device="cpu", data=("fashion-mnist",), out=tmp_path)
    if not run.has("fashion-mnist"):
        pytest.skip("needs the data folder (LEANBAYES_DATA)")
    outcome = run_suite("nested-widths", SUITES["nested-widths"](run), run)
    assert not outcome.remarks
    rows = outcome.records["widths-fashion-mnist"]
    accuracies = [row["accuracy"] for row in rows if row.get("method") == "BN3"]
    (plain,) = (row["accuracy"] for row in rows if row.get("method") == "plain")
    assert all(wide >= narrow - BY_CHANCE for narrow, wide in pairwise(accuracies))
    assert accuracies[-1] >= plain - 1.0


def test_the_file_of_the_widths_is_short():
    """docs/new_table.md changes the widths by one line of a file of at most 80 lines."""
    source = inspect.getsource(widths)
    assert "\nWIDTHS = (0.125, 0.25, 0.5, 0.75, 1.0)\n" in source
    assert len(source.splitlines()) <= 80


# ------------------------------------------------------------------------------------ the paper's VGG11


def test_the_papers_vgg11_is_wide_has_plain_linear_layers_and_is_cut_to_two_thirds(tmp_path):
    run = Run(budget="short", device="cpu", root=str(tmp_path))
    (study,) = SUITES["nested-vgg11"](run).studies
    fields, rows = study.measure.keywords, study.rows
    assert fields["share"] == pytest.approx(2 / 3)
    assert [width * fields["share"] * 32 for width in fields["widths"]][:: len(fields["widths"]) - 1] == [2, 32]
    assert {spec.recipe.epochs for spec in rows.values()} == {250}
    nested = {name: spec for name, spec in rows.items() if name.startswith("BN3")}
    assert {spec.net for spec in nested.values()} == {"vgg11-dense-w1.5"}
    laws = [(spec.method.tail, spec.method.prior) for spec in nested.values()]
    assert laws == [("learned", "chain"), ("learned", "uniform"), ("categorical", "chain")]
    assert all(spec.method.weight_noise for spec in nested.values())
    assert rows["plain"].net == "vgg11-dense"
    data = SimpleNamespace(num_outputs=10, input_shape=(3, 32, 32))
    wide, half = (rows[name].make(data, 0) for name in ("BN3, uniform tails", "IBNN 0.5"))
    for model, last in ((wide, 768), (half, 264)):  # 11 of 32 groups are the nearest to a third
        assert {path.partition(".")[0] for path, _ in lb.stochastic_layers(model)} == {"features"}
        assert [m.in_features for m in model.modules() if isinstance(m, nn.Linear)] == [last, 256]


def test_a_tiny_run_of_chosen_rows_of_the_papers_vgg11(two_epochs, tmp_path):
    run = Run(device="cpu", out=tmp_path, rows=("digits-bn3-uniform-prior", "digits-ibnn-0.5"))
    outcome = run_suite("nested-vgg11", SUITES["nested-vgg11"](run), run)
    assert outcome.complete
    assert outcome.rows == ["BN3, uniform prior", "IBNN 0.5"]
    methods = {row["method"] for row in outcome.records["vgg11-digits"]}
    assert methods == {"BN3, uniform prior", "DT-BN3, uniform prior", "IBNN", "BN3, uniform prior-MC"}
    widths_of = {row["width"] for row in outcome.records["vgg11-digits"]}
    assert {"0.09375", "1", "1.5"} <= widths_of
    assert (tmp_path / f"studies/vgg11-digits{run.part}.json").is_file()
