"""Two processes through Fabric train and validate as one does on the same global batches, noise and all."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from leanbayes.training import devices
from leanbayes.training.fit import fit
from tests.distributed.together import one_worker, together

from . import two_processes
from .problems import images, rank1, same, short

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


def test_one_process_trains_without_fabric_as_with_it(monkeypatch):
    trained = []
    for own in (devices.OWN, ()):
        monkeypatch.setattr(devices, "OWN", own)
        model, states = rank1(), []
        history = fit(model, images(), short(), validation=images(20), callbacks=[states.append])
        held = states[0].fabric
        assert isinstance(held, devices.OneDevice) == bool(own)
        names = ("device", "world_size", "global_rank", "local_rank", "is_global_zero")
        numbers = torch.arange(3.0)
        held.barrier("here")
        said = [
            held.broadcast("x", 0),
            held.all_reduce(numbers, None, "sum").tolist(),
            held.all_gather(numbers).tolist(),
        ]
        about = [*(getattr(held, name) for name in names), *said]
        trained.append((model, [row["valid_nll"] for row in history], about))
    (first, losses, about), (second, others, them) = trained
    assert same(first, second)
    assert losses == others
    assert about == them


def test_a_device_that_is_not_there_is_refused():
    missing = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ValueError, match=rf"expected a device among auto.*cpu on this machine, got '{missing}'"):
        fit(rank1(), images(), short(accelerator=missing))


def test_a_batch_is_divided_among_all_processes(monkeypatch):
    monkeypatch.setattr(devices, "OWN", ())
    monkeypatch.setattr("lightning_fabric.Fabric.world_size", 2)
    with pytest.raises(ValueError, match="expected batch_size to be a multiple of the 2 processes, which share every"):
        fit(rank1(), images(), short(batch_size=15))
