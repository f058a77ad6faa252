"""`leanbayes predict`: the figures of the report again, rows prepared as in training, errors in one sentence."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.stats
import torch

import leanbayes as lb
from leanbayes.cli.main import main
from leanbayes.compare import batch_predict
from leanbayes.compare.batch_predict import FIELDS, read_scores
from leanbayes.compare.load_run import load_run, Preparation
from leanbayes.data.files.csv import read_features


@pytest.fixture(scope="module")
def digits(trained):
    return trained / "digits" / "small"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A comparison on a table whose target, y = 5 + 10 a - 3 c, is neither its last column nor standardised."""
    folder = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    x = random.normal(3, 2, (200, 3))
    y = 5 + 10 * x[:, 0] - 3 * x[:, 2] + random.normal(0, 2, 200)
    write_csv(folder / "t.csv", "a,y,b,c", np.column_stack([x[:, 0], y, x[:, 1:]]))
    np.save(folder / "x.npy", x)
    flags = ["--data", str(folder / "t.csv"), "--target", "y", "--seeds", "0", "--methods", "plain,rank1,deep_ensemble"]
    flags += ["--recipe.epochs", "10", "--ood", "none", "--samples", "4", "--out", str(folder / "out")]
    assert main(["compare", *flags]) == 0
    return folder


def write_csv(path, header, rows):
    np.savetxt(path, rows, delimiter=",", header=header, comments="", fmt="%.17g")


def predict(run, *flags, out):
    return main(["predict", str(run), "--device", "cpu", "--samples", "4", "--out", str(out), *flags])


def said_in_the_report(run):
    return json.loads((run / "result.json").read_text())["metrics"]["test"]


def lines(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("method", ["plain", "rank1", "nested", "deep_ensemble"])
def test_figures_are_those_of_the_report(digits, method, tmp_path, capsys):
    run = digits / method / "seed0"
    assert predict(run, out=tmp_path) == 0
    test = said_in_the_report(run)
    said = capsys.readouterr().out
    assert f"accuracy {100 * test['accuracy']:.2f} %, NLL {test['nll']:.4f}" in said
    assert "predictions.csv" in said


def test_draws_are_those_of_the_evaluation(tmp_path, capsys):
    flags = ["--net", "small", "--methods", "plain,rank1", "--seeds", "0", "--train-rows", "200", "--ood", "none"]
    flags += ["--recipe.epochs", "3", "--no-shift", "--samples", "6", "--design", "paired", "--out", str(tmp_path)]
    assert main(["compare", *flags]) == 0
    run = tmp_path / "digits" / "small" / "rank1" / "seed0"
    capsys.readouterr()
    assert main(["predict", str(run), "--device", "cpu", "--out", str(tmp_path / "p")]) == 0
    told = capsys.readouterr()
    assert f"NLL {said_in_the_report(run)['nll']:.4f}" in told.out
    rows = ["plain", "rank1"]
    for method in rows:
        run = tmp_path / "digits" / "small" / method / "seed0"
        temperature = json.loads((run / "validation.json").read_text())["temperature"]
        out = tmp_path / f"{method} as trained"
        assert main(["predict", str(run), "--device", "cpu", "--out", str(out)]) == 0
        told = capsys.readouterr()
        assert f"NLL {said_in_the_report(run)['nll']:.4f}" in told.out
        assert f"without the temperature of its held-out rows, {temperature:.4g}; --temperature applies it" in told.err
        assert main(["predict", str(run), "--device", "cpu", "--temperature", "--out", str(out)]) == 2
        assert "temperature" in capsys.readouterr().err, "other settings"
        tempered = tmp_path / f"{method} at its temperature"
        assert main(["predict", str(run), "--device", "cpu", "--temperature", "--out", str(tempered)]) == 0
        found = json.loads((run / "result.json").read_text())["metrics"]["tempered"]["test"]
        told = capsys.readouterr()
        assert f"accuracy {100 * found['accuracy']:.2f} %, NLL {found['nll']:.4f}" in told.out
        assert f"at the temperature of its held-out rows, {temperature:.4g}" in told.err


def test_a_run_without_a_temperature_refuses_the_flag(digits, tmp_path, capsys):
    run = shutil.copytree(digits / "plain" / "seed0", tmp_path / "run")
    (run / "validation.json").unlink(missing_ok=True)
    assert predict(run, "--temperature", out=tmp_path / "out") == 2
    assert "expected a run of classes with held-out rows for --temperature" in capsys.readouterr().err


def test_the_table_says_what_the_parts_hold(digits, tmp_path):
    assert predict(digits / "rank1" / "seed0" / "model.safetensors", "--part-rows", "300", out=tmp_path) == 0
    rows, found = lines(tmp_path / "predictions.csv"), read_scores(tmp_path)
    every = [f"p({k})" for k in range(10)]
    assert list(rows[0]) == ["row", "predicted", "probability", "total", "aleatoric", "epistemic", *every]
    probabilities = [[float(row[name]) for name in every] for row in rows]
    np.testing.assert_allclose(probabilities, found["mean"], rtol=1e-5, atol=1e-9)
    assert [int(row["row"]) for row in rows] == list(range(797))
    assert [int(row["predicted"]) for row in rows] == found["mean"].argmax(1).tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], found["mean"].max(1), rtol=1e-5)
    for name in FIELDS[1:]:
        np.testing.assert_allclose([float(row[name]) for row in rows], found[name], rtol=1e-5, atol=1e-9)


