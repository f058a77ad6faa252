"""A comparison that stops at any write, and resumes, gives the same results as an undisturbed one.

`tools/kills.py` does the same with real processes and SIGKILL.
"""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import leanbayes as lb
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, recipe_for
from leanbayes.compare.plain_state import keeping
from leanbayes.compare.run_all import run_all
from tools import kills

RECIPE = lb.Recipe(epochs=3, batch_size=64, lr=0.05, accelerator="cpu")
EVALUATION = EvaluationSpec(samples=2, shift=False, test_images=20)
SOURCE = DataSpec(name="digits", train_rows=100, validation=0.1)


class Killed(BaseException):
    """No code catches it, as none catches SIGKILL."""


@pytest.fixture
def jobs() -> list[Job]:
    methods = [None, lb.Rank1(components=2)]
    return keeping(
        [
            Job(source=SOURCE, net="small", method=m, recipe=recipe_for(m, RECIPE), evaluation=EVALUATION)
            for m in methods
        ]
    )


def test_stopped_before_every_file_in_turn(jobs, tmp_path, monkeypatch):
    """Each turn writes up to four files, and is killed in the middle of the next one."""
    run_all(jobs, tmp_path / "whole", progress=False)
    flush, allowed, turns = os.fsync, 0, 0

    def stop(handle: int) -> None:
        nonlocal written
        flush(handle)
        if written == allowed:
            raise Killed
        written += 1

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stop)
        while True:
            written, turns = 0, turns + 1
            torch.manual_seed(turns)  # the generator of a new process is anywhere
            try:
                run_all(jobs, tmp_path / "killed", progress=False)
                break
            except Killed:
                assert turns < 60, "no progress"
                allowed = turns % 5  # up to four files, one of them the settings
    assert turns > 8
    assert kills.differences(tmp_path / "whole", tmp_path / "killed") == []


def test_a_difference_is_found(jobs, tmp_path):
    run_all(jobs[:1], tmp_path / "a", progress=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert kills.differences(tmp_path / "a", tmp_path / "b") == []
    path = jobs[0].folder(tmp_path / "b") / "result.json"
    text = path.read_text()
    path.write_text(text.replace('"nll": ', '"nll": 1'))
    assert any("metrics" in line for line in kills.differences(tmp_path / "a", tmp_path / "b"))
    path.write_text(text.replace('"created": "', '"created": "1'))
    assert kills.differences(tmp_path / "a", tmp_path / "b") == []
    path.unlink()
    assert any("missing" in line for line in kills.differences(tmp_path / "a", tmp_path / "b"))
