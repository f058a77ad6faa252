"""Every epoch once: `history.jsonl` during the training, and loggers, through kills and resumed trainings."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec

import pytest
from torch import nn

import leanbayes as lb
from leanbayes.training.fit import fit
from leanbayes.training.logs import FILE, read_history

from .problems import images, network, rank1, short


class Recorder:
    """A plain object with `log_metrics`, as a user may write one."""

    def __init__(self):
        self.steps, self.rows = [], []

    def log_metrics(self, metrics, step):
        self.steps.append(step)
        self.rows.append(metrics)


class Killed(Exception):
    pass


def kill_at(epoch):
    def callback(state):
        if state.epoch == epoch:
            raise Killed

    return callback


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_line_is_there_after_each_epoch(tmp_path):
    seen = []
    history = fit(rank1(), images(), short(epochs=3), validation=images(20), folder=tmp_path, progress=False,
                  callbacks=[lambda state: seen.append(len(lines(tmp_path)))])  # fmt: skip
    assert seen == [1, 2, 3]
    assert lines(tmp_path) == list(history)
    assert "valid_nll" in lines(tmp_path)[0]


def test_without_a_folder_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(network(), images(), short(), progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", ["nothing", "half a line", "the last line"])
def test_a_killed_and_resumed_training_has_each_epoch_once(tmp_path, cut):
    first, second = Recorder(), Recorder()
    with pytest.raises(Killed):
        fit(rank1(), images(), short(epochs=6), folder=tmp_path, progress=False, callbacks=[kill_at(3)],
            loggers=[first])  # fmt: skip
    text = (tmp_path / FILE).read_text()
    whole = text.splitlines(keepends=True)
    (tmp_path / FILE).write_text(
        {"nothing": text, "half a line": text + whole[-1][:9], "the last line": "".join(whole[:-1])}[cut]
    )
    history = fit(rank1(), images(), short(epochs=6), folder=tmp_path, resume=True, progress=False, loggers=[second])
    assert lines(tmp_path) == list(history)
    assert [row["epoch"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert first.steps == [1, 2, 3]
    assert second.steps == ([3, 4, 5, 6] if cut == "the last line" else [4, 5, 6])  # a line is written last


def test_a_finished_training_logs_nothing_again_and_a_fresh_one_everything(tmp_path):
    recorder = Recorder()
    fit(network(), images(), short(), folder=tmp_path, progress=False)
    fit(network(), images(), short(), folder=tmp_path, resume=True, progress=False, loggers=[recorder])
    assert recorder.steps == []
    fit(network(), images(), short(), folder=tmp_path, progress=False, loggers=[recorder])
    assert recorder.steps == [1, 2, 3]
    assert len(lines(tmp_path)) == 3


def test_members_of_an_ensemble_share_one_file(tmp_path):
    def members():
        return lb.Ensemble([network(), network()])

    recorder, calls = Recorder(), []

    def kill(state):
        calls.append(state.epoch)
        if len(calls) == 5:
            raise Killed

    with pytest.raises(Killed):
        fit(members(), images(), short(), folder=tmp_path, progress=False, callbacks=[kill], loggers=[recorder])
    history = fit(members(), images(), short(), folder=tmp_path, resume=True, progress=False, loggers=[recorder])
    assert lines(tmp_path) == list(history)
    assert [(row["member"], row["epoch"]) for row in lines(tmp_path)] == [(m, e) for m in (0, 1) for e in (1, 2, 3)]
    assert recorder.steps == [1, 2, 3, 4, 5, 6]


def test_lines_of_a_state_that_was_lost_are_dropped(tmp_path):
    fit(network(), images(), short(epochs=3, seed=1), folder=tmp_path, progress=False)
    (tmp_path / "checkpoint" / "last.safetensors").unlink()
    history = fit(network(), images(), short(epochs=2), folder=tmp_path, resume=True, progress=False)
    assert lines(tmp_path) == list(history)


def test_logging_does_not_change_the_training(tmp_path):
    class Noisy(Recorder):
        def log_metrics(self, metrics, step):
            nn.Linear(3, 3)  # draws random numbers

    recipe = short(epochs=3)
    plain, logged = (fit(rank1(), images(), recipe, progress=False, loggers=own) for own in ((), [Noisy()]))
    assert [row["loss"] for row in plain] == [row["loss"] for row in logged]


def test_rows_are_numbers_and_the_step_is_the_epoch():
    recorder = Recorder()
    history = fit(rank1(), images(), short(), progress=False, loggers=[recorder])
    assert recorder.steps == [1, 2, 3]
    assert [row["loss"] for row in recorder.rows] == [row["loss"] for row in history]
    assert all(isinstance(value, int | float) for row in recorder.rows for value in row.values())


@pytest.mark.parametrize("wrong", ["csv", 3, [object()], [print]])
def test_other_loggers_are_refused(wrong):
    with pytest.raises(TypeError, match=r"log_metrics\(dict, step\)"):
        fit(network(), images(), short(), progress=False, loggers=wrong)


@pytest.mark.parametrize("damage", ["[2]", "NaN", '{"loss": Infinity}', "[" * 100_000, "\0", '{"epoch": '])
def test_a_damaged_file_is_read_to_its_first_damaged_line(tmp_path, damage):
    (tmp_path / FILE).write_text(f'{{"epoch": 1}}\n{damage}\n{{"epoch": 3}}\n')
    assert read_history(tmp_path / FILE) == [{"epoch": 1}]
    assert read_history(tmp_path / "absent") == []


def test_the_csv_logger_of_fabric_has_each_epoch_at_once(tmp_path):
    from lightning_fabric.loggers import CSVLogger

    def written():
        with next(tmp_path.rglob("metrics.csv")).open() as file:
            return list(csv.DictReader(file))

    seen = []
    logger = CSVLogger(tmp_path, name="curves")
    history = fit(rank1(), images(), short(), progress=False, loggers=[logger],
                  callbacks=[lambda state: seen.append(len(written()))])  # fmt: skip
    assert seen == [1, 2, 3]
    assert [float(row["loss"]) for row in written()] == [row["loss"] for row in history]
    assert [row["step"] for row in written()] == ["1", "2", "3"]


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb, of the loggers extra")
def test_wandb_offline(tmp_path, monkeypatch):
    from pytorch_lightning.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(project="test", save_dir=tmp_path, offline=True)
    history = fit(rank1(), images(), short(), progress=False, loggers=[logger])
    assert logger.experiment.summary["loss"] == pytest.approx(history[-1]["loss"])
    logger.experiment.finish()
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow, of the loggers extra")
def test_mlflow_in_a_local_folder(tmp_path):
    from pytorch_lightning.loggers import MLFlowLogger

    logger = MLFlowLogger("test", tracking_uri=f"file:{tmp_path / 'mlruns'}")
    history = fit(rank1(), images(), short(), progress=False, loggers=[logger])
    found = logger.experiment.get_metric_history(logger.run_id, "loss")
    assert [(each.step, each.value) for each in found] == [(row["epoch"], row["loss"]) for row in history]
