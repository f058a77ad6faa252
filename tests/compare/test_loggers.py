"""The flag --log: curves in the folder of a run, and a clear sentence where a package is missing."""

from __future__ import annotations

import contextlib
import csv
import sqlite3
import struct
import warnings
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these packages
        assert main(["train", "--methods", "plain", *FAST, "--log", log, "--out", str(tmp_path)]) == 0
        assert LOGGED[log](tmp_path) == [1, 2]


def tensorboard_steps(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (out / "digits" / "small" / "plain" / "seed0" / "tensorboard").glob("events.out*")
    events = EventAccumulator(str(file))
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def wandb_steps(out):
    """Read the offline file, a log of LevelDB: 7 bytes, then records with checksum, length and type."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service writes the file
    (file,) = (out / "digits" / "small" / "plain" / "seed0" / "wandb").rglob("*.wandb")
    content, position, steps = file.read_bytes(), 7, []
    while position + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, position + 4)
        position += 7 + length
        if kind != 1:  # a record of several blocks is longer than an epoch's
            continue
        record = Record.FromString(content[position - length : position])
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        steps += [int(items["epoch"])] if "epoch" in items else []
    return steps


def mlflow_steps(out):
    store = sqlite3.connect(out / "mlflow.db")
    with contextlib.closing(store):
        assert store.execute("select name, status from runs").fetchall() == [("digits/small/plain/seed0", "FINISHED")]
        return [step for (step,) in store.execute("select step from metrics where key = 'loss' order by step")]


LOGGED = {"tensorboard": tensorboard_steps, "wandb": wandb_steps, "mlflow": mlflow_steps}


def test_a_logger_that_cannot_start_is_one_sentence(monkeypatch, tmp_path, capsys):
    def refused(job, out):
        raise ConnectionError("no server\nat all")

    monkeypatch.setitem(loggers.MAKERS, "csv", refused)
    assert main(["train", "--methods", "plain", *FAST, "--log", "csv", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--log csv could not start (no server); check its settings, or leave it out" in said


def test_workers_start_a_store_in_turn(tmp_path):
    """A second process that wants the lock waits until the first has left."""
    import fcntl

    now = fcntl.LOCK_EX | fcntl.LOCK_NB
    with (tmp_path / "lock").open("w") as other:
        with loggers._in_turn(tmp_path / "lock"), pytest.raises(BlockingIOError):
            fcntl.flock(other, now)
        fcntl.flock(other, now)
