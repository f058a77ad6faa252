"""A folder of runs goes to another place, or another machine with other data folders, and resumes there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import leanbayes as lb
from leanbayes.compare import row_training
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, recipe_for
from leanbayes.compare.plain_state import keeping
from leanbayes.compare.run_all import run_in_order
from leanbayes.training.state import STATE
from tests.compare.test_plain_state import same, shared_epochs

COSINE = lb.Recipe(epochs=4, batch_size=32, lr=0.05, warmup_epochs=1, accelerator="cpu", seed=3)
STOPPING = replace(COSINE, epochs=12, warmup_epochs=0, schedule="constant", patience=2, optimizer="adam", lr=0.005)
EVALUATION = EvaluationSpec(samples=2, shift=False, test_images=20)


def write_table(folder: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x[:, 0] + 0.3 * torch.randn(60, generator=generator)
    rows = "\n".join(",".join(f"{value:.5f}" for value in (*row, target)) for row, target in zip(x, y, strict=True))
    folder.mkdir()
    (folder / "table.csv").write_text(f"a,b,c,y\n{rows}\n")
    return str(folder / "table.csv")


def pair(source: DataSpec, net: str, recipe: lb.Recipe) -> list[Job]:
    shared = {"source": source, "net": net, "evaluation": EVALUATION}
    methods = [None, lb.Rank1(components=2)]
    return keeping([Job(**shared, method=method, recipe=recipe_for(method, recipe)) for method in methods])


def moved_rows(tmp_path: Path, recipe: lb.Recipe) -> tuple[list[Job], Path]:
    """Train the plain row here, move the table and the runs, and return the jobs and the folder there."""
    source = DataSpec(name=write_table(tmp_path / "here"), validation=0.2)
    run_in_order(pair(source, "mlp", recipe)[:1], tmp_path / "runs", progress=False)
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    return pair(replace(source, name=str(tmp_path / "there" / "table.csv")), "mlp", recipe), tmp_path / "elsewhere"


def test_a_row_begins_from_the_kept_state_where_table_and_runs_were_moved(tmp_path):
    jobs, there = moved_rows(tmp_path, COSINE)
    results = run_in_order(jobs, there, progress=False)
    assert [result["status"] for result in results] == ["done", "done"]
    plain, late = (job.folder(there) for job in jobs)
    assert shared_epochs(plain, late) == jobs[1].recipe.convert_at_epoch == 3
    run_in_order(jobs[1:], tmp_path / "apart", progress=False)
    assert same(late, jobs[1].folder(tmp_path / "apart"))


def test_a_row_knows_the_validation_of_the_plain_network_where_the_table_was_moved(tmp_path, monkeypatch):
    jobs, there = moved_rows(tmp_path, STOPPING)
    calls = []
    by_folds = row_training._by_folds
    monkeypatch.setattr(row_training, "_by_folds", lambda *given: calls.append(given) or by_folds(*given))
    run_in_order(jobs, there, progress=False)
    assert len(calls) == 1  # of the row, not of its plain network once more


def test_another_table_of_the_same_name_has_no_kept_state(tmp_path):
    """Names may be the same: the kept states are compared by the sums of the data."""
    jobs, there = moved_rows(tmp_path, COSINE)
    path = Path(jobs[0].source.name)
    path.write_text(path.read_text().replace("0.", "1."))
    run_in_order(jobs[1:], there, progress=False)
    plain, late = (job.folder(there) for job in jobs)
    assert shared_epochs(plain, late) == 0


def digits(root: Path | None) -> Job:
    source = DataSpec(name="digits", root=None if root is None else str(root), train_rows=100)
    return Job(source=source, net="small", method=None, recipe=COSINE, evaluation=EVALUATION)


def interrupted(job: Job, out: Path) -> Path:
    """Train a part of a job, as a process that is killed after its second epoch."""

    class Killed(BaseException):
        pass

    def kill(state: lb.EpochState) -> None:
        if state.epoch == 2:
            raise Killed

    with pytest.raises(Killed):
        run_in_order([job], out, progress=False, watch=lambda *_: (kill,))
    assert (job.folder(out) / STATE).is_file()
    return job.folder(out)


@pytest.mark.parametrize("given", [True, False], ids=["another --root", "LEANBAYES_DATA"])
def test_a_training_resumes_where_the_known_data_are_in_another_folder(given, tmp_path):
    (tmp_path / "data").mkdir()
    folder = interrupted(digits(tmp_path / "data"), tmp_path / "runs")
    (tmp_path / "data").rename(tmp_path / "other")
    job = digits(tmp_path / "other" if given else None)
    (result,) = run_in_order([job], tmp_path / "runs", progress=False)
    assert result["status"] == "done"
    run_in_order([job], tmp_path / "whole", progress=False)
    assert same(folder, job.folder(tmp_path / "whole"))


def test_a_data_folder_that_is_still_there_is_another_one(tmp_path):
    for name in ("data", "other"):
        (tmp_path / name).mkdir()
    interrupted(digits(tmp_path / "data"), tmp_path / "runs")
    with pytest.raises(ValueError, match=r"other settings \(data.root"):
        run_in_order([digits(tmp_path / "other")], tmp_path / "runs", progress=False)
