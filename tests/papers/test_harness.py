"""The harness: well-formed suites, numbers as printed, records, tables and gains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import leanbayes_papers
from leanbayes_papers import SUITES
from leanbayes_papers.harness import Column, Printed, printed, Run, Suite, Table, TrainingSpec
from leanbayes_papers.harness.numbers import _row
from leanbayes_papers.harness.results import gains, verdict
from leanbayes_papers.harness.run import MEASURES
from leanbayes_papers.rank1.networks import count, equal_parameters

SHAPES = {
    "digits": ((1, 8, 8), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "fashion-mnist": ((1, 28, 28), 10),
}
BUDGETS = ("quick", "short", "full")
CIFAR = {"num_outputs": 10, "input_shape": (3, 32, 32)}


def row(suite: Suite, study: str, name: str) -> TrainingSpec:
    """Return the network of a row of a comparison."""
    (found,) = (one for one in suite.studies if one.name == study)
    return found.measure.keywords["specs"][name]


# ------------------------------------------------------------------------------------ declarations


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", SUITES)
def test_suites_are_well_formed(name, budget, tmp_path):
    suite = SUITES[name](Run(budget=budget, root=str(tmp_path)))
    jobs = list(dict.fromkeys(job for study in suite.studies for job in study.jobs((0, 1))))
    folders = [job.folder(tmp_path) for job in jobs]
    assert len(set(folders)) == len(folders), "two versions under one label"
    assert all(job.label for job in jobs)
    for data, net in {(job.source.name, job.net) for job in jobs}:
        shape, classes = SHAPES[data]
        assert count(net, num_outputs=classes, input_shape=shape) > 0
    assert len({study.name for study in suite.studies}) == len(suite.studies)
    for study in suite.studies:
        assert study.claim.endswith((".", ")"))
        for table in study.tables:
            assert all(set(numbers) <= {column.name for column in table.columns} for numbers in table.paper.values())
            compared = study.specs and table.by == ("name",)
            assert not compared or table.paper or "without printed numbers" in study.claim


@pytest.mark.parametrize("name", SUITES)
def test_the_first_line_of_a_suite_says_what_it_repeats(name):
    line = SUITES[name].__doc__.splitlines()[0]
    assert line.endswith(".")
    assert "Table" in line or "Figure" in line


def test_the_readme_lists_every_suite_and_file():
    package = Path(leanbayes_papers.__file__).parent
    readme = (package / "README.md").read_text()
    assert [name for name in SUITES if f"| {name} |" not in readme] == []
    files = {suite.__module__.removeprefix("leanbayes_papers.").replace(".", "/") + ".py" for suite in SUITES.values()}
    assert [file for file in files if f"| {file} |" not in readme] == []


def test_quick_budgets_are_small(tmp_path):
    for suite in SUITES.values():
        for study in suite(Run(root=str(tmp_path))).studies:
            for spec in study.specs:
                assert 0 < spec.source.train_rows <= 2000
                assert spec.recipe.epochs <= 6


def test_full_rank1_has_the_papers_hyper_parameters(tmp_path):
    suite = SUITES["rank1-cifar"](Run(budget="full", root=str(tmp_path)))
    spec = row(suite, "table2", "Rank-1 BNN, Gaussian")
    recipe, method = spec.recipe, spec.method
    assert (spec.net, method.components, recipe.epochs, recipe.batch_size) == ("wrn-28-10", 4, 250, 128)
    assert (recipe.lr, recipe.posterior_lr, recipe.momentum, recipe.warmup_epochs) == (0.1, 0.1, 0.9, 1)
    assert (recipe.schedule, recipe.milestones, recipe.decay) == ("step", (100, 200, 225), 0.2)
    assert (recipe.weight_decay, recipe.anneal_epochs, recipe.tile, recipe.convert_at_epoch) == (2e-4, 200, True, 0)
    assert (method.init, method.sign_probability, method.prior_std) == ("random_sign", 0.5, 0.1)
    assert method.init_std == pytest.approx(math.sqrt(1e-3 / (1 - 1e-3)), abs=1e-4)
    assert spec.evaluation.samples == 4
    cauchy = row(suite, "table2", "Rank-1 BNN, Cauchy")
    assert (cauchy.method.posterior, cauchy.method.prior, cauchy.evaluation.samples) == ("cauchy", "cauchy", 16)
    batch_ensemble = row(suite, "table2", "BatchEnsemble")
    assert batch_ensemble.method.init_spread == 0.5
    assert batch_ensemble.recipe.posterior_lr == 0.05
    assert batch_ensemble.recipe.weight_decay == pytest.approx(6e-4)
    assert row(suite, "table2", "Deep ensemble, equal parameters").net == "wrn-28-5"


def test_full_k_sweep_keeps_the_rows_of_all_components_together(tmp_path):
    suite = SUITES["rank1-ablations"](Run(budget="full", root=str(tmp_path)))
    figures = {study.name: study.measure.keywords["specs"] for study in suite.studies[:3]}
    assert list(figures["figure3"]) == ["K = 1", "K = 2", "K = 4", "K = 8", "K = 16"]
    for spec in figures["figure3"].values():
        assert spec.recipe.batch_size * spec.method.components == 512
        assert spec.recipe.lr == pytest.approx(0.1 * spec.recipe.batch_size / 128)
        assert spec.evaluation.samples == spec.method.components
    assert figures["figure3"]["K = 4"] is figures["figure2"]["both"]
    assert [spec.method.factors for spec in figures["figure2"].values()] == ["input", "output", "both"]
    assert [spec.method.other for spec in figures["figure2"].values()] == ["point", "point", "none"]
    assert [spec.recipe.aggregate for spec in figures["figure4"].values()] == ["average", "mixture"]
    watched = {spec.name for study in suite.studies for spec in study.specs if spec.watch is not None}
    assert watched == {"rank1-both", "rank1-mixture", "batch_ensemble"}


@pytest.mark.parametrize(
    ("study", "net", "values"),
    [  # lr, posterior lr, spread of the means, prior std, weight decay: Table 2 of the paper
        ("tables3-5-cifar10-vgg-16", "vgg16", (0.05, 1.2, 0.75, 0.3, 5e-4)),
        ("tables3-5-cifar10-wrn-28-10", "wrn-28-10", (0.1, 2.4, 0.5, 0.1, 5e-4)),
        ("tables3-5-cifar100-vgg-16", "vgg16", (0.05, 1.6, 0.75, 0.3, 3e-4)),
        ("tables3-5-cifar100-wrn-28-10", "wrn-28-10", (0.1, 4.8, 0.5, 0.1, 5e-4)),
    ],
)
def test_full_implicit_has_the_papers_hyper_parameters(study, net, values, tmp_path):
    spec = row(SUITES["implicit-cifar"](Run(budget="full", root=str(tmp_path))), study, "iBNN-8")
    recipe, method = spec.recipe, spec.method
    found = (recipe.lr, recipe.posterior_lr, method.init_spread, method.prior_std, recipe.weight_decay)
    assert (spec.net, found) == (net, values)
    assert (recipe.epochs, recipe.batch_size, recipe.samples, recipe.anneal_epochs) == (300, 128, 2, 200)
    assert (recipe.schedule, recipe.posterior_schedule, recipe.convert_at_epoch) == ("linear", "constant", 0)
    assert (method.centre, recipe.deal) == (False, "draws")
    assert (method.components, method.init_std, spec.evaluation.samples) == (8, 0.05, 40)


def test_the_same_networks_serve_tables_and_noise(tmp_path):
    run = Run(root=str(tmp_path))
    tables, noise = (
        {job.id for study in SUITES[f"implicit-{name}"](run).studies for job in study.jobs((0,))}
        for name in ("cifar", "noise")
    )
    assert noise <= tables


def test_papers_numbers():
    """Some numbers of each table, copied from the papers a second time."""
    values = {name: found.value for name, found in printed("rank1", "table2")["Deep ensemble"].items()}
    expected = {"nll": 0.114, "accuracy": 96.6, "ece": 0.010, "c_nll": 0.81, "c_accuracy": 77.9, "c_ece": 0.087}
    assert values == expected | {"parameters": 146}
    assert printed("rank1", "table2")["Rank-1 BNN, Cauchy"]["c_accuracy"].value == 80.5
    assert printed("rank1", "table3")["Rank-1 BNN, Gaussian"]["nll"].value == 0.692
    assert printed("rank1", "table3")["MFVI BNN"]["ece"].value == 0.111
    assert printed("implicit", "cifar100 WRN-28-10")["iBNN-16"]["nll"] == Printed("0.6440±0.0049")
    assert printed("implicit", "cifar10 WRN-28-10")["SGD"]["error"].value == 3.53
    assert printed("implicit", "cifar100 VGG-16")["BNN-VI"]["ece"].spread == 0.0016
    assert printed("implicit", "cifar10 VGG-16")["MC-dropout"]["nll"].value == 0.2887
    assert printed("variance", "table1 cifar100")["Variance"]["ensemble"].value == 82.2
    assert printed("variance", "table2")["Weight"]["elbo"].value == -6.4e4
    assert printed("nested", "table1")["BN3-MC"]["used"] == Printed("46±27")


def test_table_6_is_on_cifar100_where_it_is_here(tmp_path, monkeypatch):
    def table6():
        (found,) = (
            one for one in SUITES["implicit-complexity"](Run(root=str(tmp_path))).studies if one.name == "table6"
        )
        return found

    assert table6().needs == {"cifar10"}
    assert [key for (key,) in table6().tables[0].paper] == ["K = 4", "K = 8", "K = 16"]
    monkeypatch.setattr(Run, "has", lambda self, name, ood=False: True)
    assert table6().needs == {"cifar100"}
    assert table6().tables[0].paper["K = 24",]["nll"] == Printed("1.0467±0.0184")


# ------------------------------------------------------------------------------------ equal parameters


@pytest.mark.parametrize(
    ("net", "members", "tolerance"), [("wrn-16-4", 4, 0.02), ("lenet-w2", 3, 0.02), ("lenet", 4, 0.03)]
)
def test_narrow_members_have_the_parameters_of_one_network(net, members, tolerance):
    narrow = equal_parameters(net, members, **CIFAR)
    assert members * count(narrow, **CIFAR) == pytest.approx(count(net, **CIFAR), rel=tolerance)


def test_one_member_is_as_wide_as_the_network():
    assert equal_parameters("wrn-16-2", 1, **CIFAR) == "wrn-16-2"


def test_only_networks_of_any_width_can_be_narrowed():
    with pytest.raises(ValueError, match=r"expected a network that comes in any width, .* got 'vgg16'"):
        equal_parameters("vgg16", 4, **CIFAR)


# ------------------------------------------------------------------------------------ tables

TABLE = Table(
    title="Table 9",
    by=("name",),
    columns=(
        Column("error", "error, %", ".2f", sign=-1),
        Column("nll", "NLL", ".4f", sign=-1),
        Column("ece", "ECE", ".4f"),
    ),
    paper={("SGD",): {"error": Printed("3.50±0.11"), "nll": Printed("0.128")}},
)
# Errors of 10 and 20 %: mean 15, deviation sqrt(50), standard error sqrt(50 / 2) = 5. NLLs of 0.1 and 0.3: mean 0.2,
# deviation sqrt(0.02), standard error 0.1.
RECORDS = [
    {"name": "SGD", "seed": 0, "error": 10.0, "nll": 0.1},
    {"name": "SGD", "seed": 1, "error": 20.0, "nll": 0.3},
    {"name": "iBNN", "seed": 0, "error": 5.0, "nll": 0.05, "ece": None},
    {"other": "a record of another table"},
]


def test_ours_is_above_the_papers():
    assert TABLE.lines(RECORDS) == [
        ["SGD", "ours", "15.00 ± 5.00", "0.2000 ± 0.1000", "-"],
        ["", "paper", "3.50 ± 0.11", "0.128", "-"],
        ["iBNN", "ours", "5.00", "0.0500", "-"],
    ]
    page = TABLE.markdown(RECORDS)
    assert page.startswith("### Table 9\n\n|  |  | error, % | NLL | ECE |\n| --- | --- | ---: | ---: | ---: |\n")
    assert "| SGD | ours | 15.00 ± 5.00 |" in page


def test_the_record_holds_the_numbers():
    first = TABLE.record(RECORDS)["rows"][0]
    assert first["paper"] == {"error": {"value": 3.5, "spread": 0.11}, "nll": {"value": 0.128, "spread": None}}
    assert set(first["ours"]) == {"error", "nll"}
    assert first["ours"]["error"] == {"mean": pytest.approx(15), "sem": pytest.approx(5), "count": 2}


def test_errors_have_the_decimals_of_their_means():
    runs = [{"x": 1.0}, {"x": 3.0}]
    assert Column("x", "", "#.4g", error="std").cell(runs) == "2.000 ± 1.414"
    assert Column("x", "", "#.4g", error="sem").cell(runs) == "2.000 ± 1.000"
    assert Column("x", "", ",.0f", 1000, error="").cell(runs) == "2,000"
    assert Column("x", "", text=lambda rows: f"{len(rows)} runs").cell(runs) == "2 runs"


def test_gains_are_over_pairs_and_point_to_the_better():
    values = {"SGD": (0.3, 0.4, 0.5), "other": (0.28, 0.39, 0.48)}
    records = [{"name": name, "seed": k, "nll": v} for name, row in values.items() for k, v in enumerate(row)]
    found = gains([*records, {"name": "without a seed", "nll": 1.0}], by="name", baseline="SGD")
    assert [round(record["nll"], 6) for record in found] == [-0.02, -0.01, -0.02]
    less, more = (Table.of_gains("name", "SGD", (Column("nll", "", ".4f", sign=s),), title="") for s in (-1, 1))
    assert less.lines(records) == [["other", "better (+0.0167 ± 0.0033)"]]
    assert more.lines(records) == [["other", "worse (-0.0167 ± 0.0033)"]]
    assert less.lines(records[:1] + records[3:4]) == [["other", "level (+0.0200)"]], "one seed decides nothing"
    assert verdict(Column("nll", "").estimate(records[:3])) == "better"


def test_a_line_of_a_paper_must_have_a_number_for_every_column():
    with pytest.raises(ValueError, match="row 'SGD': expected 1 numbers, got 2; write - for a missing one"):
        _row(["nll"], "0.1 0.2", "SGD")
    assert _row(["nll", "ece"], "- 0.2", "SGD") == {"ece": Printed("0.2")}


def made_up(accuracy: float, shift=()) -> dict:
    return {
        "metrics": {"test": {"accuracy": accuracy, "nll": 0.1, "ece": None}, "shift": list(shift)},
        "cost": {"parameters": 2_000_000, "extra_parameters": 500_000},
    }


def test_measures_are_read_from_results():
    rows = [{"corruption": "clean", "severity": 0, "accuracy": 1.0, "nll": 0.1, "ece": 0.0}]
    rows += [{"corruption": "fog", "severity": 1, "accuracy": a, "nll": 1.0, "ece": 0.1} for a in (0.5, 0.6)]
    found = {name: read(made_up(0.9, rows)) for name, (_, read) in MEASURES.items()}
    assert found["accuracy"] == pytest.approx(90)
    assert found["error"] == pytest.approx(10)
    assert found["c_accuracy"] == pytest.approx(55)
    assert found["parameters"] == 2.5
    assert found["ece"] is None
    assert MEASURES["c_nll"][1](made_up(0.9)) is None
