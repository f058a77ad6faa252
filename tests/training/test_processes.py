"""Two processes through Fabric train and evaluate as one does on the same global batches, noise and all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leanbayes.training.fit import fit

from . import two_processes
from .problems import images, rank1, short

ROOT = Path(__file__).parent.parent.parent
DIRECT = [sys.executable, "-m", "tests.training.two_processes"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", DIRECT[-1]]


def results(folder, command, devices):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder), str(devices)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}of{devices}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("command", "devices"), [(DIRECT, 2), pytest.param(TORCHRUN, 1, marks=pytest.mark.slow)], ids=["fabric", "torchrun"]
)
def test_two_processes_equal_one(tmp_path, command, devices):
    one = rank1(norm=False)
    alone = fit(one, images(90), two_processes.recipe(1), validation=images(33))
    ranks = results(tmp_path, command, devices)
    for rank in ranks:
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(torch.tensor(rank["state"][name]), tensor, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(rank["history"], alone, strict=True):
            for name in ("loss", "nll", "kl", "valid_nll", "valid_accuracy"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
        assert rank["resumed"]
        assert "the inputs of the batch are not finite" in rank["error"]
    assert ranks[0]["state"] == ranks[1]["state"]


def test_a_batch_is_divided_among_all_processes(monkeypatch):
    monkeypatch.setattr("lightning_fabric.Fabric.world_size", 2)
    with pytest.raises(ValueError, match="expected batch_size to be a multiple of the 2 processes, which share every"):
        fit(rank1(), images(), short(batch_size=15))