def test_a_nested_network_is_the_same_every_time(digits, tmp_path):
    run = digits / "nested" / "seed0"
    assert predict(run, out=tmp_path) == 0
    torch.manual_seed(5)
    assert predict(run, out=tmp_path) == 0  # another network would be refused


def test_images_may_come_in_any_layout(digits, tmp_path):
    run = digits / "rank1" / "seed0"
    x = lb.data.load("digits").test.x[:20].numpy()
    layouts = {
        "first": x,
        "last": np.moveaxis(x, 1, -1),
        "none": x[:, 0],
        "floats": x / 255,
        "whole": x.astype("int64"),
    }
    for name, rows in layouts.items():
        np.save(tmp_path / f"{name}.npy", rows)
        assert predict(run, "--data", str(tmp_path / f"{name}.npy"), out=tmp_path / name) == 0
    np.savez(tmp_path / "rows.npz", x_test=x, y_test=np.zeros(20))
    assert predict(run, "--data", str(tmp_path / "rows.npz"), out=tmp_path / "npz") == 0
    expected = read_scores(tmp_path / "first")
    for name in (*layouts, "npz"):
        np.testing.assert_allclose(read_scores(tmp_path / name)["mean"], expected["mean"], rtol=1e-4, atol=1e-6)


def test_preparation_is_that_of_the_data():
    digits = lb.data.load("digits")
    assert torch.equal(Preparation.of(digits)(digits.test.x), digits.inputs(digits.test.x))
    tokens = lb.data.DataSet(
        "t", "classification", *(lb.data.Split(torch.ones(4, 3).long(), torch.arange(4)),) * 2, (), ""
    )
    assert torch.equal(Preparation.of(tokens)(torch.ones(2, 3).int()), torch.ones(2, 3).long())
    with pytest.raises(ValueError, match="whole numbers"):
        Preparation.of(tokens)(torch.ones(2, 3))


@pytest.mark.parametrize("method", ["plain", "rank1", "deep_ensemble"])
def test_real_targets_come_in_their_own_units(table, method, tmp_path, capsys):
    run = table / "out" / "t" / "mlp" / method / "seed0"
    assert predict(run, "--data", str(table / "t.csv"), out=tmp_path) == 0
    test = said_in_the_report(run)
    said = capsys.readouterr().out
    assert f"RMSE {test['rmse']:.4g}" in said
    nll = float(said.split("NLL ")[1].split()[0])
    # With one draw the mixture is a Normal: also the noise that the plain network learned is there again.
    assert nll == pytest.approx(-test["lpd"], abs=1e-3 if method == "plain" else 0.1)


