"""Two processes through Fabric train and validate as one does on the same global batches, noise and all."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from leanbayes.training.fit import fit
from tests.distributed.together import one_worker, together

from . import two_processes
from .problems import images, rank1, short

ROOT = Path(__file__).parent.parent.parent
DIRECT = [sys.executable, "-m", "tests.training.two_processes"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", DIRECT[-1]]


def work(rank, world, folder):
    return two_processes.train(folder, world)


def forked(folder):
    """Return the results of processes that have joined before `fit`."""
    return together(2, partial(work, folder=folder / "run"), folder)


def started(folder, command, devices):
    """Return the results of processes that a command starts."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder), str(devices)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}of2.pt", weights_only=True) for rank in (0, 1)]


@one_worker
@pytest.mark.parametrize(
    "results",
    [
        forked,
        pytest.param(partial(started, command=DIRECT, devices=2), marks=pytest.mark.slow),
        pytest.param(partial(started, command=TORCHRUN, devices=1), marks=pytest.mark.slow),
    ],
    ids=["forked", "fabric", "torchrun"],
)
def test_two_processes_equal_one(tmp_path, results):
    one = rank1(norm=False)
    alone = fit(one, images(90), two_processes.recipe(1), validation=images(33))
    ranks = results(tmp_path)
    for rank in ranks:
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(rank["state"][name], tensor, atol=1e-5, rtol=1e-4)
            assert torch.equal(rank["state"][name], ranks[0]["state"][name])
        for ours, theirs in zip(rank["history"], alone, strict=True):
            for name in ("loss", "nll", "kl", "valid_nll", "valid_accuracy"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
        assert rank["resumed"]
        assert "the inputs of the batch are not finite" in rank["error"]


def test_a_batch_is_divided_among_all_processes(monkeypatch):
    monkeypatch.setattr("lightning_fabric.Fabric.world_size", 2)
    with pytest.raises(ValueError, match="expected batch_size to be a multiple of the 2 processes, which share every"):
        fit(rank1(), images(), short(batch_size=15))
