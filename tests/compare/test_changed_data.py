"""A run that is not finished resumes on the rows that it began with, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from leanbayes.cli.main import main
from leanbayes.compare import row_training, time_limit
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.run import perform
from leanbayes.compare.run_all import run_in_order
from leanbayes.compare.time_limit import STOPPED
from leanbayes.training.state import STATE
from tests.compare.test_moved import moved_rows, STOPPING
from tests.compare.test_time_limit import Clock
from tools import kills

FLAGS = ["--methods", "plain", "--seeds", "0", "--validation", "0", "--recipe.epochs", "3", "--samples", "2"]
FLAGS += ["--device", "cpu", "--no-shift", "--ood", "none"]
REFUSED = "holds an unfinished run on other data"


def write_table(folder: Path, slope: float = 1.0) -> str:
    x = np.random.default_rng(0).normal(size=(60, 2))
    folder.mkdir(exist_ok=True)
    np.savetxt(folder / "t.csv", np.c_[x, slope * x[:, 0]], delimiter=",", header="a,b,y", comments="")
    return str(folder / "t.csv")


def write_images(folder: Path, seed: int = 0) -> str:
    pixels = np.random.default_rng(seed)
    for split, rows in (("train", 12), ("test", 6)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for row in range(rows):
                image = Image.fromarray(pixels.integers(0, 255, (8, 8), dtype=np.uint8))
                image.save(folder / split / name / f"{row:02}.png")
    return str(folder)


@pytest.fixture
def stopped(monkeypatch):
    """Return a function that stops a command after its first epoch."""

    def run(*arguments: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(time_limit, "time", Clock())
            assert main([*arguments, "--stop-after", "2"]) == STOPPED

    return run


def state_of(out: Path) -> bytes:
    (path,) = out.rglob(str(STATE))
    return path.read_bytes()


@pytest.mark.parametrize("write", [write_table, write_images], ids=["a table", "images in a folder"])
def test_a_half_trained_run_does_not_resume_on_data_that_have_changed(write, tmp_path, stopped, capsys):
    out = tmp_path / "runs"
    command = ["compare", *FLAGS, "--out", str(out), "--data"]
    stopped(*command, write(tmp_path / "data"))
    before = state_of(out)
    assert main([*command, write(tmp_path / "data", 2)]) == 2
    said = capsys.readouterr().err
    assert REFUSED in said
    assert "has changed since; restore it, choose another --out" in said
    assert "--fresh to begin again" in said
    assert main(["train", *command[1:], str(write(tmp_path / "data", 2)), "--workers", "2", "--seeds", "0,1"]) == 2
    assert REFUSED in capsys.readouterr().err
    assert state_of(out) == before
    assert main([*command, write(tmp_path / "data", 2), "--fresh"]) == 0


def test_a_half_trained_run_resumes_to_the_same_bits_where_its_data_were_moved(tmp_path, stopped, capsys):
    command = ["compare", *FLAGS]
    stopped(*command, "--data", write_table(tmp_path / "here"), "--out", str(tmp_path / "runs"))
    (tmp_path / "here").rename(tmp_path / "there")
    there = ["--data", str(tmp_path / "there" / "t.csv"), "--out"]
    write_table(tmp_path / "there", 2.0)
    assert main([*command, *there, str(tmp_path / "runs")]) == 2
    assert REFUSED in capsys.readouterr().err
    write_table(tmp_path / "there")
    assert main([*command, *there, str(tmp_path / "runs")]) == 0
    assert main([*command, *there, str(tmp_path / "whole")]) == 0
    assert kills.differences(tmp_path / "whole", tmp_path / "runs") == []


def test_a_half_trained_run_of_an_earlier_version_resumes(tmp_path, stopped):
    command = ["compare", *FLAGS, "--data", write_table(tmp_path / "data"), "--out", str(tmp_path / "runs")]
    stopped(*command)
    (path,) = (tmp_path / "runs").rglob("job.json")
    claim = json.loads(path.read_text())
    assert len(claim.pop("sha256")) == 64
    path.write_text(json.dumps(claim))  # as an earlier version wrote it
    write_table(tmp_path / "data", 2.0)
    assert main(command) == 0
    assert "sha256" in json.loads(path.read_text())


def test_a_trained_model_is_not_evaluated_on_data_that_have_changed(tmp_path, capsys):
    flags = [*FLAGS, "--data", write_table(tmp_path / "data"), "--out", str(tmp_path / "runs")]
    assert main(["train", *flags]) == 0
    (path,) = (tmp_path / "runs").rglob("job.json")
    before = path.read_text()
    write_table(tmp_path / "data", 2.0)
    assert main(["evaluate", *flags]) == 2
    assert REFUSED in capsys.readouterr().err
    assert main(["predict", str(path.parent), "--data", str(tmp_path / "data" / "t.csv")]) == 2
    assert "have changed" in capsys.readouterr().err
    assert main(["evaluate", *flags, "--fresh"]) == 0
    assert path.read_text() == before  # still that of the training


def test_a_run_that_failed_before_its_first_state_begins_again_on_mended_data(tmp_path, capsys):
    command = ["compare", *FLAGS, "--recipe.optimizer", "sgd", "--recipe.lr", "1e30", "--out", str(tmp_path / "runs")]
    for slope in (1.0, 2.0):
        assert main([*command, "--data", write_table(tmp_path / "data", slope)]) == 1
    assert "other data" not in capsys.readouterr().err


def test_an_ensemble_of_seeds_does_not_use_networks_of_other_data(tmp_path, capsys):
    flags = [*FLAGS, "--out", str(tmp_path / "runs"), "--data"]
    assert main(["train", *flags, write_table(tmp_path / "data")]) == 0
    assert main(["train", *flags, write_table(tmp_path / "data", 2.0), "--methods", "seed_ensemble"]) == 2
    said = capsys.readouterr().err
    assert REFUSED in said
    assert "plain" in said


def test_a_row_does_not_know_the_validation_of_the_plain_network_on_other_data(tmp_path, monkeypatch):
    jobs, there = moved_rows(tmp_path, STOPPING)
    write_table(Path(jobs[0].source.name).parent)
    Path(jobs[0].source.name).write_bytes((Path(jobs[0].source.name).parent / "t.csv").read_bytes())
    calls = []
    by_folds = row_training._by_folds
    monkeypatch.setattr(row_training, "_by_folds", lambda *given: calls.append(given) or by_folds(*given))
    run_in_order(jobs[1:], there, progress=False)
    assert len(calls) == 2  # of the row, and of its plain network on the rows of now


def test_trials_on_other_data_do_not_count(tmp_path):
    pytest.importorskip("optuna")
    jobs, there = moved_rows(tmp_path, replace(STOPPING, epochs=2))
    job = replace(jobs[0], tune=1, recipe=replace(jobs[0].recipe, seed=4))
    result = perform(job, Experiment(job.source, job.net, job.evaluation), there)
    assert result["status"] == "done"
    assert "sha256" not in result["tuning"]
    path = Path(job.source.name)
    path.write_text(path.read_text().replace("0.", "1."))
    other = replace(job, recipe=replace(job.recipe, seed=5))
    with pytest.raises(ValueError, match="holds trials of --tune on other data"):
        perform(other, Experiment(job.source, job.net, job.evaluation), there)
