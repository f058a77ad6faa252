"""Needs of a comparison: rows of another origin (--shift-data), and intervals that hold 95 % of held-out rows."""

from __future__ import annotations

import csv
import json
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

import leanbayes as lb
from leanbayes import metrics
from leanbayes.cli.main import main
from leanbayes.compare.baselines import BASELINES
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.load_run import load_run
from leanbayes.compare.row_training import _calibrated, _read, Validation
from leanbayes.report import load_results
from leanbayes.report.table import comparison
from leanbayes.report.verdict import verdict
from leanbayes.training import Recipe

METHODS = ("plain", "rank1", "mean", "linear")
FLAGS = ["--methods", ",".join(METHODS), "--seeds", "0", "--recipe.epochs", "2", "--samples", "4", "--device", "cpu"]
FLAGS += ["--recipe.schedule", "cosine", "--backend", "local"]  # one split instead of folds


def write(path, rows, shift=0.0, seed=0, **more):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 2)) + shift
    price = 100 * (x[:, 0] - 2 * x[:, 1]) + 30 * random.normal(size=rows)
    columns = {"a": x[:, 0], "b": x[:, 1], "price": price} | more
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.fixture(scope="module")
def prices(tmp_path_factory):
    """A comparison on a table with a real target, with rows of a later year."""
    folder = tmp_path_factory.mktemp("prices")
    write(folder / "t.csv", 150)
    write(folder / "later.csv", 40, shift=1.0, seed=1)
    command = ["compare", "--data", str(folder / "t.csv"), *FLAGS, "--shift-data", str(folder / "later.csv")]
    assert main([*command, "--out", str(folder / "out")]) == 0
    return folder


def result(folder, method, seed=0):
    return json.loads((folder / "out" / "t" / "mlp" / method / f"seed{seed}" / "result.json").read_text())


@pytest.mark.parametrize("method", METHODS)
def test_every_row_is_scored_on_the_rows_of_another_origin(prices, method):
    found = result(prices, method)["metrics"]["shift_data"]
    assert list(found) == ["later"]
    assert found["later"]["rows"] == 40
    assert {"lpd", "rmse", "coverage"} <= set(found["later"])
    assert math.isfinite(found["later"]["lpd"])


def test_the_score_is_that_of_the_trained_network_on_these_rows(prices):
    """The inputs are scaled by the training rows; the figures are in the units of the target."""
    run = load_run(prices / "out" / "t" / "mlp" / "rank1" / "seed0")
    with (prices / "later.csv").open() as file:
        rows = [[float(row[name]) for name in ("a", "b", "price")] for row in csv.DictReader(file)]
    table, (mean, std) = torch.tensor(rows), run.units
    p = lb.predict(run.model, run.data.inputs(table[:, :2]), run.likelihood, samples=4)
    error = (p.mean * std + mean - table[:, 2:]).square().mean().sqrt()
    found = result(prices, "rank1")["metrics"]["shift_data"]["later"]
    assert found["rmse"] == pytest.approx(float(error), rel=1e-4)
    lpd = p.log_prob((table[:, 2:] - mean) / std).mean() - std.log().sum()
    assert found["lpd"] == pytest.approx(float(lpd), rel=1e-4)


