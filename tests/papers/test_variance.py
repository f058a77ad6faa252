"""The suites of variance networks: trainings, bounds by hand, sweeps in order, and tiny runs on the digits."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from leanbayes.core.conversion import stochastic_layers
from leanbayes.data import DataSet, Split
from leanbayes.methods.mc_dropout import DropoutLayer
from leanbayes.methods.variance import VarianceLayer
from leanbayes_papers import SUITES
from leanbayes_papers.harness import Run
from leanbayes_papers.harness.suite import run_suite
from leanbayes_papers.variance import adversarial, criterion
from leanbayes_papers.variance.criterion import around, CURVATURE_ROWS, shifted, thresholds
from leanbayes_papers.variance.networks import (
    FIRST_DENSE,
    kappa_factor,
    lenet,
    remove_dropout_before,
    TEST_ROWS,
    vgg,
    VGG_LAYERS,
)
from leanbayes_papers.variance.tables import bound, TABLE2, table_of, VERSIONS
from tests.papers.pages import few_rows, lacking, records_of, RESULTS

pytest.importorskip("matplotlib")


def images(*shape: int) -> DataSet:
    x = torch.randint(256, (40, *shape), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    split = Split(x, torch.arange(40) % 10)
    return DataSet("made up", "classification", split, split, tuple("abcdefghij"), "")


def quick(tmp_path) -> Run:
    return Run(device="cpu", root=str(tmp_path), data=("digits",), out=tmp_path)


def run_quickly(name: str, tmp_path):
    run = quick(tmp_path)
    outcome = run_suite(name, SUITES[name](run), run)
    assert outcome.remarks == []
    for study in outcome.suite.studies:
        assert (tmp_path / "studies" / f"{study.name}.svg").is_file()
    return outcome


@pytest.fixture
def tiny(monkeypatch):
    """Make every training two epochs of 200 rows."""
    monkeypatch.setattr(Run, "recipe", lambda self, recipe: replace(recipe, epochs=2, accelerator="cpu"))
    monkeypatch.setattr(Run, "source", few_rows)
    monkeypatch.setattr(criterion, "SHARES", (0.0, 0.5, 0.98))
    monkeypatch.setitem(TEST_ROWS, "quick", 100)
    monkeypatch.setitem(CURVATURE_ROWS, "quick", 10)


def paths(model: nn.Module, kind: type) -> list[str]:
    return [path for path, layer in stochastic_layers(model) if isinstance(layer, kind)]


# ------------------------------------------------------------------------------------ networks


def test_full_networks_are_the_papers(tmp_path):
    run = Run(budget="full", root=str(tmp_path))
    small = lenet(run, "one", lb.VarianceLayers(), layers=FIRST_DENSE)
    large = vgg(run, "cifar10", "two", lb.VarianceLayers(), layers=VGG_LAYERS)
    assert (small.net, small.recipe.epochs, small.recipe.batch_size) == ("lenet5-bn", 200, 200)
    assert (large.net, large.recipe.epochs, large.recipe.batch_size) == ("vgg-like-dropout", 550, 100)
    for recipe in (small.recipe, large.recipe):
        assert (recipe.optimizer, recipe.lr, recipe.posterior_lr) == ("adam", 1e-3, 1e-3)
        assert (recipe.weight_decay, recipe.anneal_epochs) == (0.0, 0.0)
    found = small.make(images(1, 28, 28), 0)
    (only,) = (layer for _, layer in stochastic_layers(found))
    assert tuple(only.base.weight.shape) == (500, 800)


def test_the_vgg_has_four_variance_layers_and_dropout_elsewhere(tmp_path):
    network = vgg(Run(root=str(tmp_path)), "cifar10", "two", lb.VarianceLayers(), layers=VGG_LAYERS)
    model = network.make(images(3, 32, 32), 0)
    layers = [layer.base for _, layer in stochastic_layers(model) if isinstance(layer, VarianceLayer)]
    assert [type(layer) for layer in layers] == [nn.Conv2d] * 3 + [nn.Linear]
    # Of eight dropouts among the convolutions, two are in front of the last two; of two in the head, one remains.
    assert len(paths(model, DropoutLayer)) == 6 + 1
    assert sum(isinstance(module, nn.Identity) for module in model.modules()) == 3
    assert isinstance(model.head[0], nn.Identity)


def test_dropout_goes_only_where_a_named_layer_follows():
    net = nn.Sequential(nn.Dropout(), nn.Linear(2, 2), nn.Dropout(), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    remove_dropout_before(net, ["4", "5"])
    assert [type(module).__name__ for module in net] == ["Dropout", "Linear", "Identity", "ReLU", "Linear", "Linear"]


def test_a_finished_training_is_read_and_another_setting_has_another_folder(tmp_path):
    run = quick(tmp_path)
    spec = lenet(run, "one", lb.VarianceLayers(), layers=FIRST_DENSE, curvature_rows=20)
    spec = replace(spec, recipe=replace(spec.recipe, epochs=2), source=few_rows(run, "digits"))
    first = run.train(spec, 0)
    assert [row["epoch"] for row in first.watched] == [1, 2]
    assert sum(first.watched[0]["kappa"]["layers.0"]["counts"]) == 500 * 64
    second = run.train(spec, 0)
    assert second.watched == first.watched
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    other = replace(spec, method=lb.VarianceLayers(prior="ard"))
    assert other.folder(tmp_path, 0) != spec.folder(tmp_path, 0)
    moved = replace(spec, source=replace(spec.source, root="elsewhere"))
    assert moved.folder(tmp_path, 0) == spec.folder(tmp_path, 0)


def test_kappa_is_that_of_all_training_rows():
    data = images(1, 8, 8)
    assert [kappa_factor(data, rows) for rows in (0, 10, 400)] == [1, 4, 1]
    row = {"epoch": 1, "kappa": {"a": {"edges": [-1.0, 0.0], "counts": [3.0]}}}
    assert shifted(row, 1.0)["kappa"]["a"] == {"edges": [0.0, 1.0], "counts": [3.0]}
    assert shifted({"epoch": 1}, 1.0) == {"epoch": 1}


# ------------------------------------------------------------------------------------ the bound


def made_model(**options) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return lb.convert(net, lb.VarianceLayers(**options), where=FIRST_DENSE[0])


def made_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(50, 4, generator=generator), torch.randint(3, (50,), generator=generator)


def test_the_bound_without_noise_is_that_of_the_plain_network():
    """log alpha = -20: sigma is 5e-5 of the weight, and Molchanov's formula gives 0.63576 + 10 for each of 24."""
    model, (x, y) = made_model(init_log_alpha=-20.0), made_data()
    found = bound(model, (x, y), passes=1)
    nll = F.cross_entropy(lb.mean(model).eval()(x), y, reduction="sum").item()
    k1, k2, k3 = 0.63576, 1.87320, 1.48695
    each = k1 - k1 / (1 + math.exp(-(k2 + k3 * -20))) + 0.5 * math.log1p(math.exp(20))
    assert found["kl"] == pytest.approx(24 * each, rel=1e-5)
    assert found["nll"] == pytest.approx(nll / 50, rel=1e-3)
    assert found["elbo"] == pytest.approx(-nll - 24 * each, rel=1e-4)


