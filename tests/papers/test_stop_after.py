"""`leanbayes reproduce --stop-after`: a suite stops after an epoch or a stored piece, and ends at the same bits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import leanbayes as lb
from leanbayes.cli import data as command
from leanbayes.cli.main import main
from leanbayes.compare import time_limit
from leanbayes.compare.job import DataSpec, EvaluationSpec
from leanbayes.compare.time_limit import STOPPED
from leanbayes.runtime._files import read_tensors
from leanbayes.training.state import STATE
from leanbayes_papers.harness import Run, Study, Suite, TrainingSpec
from leanbayes_papers.harness.suite import run_named
from leanbayes_papers.rank1 import ablations
from tests.compare.test_time_limit import Clock
from tools import kills

RECIPE = lb.Recipe(epochs=3, batch_size=64, lr=0.05)


def small(run: Run) -> Suite:
    """Return a suite with a compared network that is watched, a rank-1 network and an ensemble."""
    source = DataSpec(name="digits", train_rows=100)
    plain = TrainingSpec(name="plain", source=source, net="small", recipe=run.recipe(RECIPE))
    both = (replace(plain, name="rank1", method=lb.Rank1(components=2)), replace(plain, name="two", build=pair))
    evaluation = EvaluationSpec(samples=2, shift=False, test_images=20)
    compared = replace(plain, evaluation=evaluation, watch=ablations.Checkpoints)
    kinds = {"checkpoints": partial(ablations.checkpoints, specs=(compared,)), "sums": partial(sums, specs=both)}
    studies = [Study(name=name, title=name, claim="it is so.", measure=kind) for name, kind in kinds.items()]
    return Suite(paper="none", studies=(replace(studies[0], specs=(compared,)), studies[1]))


def pair(spec: TrainingSpec, data) -> lb.Ensemble:
    shape = {"num_outputs": data.num_outputs, "input_shape": data.input_shape}
    return lb.Ensemble([lb.models.build(spec.net, **shape) for _ in range(2)])


def sums(run: Run, *, specs: tuple[TrainingSpec, ...]) -> list[dict]:
    def of(spec: TrainingSpec) -> dict:
        return {"sum": sum(float(p.detach().double().sum()) for p in run.train(spec, 0).model.parameters())}

    return [
        {"name": spec.name, **run.cached(run.out / "pieces" / f"{spec.name}.json", partial(of, spec))} for spec in specs
    ]


@pytest.fixture
def suite(monkeypatch):
    offered = {"small": small}
    package = SimpleNamespace(SUITES=offered, run_suite=partial(run_named, offered))
    monkeypatch.setattr(command, "_packages", lambda: [package])


def reproduce(out: Path, *more: str) -> int:
    return main(["reproduce", "small", "--device", "cpu", "--out", str(out), *more])


def stopping(out: Path, monkeypatch, looks: int) -> int:
    with monkeypatch.context() as patched:
        patched.setattr(time_limit, "time", Clock())
        return reproduce(out, "--stop-after", str(looks))


def test_a_suite_stopped_at_every_look_in_turn_ends_at_the_same_bits(suite, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert reproduce(whole) == 0
    told, looks = [], 1
    capsys.readouterr()
    while (code := stopping(parts, monkeypatch, looks)) == STOPPED:
        said = capsys.readouterr().err
        assert "of --stop-after are over. The same command resumes." in said
        told.append(said)
        looks = looks % 3 + 1
        assert len(told) < 40, "no progress"
    assert code == 0
    assert kills.differences(whole, parts) == []
    for name in ("studies/checkpoints", "studies/sums", "pieces/rank1", "pieces/two"):
        assert (whole / f"{name}.json").read_bytes() == (parts / f"{name}.json").read_bytes()
    states = sorted((whole / "trained").rglob(str(STATE)))
    assert len(states) == 3
    for path in states:
        first, second = (read_tensors(out / path.relative_to(whole))[1] for out in (whole, parts))
        assert all(first[key].equal(second[key]) for key in first)
    both = "".join(told)
    assert "plain, seed 0: stopped in training after epoch 1, whose state is kept" in both
    assert "two, seed 0: stopped in training after epoch 1, whose state is kept" in both
    assert "rank1.json is stored" in both
    assert "sums: not begun" in both
    assert json.loads((parts / "reproduce.json").read_text())["remarks"] == []


def test_a_call_always_stores_something(suite, tmp_path, monkeypatch):
    """The time may be over before the first new training, after a long evaluation."""
    assert stopping(tmp_path, monkeypatch, 8) == STOPPED
    calls = 0
    while stopping(tmp_path, monkeypatch, 1) == STOPPED and calls < 30:
        calls += 1
    assert 3 < calls < 30


def test_begun_again_it_is_resumed_without_fresh(suite, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(time_limit, "time", Clock())
        assert reproduce(tmp_path, "--stop-after", "2", "--fresh") == STOPPED
    assert "The same command without --fresh resumes." in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_limits_of_a_suite_that_cannot_be_kept_are_refused(minutes, suite, tmp_path, capsys):
    assert reproduce(tmp_path, "--stop-after", minutes) == 2
    assert "expected --stop-after to be minutes above 0" in capsys.readouterr().err


def test_a_suite_on_several_processes_is_refused(suite, tmp_path, monkeypatch, capsys):
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_NAME", raising=False)
    assert reproduce(tmp_path, "--stop-after", "5") == 2
    assert "expected one process with --stop-after, got 2" in capsys.readouterr().err