def test_the_report_has_the_columns_and_the_needs(prices):
    (group,) = load_results(prices / "out").groups
    titles = [column.title for column in comparison(group).columns]
    assert {"LPD later", "RMSE later", "Coverage later"} <= set(titles)
    assert "Width at 95\u00a0% validation coverage" in titles
    needs = {need.name: need.sentence for need in verdict(group).needs}
    assert "mean LPD" in needs["Robust to shift"]
    assert "width at 95 % validation coverage" in needs["Narrow intervals"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"a": None}, "has no column 'a', which the training data had"),
        ({"price": None}, "has no column 'price', the target"),
        ({"price": ["low"] * 20}, "expected numbers as in training, got 'low'"),
    ],
)
def test_wrong_rows_end_in_one_sentence_before_any_training(prices, tmp_path, capsys, more, message):
    path = write(tmp_path / "wrong.csv", 20, **{name: cells for name, cells in more.items() if cells is not None})
    if dropped := [name for name, cells in more.items() if cells is None]:
        rows = [line.split(",") for line in path.read_text().splitlines()]
        kept = [i for i, name in enumerate(rows[0]) if name not in dropped]
        path.write_text("".join(",".join(row[i] for i in kept) + "\n" for row in rows))
    command = ["compare", "--data", str(prices / "t.csv"), *FLAGS, "--shift-data", str(path)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_two_files_of_one_name_are_refused(prices, tmp_path, capsys):
    both = f"{prices / 'later.csv'},{write(tmp_path / 'later.csv', 20)}"
    assert main(["compare", "--data", str(prices / "t.csv"), *FLAGS, "--shift-data", both]) == 2
    assert "expected names that differ for --shift-data, got 'later' twice" in capsys.readouterr().err


def test_ids_of_older_runs_stay():
    def of(**options):
        job = {"source": DataSpec(name="digits"), "net": "small", "method": None, "recipe": Recipe(epochs=1)}
        return Job(**job, evaluation=EvaluationSpec(**options))

    assert "shift_data" not in of().settings()["judging"]
    assert of(shift_data=("a.csv",)).settings()["judging"]["shift_data"] == ["a.csv"]
    assert of().id != of(shift_data=("a.csv",)).id


def test_classes_are_scored_as_predicted_and_at_the_temperature(tmp_path):
    random = np.random.default_rng(0)
    for name, rows, shift in (("t", 120, 0.0), ("later", 30, 1.0)):
        x = random.normal(size=rows) + shift
        with (tmp_path / f"{name}.csv").open("w") as file:
            file.write("x,label\n" + "".join(f"{v},{'yes' if v + random.normal() > 0 else 'no'}\n" for v in x))
    flags = ["--methods", "plain,boosting", "--seeds", "0", "--recipe.epochs", "2", "--device", "cpu"]
    command = ["compare", "--data", str(tmp_path / "t.csv"), *flags, "--shift-data", str(tmp_path / "later.csv")]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    found = result(tmp_path, "plain")["metrics"]
    assert {"accuracy", "nll", "ece"} <= set(found["shift_data"]["later"])
    tempered = found["tempered"]["shift_data"]["later"]
    assert tempered["accuracy"] == found["shift_data"]["later"]["accuracy"]
    assert tempered["nll"] != found["shift_data"]["later"]["nll"]
    (group,) = load_results(tmp_path / "out").groups
    cells = {row.contender.name: row.cells for row in comparison(group).rows}
    column = [c.key for c in comparison(group).columns].index(("shift_data", "later", "nll"))
    assert cells["tempered"][column].estimate.mean == pytest.approx(tempered["nll"])


# ---------------------------------------------------------------- intervals


def test_the_factor_of_intervals_is_the_quantile_of_the_errors():
    y = torch.arange(1.0, 101.0)[:, None]
    low, high = torch.full_like(y, -10.0), torch.full_like(y, 10.0)
    assert metrics.interval_factor(low, high, y) == pytest.approx(9.5)  # 95 of 100 targets are at most 95
    inside = metrics.scaled_interval(low, high, 9.5)
    assert float(metrics.interval_coverage(*inside, y)) == pytest.approx(0.95)
    assert float(metrics.interval_coverage(*metrics.scaled_interval(low, high, 9.49), y)) < 0.95
    with pytest.raises(ValueError, match="low < high"):
        metrics.interval_factor(high, low, y)


@pytest.mark.parametrize("claimed", [0.5, 2.0])
def test_gaussian_errors_have_a_known_width_whatever_the_claimed_noise(claimed):
    """Targets N(0, 1) and one claimed standard deviation: the width is 2 * 1.96 in every case."""
    generator = torch.Generator().manual_seed(0)
    y, fresh = torch.randn(4000, 1, generator=generator), torch.randn(4000, 1, generator=generator)
    mean = torch.zeros(1, 4000, 1)
    kind = lb.Gaussian(heteroscedastic=True)  # no factor of the noise: the intervals are as claimed
    noise = torch.full((1, 4000, 1), claimed**2)
    p = lb.Prediction(mean[0], noise[0], noise[0], mean[0], mean, noise, kind)
    factor = _calibrated(p, y)["interval"]
    z = NormalDist().inv_cdf(0.975)
    density = NormalDist().pdf(z)
    error = math.sqrt(0.95 * 0.05 / 4000) / (2 * density)  # of the 95 % quantile of |y|, from 4,000 rows
    assert factor * claimed * z == pytest.approx(z, abs=4 * error)
    coverage = float(metrics.interval_coverage(*metrics.scaled_interval(*p.interval(0.95), factor), fresh))
    assert coverage == pytest.approx(0.95, abs=4 * math.sqrt(2 * 0.95 * 0.05 / 4000))


@pytest.mark.parametrize("name", ["mean", "linear"])
def test_baselines_have_the_factor_of_their_left_out_errors(name):
    """Noise of two equally likely values, -1 and 1: intervals of half-width 1 hold every target, 1 / 1.96 of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 2, generator=generator)
    y = torch.where(torch.rand(1000, 1, generator=generator) < 0.5, -1.0, 1.0)
    y = y if name == "mean" else y + 3 * x[:, :1]
    fitted = BASELINES[name](x, y, 0, 0)
    assert fitted.interval == pytest.approx(1 / 1.96, rel=0.12)
    assert BASELINES[name](x, (y[:, 0] > 0).long(), 2, 0).interval is None


@pytest.mark.parametrize("method", METHODS)
def test_the_width_of_the_result_is_that_of_the_stored_factor(prices, method):
    found = result(prices, method)
    test = found["metrics"]["test"]
    assert 0 < test["coverage_validated"] <= 1
    if "validation" in found:
        factor = found["validation"]["interval"]
        stored = json.loads((prices / "out" / "t" / "mlp" / method / "seed0" / "validation.json").read_text())
        assert stored["interval"] == factor
        assert test["interval_width_validated"] == pytest.approx(factor * test["interval_width"], rel=1e-5)


def test_the_factor_holds_95_percent_of_the_held_out_rows(prices):
    """The linear row by hand: five folds, ridge without much penalty, the 95 % quantile of its errors."""
    found = result(prices, "linear")["metrics"]["test"]
    loaded = lb.data.load(str(prices / "t.csv"))
    x = np.c_[loaded.train.x.numpy(), np.ones(len(loaded.train))]
    y = loaded.train.y.numpy()[:, 0]
    errors = np.empty(len(y))
    for fold in range(5):
        held = np.arange(len(y)) % 5 == fold
        errors[held] = y[held] - x[held] @ np.linalg.lstsq(x[~held], y[~held], rcond=None)[0]
    width = 2 * np.sort(np.abs(errors))[math.ceil(0.95 * len(y)) - 1]
    assert found["interval_width_validated"] == pytest.approx(width, rel=0.15)  # other folds, 135 rows


def test_a_validation_of_an_earlier_version_is_read_without_a_factor(tmp_path):
    old = {"how": "split", "rows": 9, "epochs": 2, "convert_at_epoch": 0, "temperature": 1.0, "noise": 1.1}
    path = tmp_path / "validation.json"
    path.write_text(json.dumps(old | {"nll": 0.5, "seconds": 0.0, "key": {"a": 1}}))
    assert _read(path, {"a": 1}) == Validation(**old, nll=0.5)
    assert _read(path, {"a": 2}) is None
