"""Scores in files are what one call of predict gives, on one process and on several, and resume where they stopped."""

from __future__ import annotations

import csv
import pickle
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.compare import batch_predict
from leanbayes.compare.batch_predict import FIELDS, read_scores, score, write_table


def problem(rows: int = 25):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return net, lb.convert(net, lb.Rank1(components=2)), torch.randn(rows, 6)


def assert_predicts(folder, model, x, **how):
    expected = lb.predict(model, x, samples=4, **how)
    found = read_scores(folder)
    for name in FIELDS:
        np.testing.assert_allclose(found[name], getattr(expected, name).numpy(), rtol=1e-5, atol=1e-6)


def test_parts_are_one_prediction(tmp_path):
    _, model, x = problem()
    paths = score(model, x, tmp_path, samples=4, seed=3, part_rows=7)
    assert [path.name for path in paths] == [f"part-0000{i}.npz" for i in range(4)]
    assert_predicts(tmp_path, model, x, seed=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [*(p.name for p in paths), "scores.json"]


def test_all_kinds_of_rows(tmp_path):
    net, model, x = problem()
    lb.save(model, tmp_path / "model.safetensors")
    np.save(tmp_path / "rows.npy", x.numpy())
    np.savez(tmp_path / "rows.npz", x=x.numpy(), y=np.zeros(len(x)))
    sources = [tmp_path / "rows.npy", str(tmp_path / "rows.npz"), x.numpy(), TensorDataset(x, torch.zeros(len(x)))]
    for i, rows in enumerate(sources):
        score(tmp_path / "model.safetensors", rows, tmp_path / str(i), net=net, samples=4, part_rows=10)
        assert_predicts(tmp_path / str(i), model, x)


def test_raw_rows_and_real_targets(tmp_path):
    net, _, x = problem()
    model = lb.convert(net, lb.MCDropout(rate=0.2), likelihood=lb.Gaussian(std=0.5))
    score(model, x, tmp_path, inputs=torch.neg, samples=4, part_rows=10)
    assert_predicts(tmp_path, model, -x)


def here(function, tasks):
    """Call tasks in this process, pickled as for others; tests/compare/test_workers.py starts processes."""
    for task in tasks:
        try:
            function(*pickle.loads(pickle.dumps(task)))
        except ValueError as error:
            sys.stderr.write(f"{error}\n")


def test_local_processes_give_the_same_and_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_predict, "on_processes", here)
    _, model, x = problem()
    score(model, x, tmp_path / "one", samples=4, part_rows=7)
    paths = score(model, x, tmp_path / "two", samples=4, part_rows=7, workers=2, backend="local")
    one, two = read_scores(tmp_path / "one"), read_scores(tmp_path / "two")
    assert all(np.array_equal(one[name], two[name]) for name in FIELDS)
    before = {path: path.stat().st_mtime_ns for path in paths}
    paths[2].unlink()
    with pytest.raises(ValueError, match="1 of 4 parts are missing"):
        read_scores(tmp_path / "two")
    score(model, x, tmp_path / "two", samples=4, part_rows=7)
    after = {path: path.stat().st_mtime_ns for path in paths}
    assert [path for path in paths if before[path] != after[path]] == [paths[2]]
    assert all(np.array_equal(one[name], read_scores(tmp_path / "two")[name]) for name in FIELDS)


def _refuse(x):
    raise ValueError("these rows are not for me")


def test_a_failed_worker_is_told(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(batch_predict, "on_processes", here)
    _, model, x = problem()
    with pytest.raises(RuntimeError, match="4 of 4 parts are missing"):
        score(model, x, tmp_path, inputs=_refuse, samples=4, part_rows=7, workers=2, backend="local")
    assert "these rows are not for me" in capfd.readouterr().err


def test_other_settings_are_refused(tmp_path):
    net, model, x = problem()
    score(model, x, tmp_path, samples=4)
    with pytest.raises(ValueError, match="seed: 0 there, 1 now"):
        score(model, x, tmp_path, samples=4, seed=1)
    with pytest.raises(ValueError, match="data"):
        score(model, x + 1, tmp_path, samples=4)
    with pytest.raises(ValueError, match="model"):
        score(lb.convert(net, lb.Rank1(components=3)), x, tmp_path, samples=4)
    score(model, x, tmp_path, samples=4, seed=1, fresh=True)
    assert_predicts(tmp_path, model, x, seed=1)


def test_wrong_input_is_told(tmp_path):
    _, model, x = problem()
    np.savez(tmp_path / "two.npz", a=x.numpy(), b=x.numpy())
    wrong = [
        ({"data": x[:0]}, "at least one row"),
        ({"data": tmp_path / "rows.txt"}, ".npy or .npz"),
        ({"data": tmp_path / "two.npz"}, "one array, or one named x"),
        ({"data": x, "part_rows": 0}, "part_rows"),
        ({"data": x, "workers": 0}, "at least one worker"),
        ({"data": x, "backend": "dask"}, "auto, local, ray"),
        ({"data": x, "model": tmp_path / "model.safetensors"}, "net="),
    ]
    for how, said in wrong:
        with pytest.raises(ValueError, match=said):
            score(**({"model": model, "out": tmp_path / "out"} | how))
    with pytest.raises(ValueError, match="that score filled"):
        read_scores(tmp_path)


def test_the_table_keeps_the_differences_of_targets_far_from_zero(tmp_path):
    mean, variance = np.array([[1_000_000.25], [1_000_003.5]], np.float32), np.full((2, 1), 0.1, np.float32)
    np.savez(tmp_path / "part-00000.npz", mean=mean, total=variance, aleatoric=variance, epistemic=variance)
    write_table([tmp_path / "part-00000.npz"], tmp_path / "predictions.csv", ())
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows] == [1_000_000.25, 1_000_003.5]
    assert rows[0]["total"] == "0.1"