def test_the_bound_averages_log_likelihoods_over_noise():
    """By hand: b ~ N(W x, alpha (W^2)(x^2)) for every row, and the mean of log p, not the log of the mean."""
    model, (x, y) = made_model(init_log_alpha=1.0), made_data()
    passes = 400
    found = bound(model, (x, y), passes=passes, batch_size=17)
    weight, (_, norm, _, head) = model[0].base.weight.detach(), model
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(passes, 50, 6, generator=generator)
    b = x @ weight.T + noise * (math.e * x.square() @ weight.square().T).sqrt()
    with torch.no_grad():
        logits = head(F.relu(b / math.sqrt(1 + norm.eps)))
    each = F.cross_entropy(logits.flatten(0, 1), y.repeat(passes), reduction="none").view(passes, 50).mean(1)
    error = each.std() / math.sqrt(passes)
    assert found["nll"] == pytest.approx(each.mean().item(), abs=5 * math.sqrt(2) * error.item())


def test_the_bounds_of_student_and_log_uniform_priors_agree():
    data = made_data()
    for log_alpha in (-3.0, 1.0):
        one, other = (
            bound(made_model(prior=prior, init_log_alpha=log_alpha), data, passes=1)["kl"]
            for prior in ("log_uniform", "student")
        )
        assert other == pytest.approx(one, abs=24 * 0.01)  # the error of Molchanov's fit


# ------------------------------------------------------------------------------------ tiny runs