def test_columns_are_found_by_name(table, tmp_path):
    run = table / "out" / "t" / "mlp" / "rank1" / "seed0"
    x = np.load(table / "x.npy")
    write_csv(tmp_path / "turned.csv", "c,other,a,b", np.column_stack([x[:, 2], x[:, 0], x[:, :2]]))
    write_csv(tmp_path / "lone.csv", "a,b,c", x[:1])
    np.savetxt(tmp_path / "bare.csv", x, delimiter=",", fmt="%.17g")
    for name in ("turned", "bare", "lone"):
        assert predict(run, "--data", str(tmp_path / f"{name}.csv"), out=tmp_path / name) == 0
    assert predict(run, "--data", str(table / "x.npy"), out=tmp_path / "x") == 0
    expected = read_scores(tmp_path / "x")["mean"]
    for name in ("turned", "bare", "lone"):
        found = read_scores(tmp_path / name)["mean"]
        np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-5)
    check_real_targets(lines(tmp_path / "x" / "predictions.csv"), read_scores(tmp_path / "x"))


def check_real_targets(rows, found):
    """The interval and the standard deviations are in the units of the target."""
    names = ("mean", "std", "lower", "upper", "aleatoric_std", "epistemic_std", "total", "aleatoric", "epistemic")
    assert list(rows[0]) == ["row", *names]
    columns = {name: np.array([float(row[name]) for row in rows]) for name in names}
    mean, std = found["mean"][:, 0], np.sqrt(found["total"][:, 0])
    lower, upper = scipy.stats.norm.interval(0.95, mean, std)
    parts = [np.sqrt(found[name][:, 0]) for name in ("aleatoric", "epistemic")]
    for name, expected in zip(names, (mean, std, lower, upper, *parts), strict=False):
        np.testing.assert_allclose(columns[name], expected, rtol=1e-4, atol=1e-4)


def test_features_of_a_run_without_table(tmp_path):
    rows = np.arange(12.0).reshape(3, 4)
    np.savetxt(tmp_path / "whole.csv", rows, delimiter=",")
    (tmp_path / "head.csv").write_text("a,b,c\n")
    np.testing.assert_array_equal(read_features(tmp_path / "whole.csv"), rows)
    with pytest.raises(ValueError, match="a header and no row"):
        read_features(tmp_path / "head.csv")


def test_several_targets_have_numbers(tmp_path):
    arrays = {name: np.full((2, 2), 4.0) for name in FIELDS}
    np.savez(tmp_path / "part-00000.npz", **arrays)
    batch_predict.write_table([tmp_path / "part-00000.npz"], tmp_path / "t.csv", ())
    first = lines(tmp_path / "t.csv")[0]
    assert first["mean_2"] == "4.0"
    assert first["std_1"] == "2.0"


