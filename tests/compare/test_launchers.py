"""Who started the processes, how many there are, and what that means for a run: its identity and its record."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leanbayes.cli.main import main
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.run import perform
from leanbayes.compare.run_all import check_alike
from leanbayes.report import load_results, markdown
from leanbayes.runtime.distributed import is_first, Launch, launched
from leanbayes.training import Recipe
from leanbayes.training.fit import fit
from leanbayes.training.state import Checkpoint
from tests.training.problems import images, rank1, short

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3", "RANK": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "3"}
FAST = ["--methods", "plain", "--train-rows", "100", "--recipe.epochs", "1", "--no-shift", "--ood", "none"]
FAST += ["--device", "cpu", "--samples", "2", "--test-images", "40", "--seeds", "0"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*TORCHRUN, *SLURM, "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def set_variables(monkeypatch):
    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def job(launch=None, **changes):
    recipe = Recipe(epochs=1, batch_size=64, accelerator="cpu")
    source, spec = DataSpec(name="digits", train_rows=100), EvaluationSpec(samples=2, shift=False, test_images=40)
    return Job(
        source=source, net="small", method=None, recipe=replace(recipe, **changes), evaluation=spec, launch=launch
    )


def test_a_process_of_its_own_has_no_launcher():
    assert launched() is None
    assert is_first()


def test_torchrun_says_who_is_first(set_variables):
    set_variables(TORCHRUN | SLURM)  # torchrun may run inside of Slurm
    assert launched() == Launch("torchrun", devices=3, nodes=2)
    assert launched().processes == 6
    assert not is_first()
    set_variables({"RANK": "0"})
    assert is_first()


def test_slurm_says_who_is_first(set_variables):
    set_variables(SLURM)
    assert launched() == Launch("slurm", devices=2, nodes=2)
    assert not is_first()
    set_variables({"SLURM_PROCID": "0"})
    assert is_first()


@pytest.mark.parametrize("variables", [
    {"SLURM_NTASKS": "1", "SLURM_PROCID": "1"},  # a step of one task in a larger job
    {"SLURM_PROCID": "1"},
    {"SLURM_NTASKS": "4"},  # salloc: nothing was started yet
])  # fmt: skip
def test_a_single_task_of_slurm_is_first(set_variables, variables):
    set_variables(variables)
    assert launched() is None
    assert is_first()


def test_an_interactive_shell_of_slurm_is_no_launcher(set_variables):
    set_variables(SLURM | {"SLURM_JOB_NAME": "interactive"})
    assert launched() is None


@pytest.mark.parametrize("per_node", ["", "3"])
def test_slurm_must_say_how_tasks_lie_on_machines(set_variables, per_node, monkeypatch, capsys):
    set_variables(SLURM)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE") if not per_node else set_variables({"SLURM_NTASKS_PER_NODE": per_node})
    assert main(["compare", "--out", "never", *FAST]) == 2
    assert "expected Slurm to say how many of its 4 tasks run on each machine" in capsys.readouterr().err


def test_ids_of_jobs_of_one_process_are_what_they_were():
    """Recorded by the commit before processes were counted, and by the files of docs/results."""
    assert job().id == "54e683d6dc5d03b9"
    assert job(devices=2).id == "d91e5229d743681e"
    kept = (ROOT / "docs" / "results").glob("*/*/*/plain/seed*/result.json")
    records = [json.loads(path.read_text()) for path in kept]
    alike = [record for record in records if _rebuilt(record["settings"]).settings() == record["settings"]]
    assert len(alike) > 1  # others lack fields that recipes got since
    assert all(_rebuilt(record["settings"]).id == record["id"] for record in alike)


def _rebuilt(said):
    return Job(
        source=DataSpec(**said["data"]),
        net=said["net"],
        method=None,
        recipe=Recipe(**said["recipe"]),
        evaluation=EvaluationSpec(**said["judging"] | {"ood": tuple(said["judging"]["ood"])}),
        launch=None,
    )


def test_the_number_of_processes_is_part_of_the_identity():
    assert job(Launch("torchrun", 1, 1)).id == job().id
    assert job(Launch("torchrun", 2, 1)).id != job().id
    assert job(Launch("torchrun", 2, 1)).id == job(Launch("slurm", 1, 2)).id
    assert job(Launch("torchrun", 2, 1)).settings()["processes"] == 2
    assert job(Launch("torchrun", 2, 1), devices=2).id == job(devices=2).id  # the recipe says it
    assert job(Launch("torchrun", 1, 1), devices=2).settings()["processes"] == 1


def test_a_job_knows_who_started_it(set_variables):
    set_variables(TORCHRUN)
    made = Job(source=DataSpec(name="digits"), net="small", method=None, recipe=Recipe())
    assert made.processes == 6


@pytest.fixture(scope="module")
def experiment():
    return Experiment(job().source, "small", job().evaluation)


def test_processes_are_recorded_and_other_numbers_are_not_kept(experiment, tmp_path):
    two = job(Launch("torchrun", 2, 1))
    done = perform(two, experiment, tmp_path)
    claim = json.loads((two.folder(tmp_path) / "job.json").read_text())
    for said in (done["environment"], claim["environment"]):
        assert (said["processes"], said["launcher"]) == (2, "torchrun")
    assert perform(two, experiment, tmp_path)["created"] == done["created"]
    assert perform(job(Launch("slurm", 1, 2)), experiment, tmp_path)["created"] == done["created"]
    for other, number in ((job(), 1), (job(Launch("torchrun", 4, 1)), 4)):
        with pytest.raises(ValueError, match=rf"other settings \(processes: 2 there, {number} now\)"):
            perform(other, experiment, tmp_path)
    (two.folder(tmp_path) / "job.json").unlink()  # as if lost: the result says it, too
    with pytest.raises(ValueError, match=r"finished run with other settings \(processes: 2 there, 1 now\)"):
        perform(job(), experiment, tmp_path)


def test_one_process_is_recorded_and_older_runs_are_kept(experiment, tmp_path):
    done = perform(job(), experiment, tmp_path)
    path = job().folder(tmp_path) / "job.json"
    claim = json.loads(path.read_text())
    assert claim.pop("environment") == {"processes": 1, "launcher": "local"}
    assert "processes" not in claim
    assert "processes" not in done["settings"]
    path.write_text(json.dumps(claim))  # as an older version wrote it
    assert perform(job(), experiment, tmp_path)["created"] == done["created"]
    with pytest.raises(ValueError, match=r"other settings \(processes: 1 there, 2 now\)"):
        perform(job(Launch("torchrun", 2, 1)), experiment, tmp_path)


def test_seeds_of_other_numbers_of_processes_are_not_seeds_of_one_another(experiment, tmp_path):
    perform(job(), experiment, tmp_path)
    two = job(Launch("torchrun", 2, 1), seed=1)
    with pytest.raises(ValueError, match="processes: 1 there, 2 now"):
        check_alike([two], tmp_path)
    perform(two, experiment, tmp_path)
    text = markdown(load_results(tmp_path))
    assert "plain (processes=1)" in text
    assert "plain (processes=2)" in text
    assert "1 thread, 2 processes" in text or "threads, 2 processes" in text


def test_a_training_is_resumed_by_as_many_processes(tmp_path, monkeypatch):
    fit(rank1(), images(), short(), folder=tmp_path, progress=False)
    monkeypatch.setattr("leanbayes.training.state.rank_and_world", lambda: (0, 2))
    with pytest.raises(ValueError, match="another number of processes: processes was 1 and is 2"):
        fit(rank1(), images(), short(), folder=tmp_path, resume=True, progress=False)


def test_an_older_state_says_nothing_of_processes(tmp_path, monkeypatch):
    save = Checkpoint.save

    def without(self, *state):
        dumps = json.dumps
        with monkeypatch.context() as patched:
            patched.setattr(json, "dumps", lambda header, **how: dumps(_lacking(header), **how))
            save(self, *state)

    monkeypatch.setattr(Checkpoint, "save", without)
    fit(rank1(), images(), short(), folder=tmp_path, progress=False)
    monkeypatch.setattr("leanbayes.training.state.rank_and_world", lambda: (0, 2))
    assert len(fit(rank1(), images(), short(), folder=tmp_path, resume=True, progress=False)) == short().epochs


def _lacking(header):
    """Return the header of a state without the number of processes; other JSON stays unchanged."""
    if "format" in header:
        assert header.pop("processes") == 1
    return header


@pytest.mark.slow  # two processes import everything from the beginning
def test_two_tasks_of_slurm_are_one_training(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    common |= {"SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "leanbayes", "compare", *FAST, "--out", str(tmp_path)]
    tasks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | common | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [task.communicate(timeout=300) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert said[0][1].count("plain, seed 0: accuracy") == 1
    assert "leanbayes" not in said[1][1]
    assert said[1][0] == ""
    (path,) = tmp_path.rglob("result.json")
    assert json.loads(path.read_text())["environment"]["launcher"] == "slurm"
    assert json.loads(path.read_text())["environment"]["processes"] == 2
