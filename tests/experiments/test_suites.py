"""The papers' tables and figures: well-formed jobs, numbers as printed, and ours beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from leanbayes.compare.job import DataSpec, Job
from leanbayes.training import Recipe
from leanbayes_papers import SUITES
from leanbayes_papers.equal import count, equal_parameters
from leanbayes_papers.implicit_cifar import numbers_of
from leanbayes_papers.suite import Printed, printed, Row, seeded, Setting, Suite, Table
from leanbayes_papers.table import as_record, lines_of, markdown, MEASURES, rich_table

SHAPES = {
    "digits": ((1, 8, 8), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "fashion-mnist": ((1, 28, 28), 10),
}
BUDGETS = ("quick", "short", "full")
CIFAR = {"num_outputs": 10, "input_shape": (3, 32, 32)}


def jobs_of(suite: Suite, seeds=(0,)) -> list[Job]:
    rows = [row.job for table in suite.tables for row in table.rows]
    return seeded([*rows, *(job for study in suite.studies for job in study.jobs)], seeds)


def row_of(suite: Suite, table: int, name: str) -> Row:
    return next(row for row in suite.tables[table].rows if row.name == name)


# ------------------------------------------------------------------------------------ declarations


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", SUITES)
def test_suites_are_well_formed(name, budget, tmp_path):
    suite = SUITES[name](Setting(budget=budget, root=str(tmp_path)))
    jobs = jobs_of(suite, seeds=(0, 1))
    folders = [job.folder(tmp_path) for job in jobs]
    assert len(set(folders)) == len(folders), "two versions under one label"
    assert all(job.label for job in jobs)
    for data, net in {(job.source.name, job.net) for job in jobs}:
        shape, classes = SHAPES[data]
        assert count(net, num_outputs=classes, input_shape=shape) > 0
    assert suite.watched <= {job.label for job in jobs}
    for table in suite.tables:
        assert set(table.measures) <= set(MEASURES)
        assert table.claim.endswith(".")
        printed_somewhere = any(row.paper for row in table.rows)
        assert printed_somewhere or "without printed numbers" in table.claim
        assert all(set(row.paper) <= set(table.measures) for row in table.rows)
    assert len({study.name for study in suite.studies}) == len(suite.studies)


@pytest.mark.parametrize("name", SUITES)
def test_the_first_line_of_a_suite_says_what_it_repeats(name):
    line = SUITES[name].__doc__.splitlines()[0]
    assert line.endswith(".")
    assert "Table" in line or "Figure" in line


def test_quick_budgets_are_small(tmp_path):
    for suite in SUITES.values():
        for job in jobs_of(suite(Setting(root=str(tmp_path)))):
            assert 0 < job.source.train_rows <= 2000
            assert job.recipe.epochs <= 6


def test_full_rank1_has_the_papers_hyper_parameters(tmp_path):
    suite = SUITES["rank1-cifar"](Setting(budget="full", root=str(tmp_path)))
    job = row_of(suite, 0, "Rank-1 BNN, Gaussian").job
    recipe = job.recipe
    assert (job.net, job.method.components, recipe.epochs, recipe.batch_size) == ("wrn-28-10", 4, 250, 128)
    assert (recipe.lr, recipe.posterior_lr, recipe.momentum, recipe.warmup_epochs) == (0.1, 0.1, 0.9, 1)
    assert (recipe.schedule, recipe.milestones, recipe.decay) == ("step", (100, 200, 225), 0.2)
    assert (recipe.weight_decay, recipe.anneal_epochs, recipe.tile, recipe.convert_at_epoch) == (2e-4, 200, True, 0)
    assert (job.method.init, job.method.sign_probability, job.method.prior_std) == ("random_sign", 0.5, 0.1)
    assert job.method.init_std == pytest.approx(math.sqrt(1e-3 / (1 - 1e-3)), abs=1e-4)
    assert job.evaluation.samples == 4
    cauchy = row_of(suite, 0, "Rank-1 BNN, Cauchy").job
    assert (cauchy.method.posterior, cauchy.method.prior, cauchy.evaluation.samples) == ("cauchy", "cauchy", 16)
    batch_ensemble = row_of(suite, 0, "BatchEnsemble").job
    assert batch_ensemble.method.init_spread == 0.5
    assert batch_ensemble.recipe.posterior_lr == 0.05
    assert batch_ensemble.recipe.weight_decay == pytest.approx(6e-4)
    assert row_of(suite, 0, "Deep ensemble, equal parameters").job.net == "wrn-28-5"


def test_full_k_sweep_keeps_the_rows_of_all_components_together(tmp_path):
    suite = SUITES["rank1-ablations"](Setting(budget="full", root=str(tmp_path)))
    sweep = {row.name: row.job for row in suite.tables[1].rows}
    assert list(sweep) == ["K = 1", "K = 2", "K = 4", "K = 8", "K = 16"]
    for job in sweep.values():
        assert job.recipe.batch_size * job.method.components == 512
        assert job.recipe.lr == pytest.approx(0.1 * job.recipe.batch_size / 128)
        assert job.evaluation.samples == job.method.components
    assert sweep["K = 4"] is row_of(suite, 0, "both").job
    factors = [row.job.method.factors for row in suite.tables[0].rows]
    assert factors == ["input", "output", "both"]
    assert [row.job.recipe.aggregate for row in suite.tables[2].rows] == ["average", "mixture"]


@pytest.mark.parametrize(
    ("table", "net", "values"),
    [  # lr, posterior lr, spread of the means, prior std, weight decay: Table 2 of the paper
        (0, "vgg16", (0.05, 1.2, 0.75, 0.3, 5e-4)),
        (1, "wrn-28-10", (0.1, 2.4, 0.5, 0.1, 5e-4)),
        (2, "vgg16", (0.05, 1.6, 0.75, 0.3, 3e-4)),
        (3, "wrn-28-10", (0.1, 4.8, 0.5, 0.1, 5e-4)),
    ],
)
def test_full_implicit_has_the_papers_hyper_parameters(table, net, values, tmp_path):
    suite = SUITES["implicit-cifar"](Setting(budget="full", root=str(tmp_path)))
    job = row_of(suite, table, "iBNN-8").job
    recipe, method = job.recipe, job.method
    found = (recipe.lr, recipe.posterior_lr, method.init_spread, method.prior_std, recipe.weight_decay)
    assert (job.net, found) == (net, values)
    assert (recipe.epochs, recipe.batch_size, recipe.samples, recipe.anneal_epochs) == (300, 128, 2, 200)
    assert (recipe.schedule, recipe.posterior_schedule, recipe.convert_at_epoch) == ("linear", "constant", 0)
    assert (method.components, method.init_std, job.evaluation.samples) == (8, 0.05, 40)


def test_the_same_networks_serve_tables_and_noise(tmp_path):
    setting = Setting(root=str(tmp_path))
    tables = {job.id for job in jobs_of(SUITES["implicit-cifar"](setting))}
    assert {job.id for job in jobs_of(SUITES["implicit-noise"](setting))} <= tables


def test_papers_numbers(tmp_path):
    """Some numbers of each table, copied from the papers a second time."""
    rank1 = SUITES["rank1-cifar"](Setting(root=str(tmp_path)))
    values = {name: found.value for name, found in row_of(rank1, 0, "Deep ensemble").paper.items()}  # Table 2, last row
    expected = {"nll": 0.114, "accuracy": 96.6, "ece": 0.010, "c_nll": 0.81, "c_accuracy": 77.9, "c_ece": 0.087}
    assert values == expected | {"parameters": 146}
    assert row_of(rank1, 0, "Rank-1 BNN, Cauchy").paper["c_accuracy"].value == 80.5
    assert row_of(rank1, 1, "Rank-1 BNN, Gaussian").paper["nll"].value == 0.692
    assert row_of(rank1, 1, "MFVI BNN").paper["ece"].value == 0.111
    assert numbers_of("iBNN-16", "cifar100", "WRN-28-10")["nll"] == Printed("0.6440±0.0049")
    assert numbers_of("SGD", "cifar10", "WRN-28-10")["error"].value == 3.53
    assert numbers_of("BNN-VI", "cifar100", "VGG-16")["ece"].spread == 0.0016
    assert numbers_of("MC-dropout", "cifar10", "VGG-16")["nll"].value == 0.2887
    assert numbers_of("iBNN-32", "cifar10", "VGG-16") == {}


def test_table_6_is_on_cifar100_where_it_is_here(tmp_path, monkeypatch):
    sizes = SUITES["implicit-complexity"](Setting(root=str(tmp_path))).tables[1]
    assert {row.job.source.name for row in sizes.rows} == {"cifar10"}
    assert [bool(row.paper) for row in sizes.rows] == [True, True, True, False, False]
    monkeypatch.setattr(Setting, "has", lambda self, name, foreign=False: True)
    sizes = SUITES["implicit-complexity"](Setting(root=str(tmp_path))).tables[1]
    assert {row.job.source.name for row in sizes.rows} == {"cifar100"}
    assert sizes.rows[3].paper["nll"] == Printed("1.0467±0.0184")


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


def made_up(accuracy: float, nll: float, *, shift=(), parameters=(2_000_000, 500_000)) -> dict:
    return {
        "metrics": {"test": {"accuracy": accuracy, "nll": nll, "ece": None}, "shift": list(shift)},
        "cost": {"parameters": parameters[0], "extra_parameters": parameters[1]},
    }


def made_up_table() -> Table:
    job = Job(source=DataSpec(name="digits"), net="small", method=None, label="plain", recipe=Recipe())
    measures = ("error", "nll", "ece", "c_accuracy", "parameters")
    rows = (
        Row(name="SGD", job=job, paper=printed(measures, "3.50±0.11 0.128 0.0165 - 36.5")),
        Row(name="iBNN", job=replace(job, label="implicit"), paper={}),
    )
    return Table(title="Table 9", measures=measures, rows=rows, claim="it is so.")


def corrupted(*accuracies: float) -> list[dict]:
    rows = [{"corruption": "clean", "severity": 0, "accuracy": 1.0, "nll": 0.1, "ece": 0.0}]
    return rows + [{"corruption": "fog", "severity": 1, "accuracy": a, "nll": 1.0, "ece": 0.1} for a in accuracies]


RESULTS = {
    # Errors of 10 and 20 %: mean 15, deviation sqrt(50), standard error sqrt(50 / 2) = 5. NLLs of 0.1 and 0.3: mean
    # 0.2, deviation sqrt(0.02), standard error 0.1. Corrupted accuracies of 55 and 65 %: mean 60, standard error 5.
    "plain": [made_up(0.9, 0.1, shift=corrupted(0.5, 0.6)), made_up(0.8, 0.3, shift=corrupted(0.6, 0.7))],
    "implicit": [made_up(0.95, 0.05)],
}


def results_of(row: Row) -> list[dict]:
    return RESULTS[row.job.label]


def test_ours_stands_beside_the_papers():
    assert lines_of(made_up_table(), results_of) == [
        ["SGD", "ours", "15.00 ± 5.00", "0.2000 ± 0.1000", "-", "60.0 ± 5.0", "2.500 ± 0.000"],
        ["", "paper", "3.50 ± 0.11", "0.128", "0.0165", "-", "36.5"],
        ["iBNN", "ours", "5.00", "0.0500", "-", "-", "2.500"],
    ]


def test_the_record_holds_the_numbers():
    first = as_record(made_up_table(), results_of)["rows"][0]
    assert first["paper"] == {
        "error": {"value": 3.5, "spread": 0.11},
        "nll": {"value": 0.128, "spread": None},
        "ece": {"value": 0.0165, "spread": None},
        "parameters": {"value": 36.5, "spread": None},
    }
    assert set(first["ours"]) == {"error", "nll", "c_accuracy", "parameters"}
    assert first["ours"]["error"] == {"mean": pytest.approx(15), "sem": pytest.approx(5), "count": 2}
    assert (first["data"], first["net"], first["label"]) == ("digits", "small", "plain")


def test_markdown_and_terminal_say_the_same(capsys):
    from rich.console import Console

    table = made_up_table()
    page = markdown(table, results_of)
    assert page.startswith("## Table 9\n\n|  |  | error, % | NLL | ECE | corr. acc., % | parameters, M |\n")
    assert "| SGD | ours | 15.00 ± 5.00 |" in page
    assert page.endswith("The paper: it is so.\n")
    Console(width=120).print(rich_table(table, results_of))
    shown = capsys.readouterr().out
    for line in lines_of(table, results_of):
        assert all(cell in shown for cell in line)


def test_a_line_of_a_paper_must_have_a_number_for_every_measure():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        printed(("nll",), "0.1 0.2")
