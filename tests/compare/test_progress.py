"""The progress of a comparison: all work is counted, the time left is honest, other processes report by files."""

from __future__ import annotations

import io
import json
import pickle
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import leanbayes as lb
from leanbayes.compare import progress, workers
from leanbayes.compare import run_all as running
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.progress import followed, Overview, Part, plan, ProgressFile, read_into, RunProgress
from leanbayes.compare.run_all import run_all
from leanbayes.compare.workers import phases, run_on_workers
from leanbayes.training import progress as display
from leanbayes.training.fit import epochs_of

SOURCE = DataSpec(name="digits", train_rows=200, validation=0.1)
EVALUATION = EvaluationSpec(samples=4, ood=("noise",), shift_images=5, test_images=40, shift_corruptions=("fog",))
RECIPE = lb.Recipe(epochs=2, batch_size=64, lr=0.05, accelerator="cpu")


def job(method=None, **changes) -> Job:
    recipe = replace(RECIPE, **changes)
    return Job(source=SOURCE, net="small", method=method, recipe=recipe, evaluation=EVALUATION)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(SOURCE, "small", EVALUATION)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that only the test moves."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(time, "time", lambda: now.seconds)
    return now


def units(run: RunProgress) -> dict[str, float]:
    return {name: part.units for name, part in run.parts.items()}


def epoch(number: int):
    return SimpleNamespace(epoch=number, row={"loss": 0.5, "valid_nll": None})


def test_training_evaluation_and_corruption_are_in_the_plan(experiment):
    first, second = plan([job(), job(lb.Rank1())], experiment, "compare")
    assert units(first) == {"training": 2, "test": 2, "corrupt": 6, "shift": 6}
    assert "corrupt" not in units(second)  # the images are in memory by then
    assert second.parts["test"].work == 4 * first.parts["test"].work  # four draws
    assert units(plan([job()], experiment, "train")[0]) == {"training": 2}
    assert "training" not in units(plan([job()], experiment, "evaluate")[0])
    assert "corrupt" in units(plan([job(), job(seed=1)], experiment, "compare", caches=None)[1])


def test_folds_and_the_plain_network_are_in_the_plan(experiment):
    stopping = {"patience": 3, "schedule": "constant", "epochs": 50}
    folds = [f"fold {number} of 5" for number in range(1, 6)]
    one, late = job(**stopping), job(lb.Rank1(), **stopping, convert_at_epoch=35)
    assert list(plan([one], experiment, "train")[0].parts) == [*folds, "training"]
    alone = plan([late], experiment, "train")[0]
    assert list(alone.parts) == [*(f"plain {fold}" for fold in folds), *folds, "training"]
    assert all(part.may_stop for part in alone.parts.values())
    assert list(plan([one, late], experiment, "train")[1].parts) == [*folds, "training"]


def test_an_ensemble_trains_every_member(experiment):
    assert units(plan([job(lb.DeepEnsemble(components=3))], experiment, "train")[0]) == {"training": 6}
    swag = plan([job(lb.SWAG(components=3))], experiment, "compare")[0]
    assert units(swag)["training"] == 2 + 2  # one training with extra epochs
    assert swag.parts["test"].work == 3 * 40


def test_the_time_left_is_measured_work(clock):
    run = RunProgress("plain, seed 0", "plain", {"training": Part("train", 4, 10), "test": Part("predict", 2, 20)})
    overview = Overview([run])
    run.start()
    assert overview.left(clock.seconds) is None
    assert "not known yet" in overview.time_left(clock.seconds)
    (advance,) = run.training("training", 4)
    clock.seconds += 5
    advance(epoch(1))
    assert overview.left(clock.seconds) == 3 * 5 + 2 * 10  # a prediction as fast as training, row by row
    clock.seconds += 2
    assert overview.left(clock.seconds) == 33  # the epoch in work counts
    for number in (2, 3, 4):
        advance(epoch(number))
    run.evaluation("test", "test set")
    clock.seconds += 1
    run.evaluation("test", "noise")
    assert overview.left(clock.seconds) == 1  # by its own speed now
    assert overview.share(clock.seconds) < 1
    clock.seconds += 60
    assert overview.share(clock.seconds) == 0.99  # not 100 % before the end
    run.end("done")
    assert (overview.left(clock.seconds), overview.share(clock.seconds)) == (0, 1)


def test_trainings_that_stop_early_shorten_the_others(clock):
    names = ["fold 1 of 2", "fold 2 of 2", "training"]
    run = RunProgress("plain, seed 0", "plain", {name: Part("train", 100, 1, may_stop=True) for name in names})
    overview = Overview([run])
    run.start()
    (advance,) = run.training(names[0], 100)
    for number in range(1, 21):
        clock.seconds += 1
        advance(epoch(number))
    assert overview.time_left(clock.seconds) == "at most 4 min 40 s left"
    run.training(names[1], 100)
    assert overview.time_left(clock.seconds) == "40 s left"  # twenty epochs each


def test_a_resumed_training_counts_what_was_done_and_times_what_is_new(clock):
    run = RunProgress("plain, seed 0", "plain", {"training": Part("train", 10, 1)})
    run.start()
    (advance,) = run.training("training", 10)
    clock.seconds += 3
    advance(epoch(7))
    assert run.parts["training"].done == 7
    assert Overview([run]).left(clock.seconds) == 3 * 3


def test_workers_share_what_is_left(clock):
    def ready(number):
        return RunProgress(f"m{number}", "m", {"training": Part("train", 1, 1, done=0, timed=1, seconds=6)})

    assert Overview([ready(n) for n in range(4)], workers=2).left(clock.seconds) == 12
    assert Overview([ready(n) for n in range(4)], workers=1).left(clock.seconds) == 24
    assert Overview([ready(0)], workers=8).left(clock.seconds) == 6


