"""Programs under torchrun: the example, sharded and not, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import leanbayes as lb
from examples import torchrun
from leanbayes.cli.main import main

from .together import one_worker, together

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def noise():
    """Return images and classes of the shape of the digits, without meaning and without the import of their package."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 1, 8, 8, generator=generator), torch.randint(10, (200,), generator=generator)
    return x[:150], y[:150], x[150:], y[150:]


def work(rank, world, folder, digits):
    """Run the example both ways; the first process writes its results."""
    kinds = {"ddp": False, "fsdp": True}
    if not digits:
        torchrun.load_digits = noise
    return {kind: torchrun.main(shard=shard, epochs=1, folder=folder / kind) for kind, shard in kinds.items()}


@one_worker
@pytest.mark.parametrize("digits", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["noise", "digits"])
def test_the_example_trains_alike_sharded_and_not(tmp_path, digits):
    first, second = together(2, partial(work, folder=tmp_path, digits=digits), tmp_path)
    assert first == second
    assert first["ddp"]["processes"] == 2
    assert first["ddp"]["accuracy"] > 0.9 or not digits
    assert first["ddp"]["first_process_is_off_by"] == 0
    assert first["fsdp"] == pytest.approx(first["ddp"], abs=1e-3)
    models = []
    for kind in ("ddp", "fsdp"):
        assert json.loads((tmp_path / kind / "torchrun.json").read_text()) == first[kind]
        models.append(lb.load(tmp_path / kind / "torchrun.safetensors", torchrun.DigitNet()))
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.slow  # torchrun and two more processes import everything from the beginning, twice: half a minute
def test_the_command_line_trains_once_with_the_same_weights_in_all_processes(tmp_path, capsys):
    flags = ["--methods", "rank1", "--train-rows", "200", "--recipe.epochs", "2", "--late", "0.5", "--device", "cpu"]
    flags += ["--seeds", "0"]
    models = []
    for devices in ([], ["--devices", "2"]):  # torchrun overrules it
        out = tmp_path / f"out{len(models)}"
        command = ["tests.distributed.command", str(tmp_path), "train", *flags, *devices, "--out", str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*TORCHRUN, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("rank1, seed 0: trained") == 1
        (path,) = out.rglob("model.safetensors")
        assert sorted(file.name for file in path.parent.rglob("*.*")) == [
            "history.jsonl",
            "job.json",
            "last.safetensors",
            "model.safetensors",
            "validation.json",
        ]
        states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
        models.append(lb.load(path, lb.models.SmallConvNet(input_shape=(1, 8, 8))).state_dict())
        for name, tensor in models[-1].items():
            assert torch.equal(states[0][name], tensor)
            assert torch.equal(states[1][name], tensor)
        claim = json.loads((path.parent / "job.json").read_text())
        assert claim["environment"] == {"processes": 2, "launcher": "torchrun"}
        assert claim.get("processes") == (None if devices else 2)  # the recipe says it
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert main(["train", *flags, "--out", str(tmp_path / "out0")]) == 2  # by one process: another run
    assert "holds a run with other settings (processes: 2 there, 1 now)" in capsys.readouterr().err
