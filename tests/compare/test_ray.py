"""Sweeps and scores on Ray are those of local processes; where Ray goes and where not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import leanbayes as lb
from leanbayes.cli.main import main
from leanbayes.compare import workers as on
from leanbayes.compare.batch_predict import FIELDS, read_scores, score
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, method_of, recipe_for
from leanbayes.compare.workers import run_on_workers

NOT_COMPARED = ("created", "cost")
"""What differs from run to run: dates, times, memory."""


@pytest.fixture(scope="module")
def ray():
    found = pytest.importorskip("ray", reason="Ray is not installed: pip install leanbayes[ray]")
    found.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield found
    found.shutdown()


def jobs(*methods: str, seeds: tuple[int, ...] = (0, 1)) -> list[Job]:
    source = DataSpec(name="digits", train_rows=100)
    recipe = lb.Recipe(epochs=1, batch_size=32, accelerator="cpu")
    kinds = [method_of(name) for name in methods]
    judging = EvaluationSpec(samples=2, shift=False, test_images=40)
    made = [(kind, recipe_for(kind, recipe)) for kind in kinds]

    return [
        Job(source=source, net="small", method=kind, recipe=replace(own, seed=seed), evaluation=judging)
        for kind, own in made
        for seed in seeds
    ]


def outcomes(out: Path) -> dict[str, dict]:
    found = {}
    for path in sorted(out.rglob("result.json")):
        result = json.loads(path.read_text())
        for row in result["history"]:
            del row["seconds"], row["peak_memory_mb"]
        found[str(path.relative_to(out))] = {k: v for k, v in result.items() if k not in NOT_COMPARED}
    return found


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_ray_and_local_sweeps_write_the_same(ray, tmp_path, capfd):
    sweep = jobs("plain", "rank1")
    on.run_on_ray(sweep, tmp_path / "ray", workers=2)
    assert capfd.readouterr().err.count("accuracy") == 4
    run_on_workers(sweep, tmp_path / "local", workers=2)
    run_on_workers(sweep, tmp_path / "one")
    assert len(outcomes(tmp_path / "ray")) == 4
    assert outcomes(tmp_path / "ray") == outcomes(tmp_path / "local") == outcomes(tmp_path / "one")
    models = sorted((tmp_path / "ray").rglob("model.safetensors"))
    for model in models:
        other = tmp_path / "local" / model.relative_to(tmp_path / "ray")
        assert model.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_finished_runs_are_kept_and_failures_stop_nobody(ray, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(
        "import os, torch\n"
        "def make(num_outputs, input_shape):\n"
        "    if torch.initial_seed() == 1 and 'ray' in os.environ.get('LEANBAYES_TEST', ''): os._exit(3)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_outputs))\n"
    )
    monkeypatch.setenv("LEANBAYES_TEST", "ray")

    sweep = [replace(job, net="nets:make") for job in jobs("plain", seeds=(0, 1, 2))]
    found = on.run_on_ray(sweep, Path("out"))
    assert [result["status"] for result in found] == ["done", "failed", "done"]
    assert "its worker died" in found[1]["error"]
    monkeypatch.setenv("LEANBAYES_TEST", "")
    capfd.readouterr()
    found = on.run_on_ray(sweep, Path("out"))
    assert [result["status"] for result in found] == ["done"] * 3
    assert capfd.readouterr().err.count("kept") == 2


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done(ray, tmp_path, monkeypatch):
    def interrupted(ray, reference):
        ray.get(reference)
        raise KeyboardInterrupt

    sweep = jobs("plain", seeds=(0, 1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(on, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            on.run_on_ray(sweep, tmp_path, workers=1)
    assert len(outcomes(tmp_path)) == 1
    assert all(result["status"] == "done" for result in on.run_on_ray(sweep, tmp_path))


def _minus(x):
    if x.shape[0] == 4:
        raise ValueError("four rows are too few")
    return -x


@pytest.mark.slow
def test_scores_on_ray_are_those_of_one_process(ray, tmp_path, capfd):
    torch.manual_seed(0)
    model = lb.convert(torch.nn.Sequential(torch.nn.Linear(6, 3)), lb.Rank1(components=2))
    np.save(tmp_path / "rows.npy", torch.randn(25, 6).numpy())
    how = {"samples": 4, "part_rows": 7}
    score(model, tmp_path / "rows.npy", tmp_path / "one", **how)
    score(model, tmp_path / "rows.npy", tmp_path / "ray", **how, backend="ray")
    one, other = read_scores(tmp_path / "one"), read_scores(tmp_path / "ray")
    assert all(np.array_equal(one[name], other[name]) for name in FIELDS)
    with pytest.raises(RuntimeError, match="1 of 4 parts are missing"):
        score(model, tmp_path / "rows.npy", tmp_path / "bad", **how, backend="ray", inputs=_minus)
    assert "four rows are too few" in capfd.readouterr().err


def test_where_work_goes(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on, "find_spec", lambda name: object())
    assert [on.on_ray("auto", n) for n in (None, 1, 2)] == [False, False, True]
    assert [on.on_ray("local", 2), on.on_ray("ray", None)] == [False, True]
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert on.on_ray("auto", None)
    assert not on.on_ray("local", None)
    monkeypatch.setattr(on, "find_spec", lambda name: None)
    assert not on.on_ray("auto", 2)
    with pytest.raises(ModuleNotFoundError, match=r"pip install leanbayes\[ray\]"):
        on.on_ray("ray", 2)


def test_a_run_on_several_devices_is_refused(tmp_path):

    (job,) = jobs("plain", seeds=(0,))
    with pytest.raises(ValueError, match="--devices 1"):
        on.run_on_ray([replace(job, recipe=replace(job.recipe, devices=2))], tmp_path)


def test_the_command_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(on, "find_spec", lambda name: None)
    assert main(["compare", "--backend", "ray", "--methods", "plain", "--out", str(tmp_path)]) == 2
    assert "pip install leanbayes[ray]" in capsys.readouterr().err
