"""A real process, killed with SIGKILL at three moments, one of them in the middle of a write, and resumed each time."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time

import torch
from safetensors.torch import load_file

from leanbayes.training.fit import fit
from tests.distributed.together import one_worker, SLOW

from . import killed
from .problems import images, rank1

PATIENCE = 60.0


@one_worker
def test_killed_three_times_and_resumed_equals_an_unbroken_training(tmp_path):
    # Forked from a server that has imported the slow packages.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(SLOW))
    moments = random.Random(0)
    checkpoint = tmp_path / "broken" / "checkpoint"
    for turn in range(3):
        started = context.Event()
        in_a_write = 2 if turn == 1 else None
        process = context.Process(target=killed.train, args=(tmp_path / "broken", started, in_a_write, 0.01))
        process.start()
        assert started.wait(PATIENCE)
        if in_a_write is None:
            time.sleep(moments.uniform(0.0, 0.2))
        process.kill()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        half_written = list(checkpoint.glob(".*.tmp"))
        assert len(half_written) == 1 or in_a_write is None
    last = context.Process(target=killed.train, args=(tmp_path / "broken", started, None, 0.0))
    last.start()
    last.join(PATIENCE)
    assert last.exitcode == 0
    fit(rank1(), images(), killed.RECIPE, folder=tmp_path / "unbroken")
    ours, theirs = (load_file(tmp_path / name / "checkpoint" / "last.safetensors") for name in ("broken", "unbroken"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [path.name for path in checkpoint.iterdir()] == ["last.safetensors"]