def test_wrong_input_is_one_sentence(digits, table, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rank1 = digits / "rank1" / "seed0"
    np.save("wrong.npy", np.zeros((4, 3)))
    np.save("sixteen.npy", np.full((4, 8, 8), 16.0))
    np.save("nan.npy", np.full((4, 8, 8), np.nan))
    np.save("text.npy", np.array(["a"]))
    np.savez("two.npz", a=np.zeros(3), b=np.zeros(3))
    (tmp_path / "junk.npy").write_bytes(b"junk")
    (tmp_path / "own.safetensors").write_bytes((rank1 / "model.safetensors").read_bytes())
    (tmp_path / "lacking.csv").write_text("a,b\n1,2\n")
    wrong = [
        (["nowhere"], "there is no checkpoint 'nowhere'"),
        ([digits], "holds 6 runs; name the folder of one"),
        ([tmp_path], "has no job.json"),
        (["own.safetensors"], "score('own.safetensors', rows, out, net=your_network)"),
        ([rank1, "--data", "absent.npy"], "there is no file 'absent.npy'"),
        ([rank1, "--data", "no-such-set"], "no-such-set"),
        ([rank1, "--data", "wrong.npy"], "expected rows of shape (1, 8, 8)"),
        ([rank1, "--data", "sixteen.npy"], "floats from 0 to 1"),
        ([rank1, "--data", "nan.npy"], "NaN"),
        ([rank1, "--data", "text.npy"], "expected rows of numbers"),
        ([rank1, "--data", "junk.npy"], "damaged or not a .npy file"),
        ([rank1, "--data", "two.npz"], "one named x or x_test, in 'two.npz', got a, b"),
        ([rank1, "--samples", "0"], "expected samples to be at least 1"),
        ([rank1, "--device", "cda"], "expected a device among"),
        ([table / "out" / "t" / "mlp" / "rank1" / "seed0", "--data", "lacking.csv"], "no column 'c'"),
    ]
    for arguments, said in wrong:
        assert main(["predict", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
        assert not (tmp_path / "predictions").exists()


def test_damaged_and_unfinished_runs(digits, tmp_path):
    run = digits / "plain" / "seed0"
    other = tmp_path / "run"
    other.mkdir()
    (other / "job.json").write_bytes((run / "job.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="did not finish its training"):
        load_run(other)
    model = (run / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(model[:2000])
    with pytest.raises(ValueError, match="damaged"):
        load_run(other)
    (other / "model.safetensors").write_bytes(model)
    assert load_run(other).method == "plain"
    (other / "job.json").write_text((run / "job.json").read_text().replace('"small"', '"mlp"'))
    with pytest.raises(ValueError, match="does not fit the present network"):
        load_run(other)
    (other / "job.json").write_text("{")
    with pytest.raises(ValueError, match=r"job.json' is damaged"):
        load_run(other)


def test_training_data_that_changed_are_refused(table, tmp_path):
    run = table / "out" / "t" / "mlp" / "plain" / "seed0"
    kept = (table / "t.csv").read_text()
    try:
        (table / "t.csv").write_text(kept + "1,2,3,4\n")
        with pytest.raises(ValueError, match="have changed"):
            load_run(run)
        (table / "t.csv").unlink()
        with pytest.raises(ValueError, match="cannot be read: there is no file"):
            load_run(run)
    finally:
        (table / "t.csv").write_text(kept)
    (run / "checkpoint" / "last.safetensors").rename(tmp_path / "last.safetensors")
    try:
        with pytest.raises(FileNotFoundError, match="the learned noise of the run"):
            load_run(run)
    finally:
        (tmp_path / "last.safetensors").rename(run / "checkpoint" / "last.safetensors")


def test_an_interrupt_keeps_parts_and_the_same_command_goes_on(digits, tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((40_000, 8, 8), np.uint8))
    run, out = digits / "rank1" / "seed0", tmp_path / "out"
    command = ["predict", str(run), "--data", str(tmp_path / "rows.npy"), "--out", str(out), "--part-rows", "1000"]
    code = (
        "import signal, sys; from leanbayes.cli.main import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.exit(main({command!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out / "part-00001.npz").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finished work is kept" in error
    kept = {path: path.stat().st_mtime_ns for path in out.glob("part-*.npz")}
    assert 2 <= len(kept) < 40
    assert not (out / "predictions.csv").exists()
    for number in range(40):  # the others need not be computed to see that these are kept
        part = out / f"part-{number:05d}.npz"
        if part not in kept and number != 39:
            part.write_bytes((out / "part-00000.npz").read_bytes())
    assert main(command) == 0
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    assert len(lines(out / "predictions.csv")) == 40_000


@pytest.mark.slow
def test_workers_give_the_same_and_a_dead_one_is_told(digits, tmp_path, capfd):
    run = digits / "rank1" / "seed0"
    rows = np.zeros((1000, 8, 8), np.float32)
    rows[700] = np.nan
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "good.npy", rows[:500])
    two = ["--workers", "2", "--backend", "local", "--part-rows", "500"]
    assert predict(run, "--data", str(tmp_path / "good.npy"), out=tmp_path / "one") == 0
    assert predict(run, "--data", str(tmp_path / "rows.npy"), *two, out=tmp_path / "two") == 1
    one, other = (dict(np.load(tmp_path / name / "part-00000.npz")) for name in ("one", "two"))
    assert all(np.array_equal(one[name], other[name]) for name in FIELDS)
    error = capfd.readouterr().err
    assert "rows 500 to 999: the part has 64 values that are NaN" in error
    assert "1 of 2 parts are missing" in error


def test_progress_counts_the_finished_parts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(batch_predict, "POLL", 0.01)
    (tmp_path / "part-00000.npz").touch()
    with batch_predict.progress(tmp_path, 1000, 100, 1):
        for number in (1, 2):
            (tmp_path / f"part-0000{number}.npz").touch()
            time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["row 200 of 1", "row 300 of 1"]
    assert all(line.endswith("left") for line in lines)