@pytest.mark.usefixtures("tiny")
def test_table_1_runs_on_the_digits(tmp_path):
    outcome = run_quickly("variance-table1", tmp_path)
    (study,) = outcome.suite.studies
    dropout, paper, variance, _ = study.tables[0].lines(outcome.records["table1-digits"])
    assert (dropout[0], dropout[-1], variance[0]) == ("Dropout", "-", "Variance")
    assert paper == ["", "paper", "99.1", "99.4", "99.4", "-"]
    assert variance[-1].startswith("layers.0 ")


@pytest.mark.usefixtures("tiny")
def test_parameterizations_run_on_the_digits(tmp_path):
    outcome = run_quickly("variance-parameterizations", tmp_path)
    lines = TABLE2.lines(outcome.records["parameterizations"])
    assert [line[0] for line in lines if line[0]] == list(VERSIONS)
    assert lines[1] == ["", "paper", "-5.9e2", "-", "-", "11.3", "99.2"]


@pytest.mark.usefixtures("tiny")
def test_the_criterion_runs_on_the_digits(tmp_path):
    outcome = run_quickly("variance-criterion", tmp_path)
    lines = criterion.EPOCHS.lines(outcome.records["criterion"])
    assert len(lines) == 3
    assert all(line[-1].replace(",", "").isdigit() for line in lines), "weights above kappa_0"
    records = outcome.records["sparse"]
    rows = [record for record in records if "kappa" in record]
    assert [row["kappa"] for row in rows] == sorted(row["kappa"] for row in rows)
    assert all(a["compression"] <= b["compression"] for a, b in itertools.pairwise(rows))
    assert all(a["kept"] >= b["kept"] for a, b in itertools.pairwise(rows))
    full = next(record["accuracy"] for record in records if record.get("network") == "full ensemble")
    assert rows[0]["mean"] == rows[0]["zero"] == full  # nothing is replaced
    assert len(list((tmp_path / "trained").iterdir())) == 1, "the studies share one network"


@pytest.mark.usefixtures("tiny")
def test_attacks_run_on_the_digits(tmp_path):
    records = run_quickly("variance-adversarial", tmp_path).records["adversarial"]
    assert len(records) == 5 * 6
    summary = adversarial.summary(records)
    for row in summary:
        assert row["success clean"] == 0
        assert row["success end"] > 0
        assert 0 <= row["entropy most"] <= math.log(10)
    assert len(adversarial.TABLE.lines(records)) == 5


def test_full_attacks_are_the_papers():
    assert (adversarial.SAMPLES, adversarial.MEMBERS["full"], adversarial.STEP_SIZE["full"]) == (10, 5, 0.5)
    data = images(3, 8, 8)
    step = lb.shift.pixel_units(data.mean, data.std, levels=adversarial.LEVELS).change(0.5, torch.zeros(1))
    other = data.test.x.float() + 0.5
    moved = (other / 255 - data.mean.view(3, 1, 1)) / data.std.view(3, 1, 1)
    torch.testing.assert_close(data.inputs(data.test.x) + step, moved.float())


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ([0.8, 0.9, 0.88, 0.3, 0.1], {"before": 3, "during": 4, "after": 5}),
        ([0.8, 0.1, 0.9, 0.88, 0.1], {"before": 4, "during": 5, "after": 5}),  # a fall that does not last is none
        ([0.8, 0.9, 0.88, 0.85, 0.9], {"first": 1, "middle": 3, "last": 5}),
        ([0.8], {"first": 1, "middle": 1, "last": 1}),
    ],
)
def test_epochs_around_the_transition(means, expected):
    rows = [{"epoch": k + 1, "deterministic": value} for k, value in enumerate(means)]
    assert {row["phase"]: row["epoch"] for row in around(rows)} == expected


def test_thresholds_replace_the_shares_they_should():
    scores = {"a": torch.arange(600.0), "b": torch.arange(600.0, 1000.0)}
    found = thresholds(scores)
    assert found == sorted([*(share * 1000 for share in (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995)), 999, 10**1.5])


def test_suites_share_the_networks_of_cifar(tmp_path):
    run = Run(budget="short", root=str(tmp_path))
    tables, figures, attacks = (SUITES[f"variance-{name}"](run) for name in ("table1", "criterion", "adversarial"))
    figure = figures.studies[0].measure.keywords["spec"]
    ours = {spec.folder(tmp_path, 0) for spec in tables.studies[1].measure.keywords["specs"].values()}
    theirs = attacks.studies[0].measure.keywords["specs"]
    assert figure.folder(tmp_path, 0) in ours
    assert {theirs[name].folder(tmp_path, 0) for name in ("dropout", "variance")} == ours