def test_the_text_names_runs_epochs_and_steps(clock):
    runs = [RunProgress("plain, seed 0", "plain"), RunProgress("rank1, seed 0", "rank1", {"cost": Part("cost", 1, 1)})]
    runs[0].keep()
    runs[1].start()
    (advance,) = runs[1].training("fold 2 of 5", 40)
    advance(epoch(12))
    overview = Overview(runs)
    assert overview.text() == "1 of 2 runs done, rank1, seed 0: fold 2 of 5, epoch 12 of 40, loss 0.5"
    runs[1].evaluation("cost", "cost")
    assert overview.text().endswith("rank1, seed 0: cost")


def test_every_step_of_a_run_is_told(experiment, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(RunProgress, "_enter", lambda run, name, doing: told.append((name, doing)))
    run_all([job(lb.Rank1())], tmp_path, progress=False)
    assert told[0] == ("training", "training, epoch 1 of 2")
    assert told[1:3] == [("test", "test set"), ("test", "noise")]
    assert ("shift", "fog 5") in told
    assert told[-1] == ("cost", "measuring")


def test_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(display, "LOOK_SECONDS", 0.001)
    run_all([job()], tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert any("training, epoch" in line and line.endswith("left") for line in lines)
    assert any("fog" in line for line in lines)  # evaluation has its lines, too
    assert not any(line.startswith("100 %") for line in lines)
    assert any(line.startswith("plain, seed 0: accuracy") for line in lines)
    assert lines[-1].startswith("costs: 1 method measured")
    monkeypatch.setattr(display, "LINE_SECONDS", 30.0)
    run_all([job()], tmp_path)
    assert capsys.readouterr().err.count("\n") == 1  # kept: one line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    run_all([job()], tmp_path)
    text = terminal.getvalue()
    assert "100 %" in text
    assert "plain, seed 0: accuracy" in text


def test_a_bar_shows_the_last_status(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with display.watched(lambda: display.Status(0.5, "0 of 1 runs done", "3 s left"), shown=True):
        pass
    assert "0 of 1 runs done" in terminal.getvalue()
    assert "3 s left" in terminal.getvalue()


def test_a_run_of_another_process_is_read_from_its_file(tmp_path):
    there = RunProgress("rank1, seed 0", "rank1", {"training": Part("train", 4, 10, True)})
    there.changed = ProgressFile(tmp_path)
    there.start()
    (advance,) = there.training("training", 4)
    advance(epoch(1))
    there.end("rank1, seed 0: accuracy 97 %")
    here = RunProgress("rank1, seed 0", "rank1")
    read_into(here, tmp_path)
    assert replace(here, changed=there.changed) == there
    before = replace(here)
    for odd in (
        "",
        "[]",
        '{"parts": 3}',
        json.dumps({"parts": {"training": {"kind": "train", "units": "many"}}}),
        "[" * 100_000,
    ):
        (tmp_path / progress.FILE).write_text(odd)
        read_into(here, tmp_path)
        assert here == before


def test_files_of_killed_runs_are_not_believed(tmp_path, capsys):
    (tmp_path / progress.FILE).write_text("left over")
    run = RunProgress("plain, seed 0", "plain")
    with followed([run], [tmp_path], 2, shown=True):
        assert not (tmp_path / progress.FILE).exists()
        other = RunProgress("plain, seed 0", "plain", changed=ProgressFile(tmp_path))
        other.end("plain, seed 0: done in another process")
    assert capsys.readouterr().err == "plain, seed 0: done in another process\n"
    assert list(tmp_path.iterdir()) == []


def here(function, tasks, **how):
    """Call tasks in this process, pickled as for others; tests/compare/test_workers.py starts processes."""
    for task in tasks:
        function(*pickle.loads(pickle.dumps(task)), **how)


@pytest.mark.parametrize("processes", [here, pytest.param(workers.on_processes, marks=pytest.mark.slow)])
def test_workers_are_shown_by_one_process(processes, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(workers, "on_processes", processes)
    jobs = [job(), job(seed=1)]
    found = run_on_workers(jobs, tmp_path, workers=2)
    assert [result["status"] for result in found] == ["done", "done"]
    said = capfd.readouterr().err
    assert [said.count(f"plain, seed {seed}: accuracy") for seed in (0, 1)] == [1, 1]
    assert not list(tmp_path.rglob(progress.FILE))
    assert len(list(tmp_path.rglob("history.jsonl"))) == 2


def test_ensembles_of_seeds_come_after_their_networks():
    one, two, both = job(), job(seed=1), replace(job(), members=(0, 1))
    assert phases([one, both, two]) == [[one, two], [both]]
    assert phases([one]) == [[one]]


@pytest.mark.parametrize("method", [None, lb.Rank1(), lb.DeepEnsemble(components=2), lb.SWAG(components=2)])
def test_a_training_has_the_epochs_of_its_plan(experiment, method, tmp_path):
    (planned,) = plan([job(method)], experiment, "train")
    model = experiment.model(method, 0)
    assert epochs_of(model, job(method).recipe) == units(planned)["training"]
    assert (
        len(lb.fit(model, experiment.data.prepared(experiment.data.train)[:2], RECIPE, progress=False))
        == (units(planned)["training"])
    )


def test_nothing_waits_nothing_is_planned(tmp_path):
    assert running.plan_runs([job()], [None], {}, "compare")[0].parts == {}
