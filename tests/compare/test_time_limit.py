"""A time limit stops a comparison after an epoch or before an evaluation, and it ends at the same bits."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import leanbayes as lb
from leanbayes.cli.main import main
from leanbayes.compare import time_limit, workers
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, recipe_for
from leanbayes.compare.plain_state import FOLDER, keeping
from leanbayes.compare.run_all import run_all
from leanbayes.compare.time_limit import STOPPED, TimeIsUp, TimeLimit
from leanbayes.compare.workers import run_on_workers
from leanbayes.training.state import header_of, STATE
from tests.compare.test_progress import here
from tools import kills

RECIPE = lb.Recipe(epochs=4, batch_size=64, lr=0.05, accelerator="cpu")
EVALUATION = EvaluationSpec(samples=2, shift=False, test_images=20)
SOURCE = DataSpec(name="digits", train_rows=100, validation=0.1)
FLAGS = ["--recipe.epochs", "3", "--no-shift", "--ood", "none", "--test-images", "20", "--train-rows", "100"]
FLAGS += ["--seeds", "0", "--device", "cpu", "--samples", "2"]
METHODS = [None, lb.Rank1(components=2), lb.SWAG(components=2), lb.DeepEnsemble(components=2)]


def jobs(*methods: lb.Method | None) -> list[Job]:
    shared = {"source": SOURCE, "net": "small", "evaluation": EVALUATION}
    return keeping([Job(**shared, method=method, recipe=recipe_for(method, RECIPE)) for method in methods])


class Clock:
    """Time stands still but for the looks at it: each takes a minute."""

    def __init__(self) -> None:
        self.minutes = 0

    def time(self) -> float:
        self.minutes += 1
        return 60.0 * self.minutes


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(time_limit, "time", found)
    return found


def after(looks: float) -> TimeLimit:
    """Return a limit that is over at this look at the clock, and not before."""
    return TimeLimit.of(looks)


def of_methods() -> list[Job]:
    return jobs(*METHODS)


def of_seeds() -> list[Job]:
    (plain,) = jobs(None)
    both = [replace(plain, recipe=replace(plain.recipe, seed=seed)) for seed in (0, 1)]
    return [*both, replace(plain, members=(0, 1))]


def of_trials() -> list[Job]:
    return [replace(job, tune=2) for job in jobs(None, lb.Rank1(components=2))]


@pytest.mark.parametrize("rows", [of_methods, of_seeds, of_trials])
def test_stopped_at_every_look_in_turn_it_ends_at_the_same_bits(rows, tmp_path, clock):
    run_all(rows(), tmp_path / "whole", progress=False)
    told, looks = [], 1
    while True:
        try:
            run_all(rows(), tmp_path / "parts", progress=False, limit=after(looks))
            break
        except TimeIsUp as stop:
            told.append(str(stop).partition(":")[2].partition(":")[0].strip())
            looks = looks % 3 + 1
            assert len(told) < 60, "no progress"
    assert kills.differences(tmp_path / "whole", tmp_path / "parts") == []
    assert {"not begun", "trained, not evaluated yet"} <= set(told)
    assert any(one.startswith("stopped in training after epoch") for one in told)
    assert any(one.startswith("stopped in trial 2 of 2") for one in told) == (rows is of_trials)


def test_it_stops_after_an_epoch_and_keeps_its_state(tmp_path, clock):
    (plain,) = jobs(None)
    with pytest.raises(TimeIsUp, match=r"plain, seed 0: stopped in training after epoch 2, whose state is kept"):
        run_all([plain], tmp_path, progress=False, limit=after(3))  # looks: before the run, after epochs 1 and 2
    folder = plain.folder(tmp_path)
    assert header_of(folder / STATE)["epoch"] == 2
    assert not (folder / "result.json").exists()
    assert not (folder / "model.safetensors").exists()


def test_the_last_epoch_ends_the_training_and_the_evaluation_waits(tmp_path, clock):
    (plain,) = jobs(None)
    with pytest.raises(TimeIsUp, match="trained, not evaluated yet"):
        run_all([plain], tmp_path, progress=False, limit=after(5))
    assert (plain.folder(tmp_path) / "model.safetensors").is_file()
    (result,) = run_all([plain], tmp_path, stage="train", progress=False, limit=after(2))
    assert result["status"] == "done"


def test_costs_wait_too(tmp_path, clock):
    (plain,) = jobs(None)
    with pytest.raises(TimeIsUp, match="costs are not measured"):
        run_all([plain], tmp_path, progress=False, limit=after(6))
    (result,) = run_all([plain], tmp_path, progress=False)
    assert result["status"] == "done"
    assert result["cost"]["answer_ms"] > 0


def test_a_state_for_other_rows_is_kept_if_the_training_stops_right_there(tmp_path, clock):
    both = jobs(None, lb.Rank1(components=2))
    epoch = both[1].recipe.convert_at_epoch
    with pytest.raises(TimeIsUp, match=f"after epoch {epoch}"):
        run_all(both, tmp_path, progress=False, limit=after(1 + epoch))
    with pytest.raises(TimeIsUp, match="rank1, seed 0: not begun"):
        run_all(both, tmp_path, progress=False, limit=after(3))
    assert (both[0].folder(tmp_path) / FOLDER / f"epoch{epoch}" / STATE).is_file()


def test_finished_runs_need_no_time(tmp_path, clock):
    run_all(jobs(None), tmp_path, progress=False)
    (result,) = run_all(jobs(None), tmp_path, progress=False, limit=after(0.5))
    assert result["status"] == "done"


def test_the_limit_is_no_setting():
    (job,) = jobs(None)
    assert "stop_after" not in str(job.settings())


def test_workers_stop_and_the_rows_that_follow_do_not_begin(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(workers, "on_processes", here)
    (plain,) = jobs(None)
    both = [plain, replace(plain, recipe=replace(plain.recipe, seed=1))]
    with pytest.raises(TimeIsUp, match="after epoch 1"):
        run_on_workers(both, tmp_path, workers=2, limit=after(2))


def _over(task: int, limit: TimeLimit) -> None:
    limit.check(f"task {task}")


@pytest.mark.xdist_group("processes")
def test_a_stopped_worker_is_no_failed_one():
    torch.set_num_threads(1)
    over = TimeLimit(1, time.time())
    with pytest.raises(TimeIsUp, match="stopped on 1 worker"):
        workers.on_processes(_over, [(0,)], limit=over)


def test_the_command_ends_with_its_own_code_and_resumes(tmp_path, capsys):
    command = ["compare", "--methods", "plain", *FLAGS, "--out", str(tmp_path)]
    assert main([*command, "--stop-after", "0.0001"]) == STOPPED == 3
    said = capsys.readouterr().err
    assert "0.0001 minutes of --stop-after are over. The same command resumes." in said
    assert "Traceback" not in said
    assert main([*command, "--fresh", "--stop-after", "0.0001"]) == STOPPED
    assert "The same command without --fresh resumes." in capsys.readouterr().err
    assert main([*command, "--stop-after", "60"]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stop-after", "0"], "minutes above 0, got 0"),
        (["--stop-after", "-5"], "minutes above 0, got -5"),
        (["--stop-after", "nan"], "minutes above 0, got nan"),
        (["--stop-after", "5", "--devices", "2"], "does not work on several processes a network yet"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(flags, said, tmp_path, capsys):
    assert main(["compare", "--methods", "plain", *FLAGS, *flags, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_ray_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("leanbayes.cli.compare.on_ray", lambda backend, workers: True)
    assert main(["compare", "--methods", "plain", *FLAGS, "--stop-after", "5", "--out", str(tmp_path)]) == 2
    assert "does not work on Ray yet" in capsys.readouterr().err