def test_every_data_set_has_a_study(tmp_path):
    suite = SUITES["variance-table1"](Run(budget="short", root=str(tmp_path)))
    assert [study.data for study in suite.studies] == [("mnist",), ("cifar10",), ("cifar100",)]


# ------------------------------------------------------------------------------------ the published page

PAGE = RESULTS / "variance.md"
PUBLISHED = {
    "table1-mnist": table_of("mnist", "mnist", {}).tables,
    "table1-cifar10": table_of("cifar10", "cifar10", {}).tables,
    "transition-cifar10": (criterion.EPOCHS,),
    "adversarial": (adversarial.TABLE,),
    "parameterizations": (TABLE2,),
    "criterion-short": (criterion.EPOCHS,),
    "sparse-short": (criterion.SWEEP, criterion.REFERENCES),
    "sparse": (criterion.SWEEP, criterion.REFERENCES),
}


def published(name: str) -> dict:
    return json.loads((PAGE.parent / "variance" / f"{name}.json").read_text())["numbers"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_tables_are_those_of_their_files(name):
    records = records_of("variance", name)
    assert lacking("variance", [table.lines(records) for table in PUBLISHED[name]]) == []
    assert f"(variance/{name}.svg)" in PAGE.read_text()


def test_every_published_file_is_on_the_page():
    """The rows of the transition on MNIST are those of a training, not of a study."""
    assert {path.stem for path in (PAGE.parent / "variance").glob("*.json")} == {*PUBLISHED, "transition-mnist"}
    assert {path.stem for path in (PAGE.parent / "variance").glob("*.svg")} == {*PUBLISHED, "transition-mnist"}


@pytest.mark.parametrize(
    ("name", "layers", "epochs"),
    [
        ("transition-cifar10", ("features.48", "head.1"), (1, 5, 9, 13, 16, 20, 25, 30)),
        ("transition-mnist", ("head.0",), (1, 33, 65, 81, 97, 113, 129, 200)),
    ],
)
def test_the_published_transitions_are_those_of_their_files(name, layers, epochs):
    found = json.loads((PAGE.parent / "variance" / f"{name}.json").read_text())
    seen = {row["epoch"]: row for row in (found if isinstance(found, list) else found["numbers"]["epochs"])}
    rows = []
    for row in (seen[epoch] for epoch in epochs):
        alphas = (f"{row['log_alpha'][layer]:.1f}" for layer in layers)
        rows.append(
            [str(row["epoch"]), *alphas, *(f"{100 * row[kind]:.1f} %" for kind in ("deterministic", "ensemble"))]
        )
    assert lacking("variance", [rows]) == []


def test_the_published_table_of_sparse_ensembles_is_that_of_its_files():
    sweeps = [published(name) for name in ("sparse-short", "sparse")]
    rows = []
    for share in (0.9, 0.95, 0.98, 0.99):
        cells = []
        for sweep in sweeps:
            (row,) = (row for row in sweep["thresholds"] if row["share"] == share)
            cells += [f"{row[kind]:.2f} ({sweep['ensemble'] - row[kind]:.2f})" for kind in ("zero", "mean")]
        rows.append([f"{100 * share:.0f} %", *cells])
    short, full = (f"(means alone {sweep['deterministic']:.1f})" for sweep in sweeps)
    rows.append(["Replaced, one seed", f"*short* {short}: zeros", "means", f"200 epochs {full}: zeros", "means"])
    assert lacking("variance", [rows]) == []


def test_the_published_page_does_not_say_more_of_sparse_ensembles_than_was_tested():
    short, full = (published(name) for name in ("sparse-short", "sparse"))
    costs = [
        sweep["ensemble"] - row[kind]
        for kind in ("zero", "mean")
        for sweep in (short, full)
        for row in sweep["thresholds"]
        if row["share"] == 0.98
    ]
    page = " ".join(PAGE.read_text().split())
    assert f"(its means alone have {short['deterministic']:.1f} and {full['deterministic']:.1f} %; a guess" in page
    told = "cost {:.2f} and {:.2f} points as zeros, {:.2f} and {:.2f} as means.".format(*costs)
    assert f"The 98 % that the paper replaces without loss {told}" in page
    assert "Not tested yet: that 98 % of the weights can go without loss" in page
