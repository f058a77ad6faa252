"""The flag --log: curves in the folder of a run, and a clear sentence where a package is missing."""

from __future__ import annotations

import csv
from importlib.util import find_spec

import pytest

from leanbayes.cli.main import main
from leanbayes.compare import loggers

FAST = ["--recipe.epochs", "2", "--no-shift", "--ood", "none", "--test-images", "40", "--train-rows", "100"]
FAST += ["--seeds", "0", "--device", "cpu"]


def test_csv_needs_nothing_and_has_each_epoch(tmp_path):
    assert main(["train", "--methods", "plain", *FAST, "--log", "csv", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("metrics.csv")
    assert path.parent == tmp_path / "digits" / "small" / "plain" / "seed0" / "csv" / "version_0"
    with path.open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]


@pytest.mark.parametrize("log", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(log, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert main(["compare", "--log", log, *FAST, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert log in said
    assert "pip install leanbayes[loggers]" in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_logger_is_refused():
    with pytest.raises(ValueError, match="one of csv, tensorboard, wandb, mlflow, got 'excel'"):
        loggers.check_log("excel")


@pytest.mark.parametrize("log", ["tensorboard", "wandb", "mlflow"])
def test_other_loggers_write_into_the_folder(log, tmp_path, monkeypatch):
    missing = [package for package in loggers.NEEDED[log] if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, of the loggers extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["train", "--methods", "plain", *FAST, "--log", log, "--out", str(tmp_path)]) == 0
    names = {"tensorboard": "events.out*", "wandb": "*.wandb", "mlflow": "loss"}
    assert list(tmp_path.rglob(names[log]))
