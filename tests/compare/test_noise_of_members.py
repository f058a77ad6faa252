"""Rows with several networks keep the noise of each in their model. Older models mean the same as before."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import leanbayes as lb
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.load_run import load_run
from leanbayes.compare.row_training import FILE as VALIDATION
from leanbayes.compare.run import MODEL
from leanbayes.compare.run_all import run_in_order
from leanbayes.runtime._files import read_tensors, write_tensors
from leanbayes.training.state import STATE
from tests.compare.test_moved import write_table

RECIPE = lb.Recipe(epochs=4, batch_size=16, optimizer="adam", lr=0.02, accelerator="cpu")
NOISE = "likelihood.log_std"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[list[Path], list[dict]]:
    """Return the folders and the results of a deep ensemble, of two plain seeds and of their ensemble."""
    folder = tmp_path_factory.mktemp("noise")
    source = DataSpec(name=write_table(folder / "data"), validation=0.2)
    evaluation = EvaluationSpec(samples=2, shift=False)
    plain = Job(source=source, net="mlp", method=None, recipe=RECIPE, evaluation=evaluation)
    seeds = [plain, replace(plain, recipe=replace(RECIPE, seed=1))]
    jobs = [replace(plain, method=lb.DeepEnsemble(components=2)), *seeds, replace(plain, members=(0, 1))]
    results = run_in_order(jobs, folder / "runs", progress=False)
    assert [result["status"] for result in results] == ["done"] * 4
    return [job.folder(folder / "runs") for job in jobs], results


def factor(run: Path) -> float:
    return math.log(json.loads((run / VALIDATION).read_text())["noise"])


def state_of(folder: Path) -> torch.Tensor:
    return read_tensors(folder / STATE)[1][f"model/{NOISE}"]


def test_a_deep_ensemble_keeps_the_noise_of_each_member(runs):
    run = runs[0][0]
    expected = torch.stack([state_of(run / f"member{k}") for k in range(2)]) + factor(run)
    found = load_run(run).likelihood.log_std.detach()
    torch.testing.assert_close(found, expected)
    assert found[0] != found[1]


def test_an_ensemble_of_seeds_has_the_noise_of_each_seed(runs):
    plain = [load_run(folder).likelihood.log_std.detach() for folder in runs[0][1:3]]
    found = load_run(runs[0][3])
    torch.testing.assert_close(found.likelihood.log_std.detach(), torch.stack(plain))
    p = lb.predict(found.model, torch.zeros(1, 3), found.likelihood, samples=2)
    torch.testing.assert_close(p.variances.flatten(), (2 * torch.stack(plain)).exp())


def test_a_model_of_an_earlier_version_has_the_noise_of_its_last_member(runs):
    run = runs[0][0]
    path = run / MODEL
    before = path.read_bytes()
    metadata, tensors = read_tensors(path)
    header = json.loads(metadata["leanbayes"])
    assert header.pop("likelihood")["options"]["members"] == 2
    del tensors[NOISE]
    write_tensors(tensors, path, metadata | {"leanbayes": json.dumps(header | {"likelihood": None})})
    try:
        found = load_run(run).likelihood.log_std.detach()
    finally:
        path.write_bytes(before)
    torch.testing.assert_close(found, state_of(run / "member1") + factor(run))
