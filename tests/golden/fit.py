"""`fit` for a few epochs in each of its ways, resumed after a kill, and in two processes: weights and history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn, Tensor

import leanbayes as lb
from tests.golden import digest

ROOT = Path(__file__).parents[2]
TIMES = ("seconds", "peak_memory_mb")
METHODS = {
    "plain": None,
    "rank1": lb.Rank1(components=2),
    "patch": lb.ModelPatch(components=3),
    "nested": lb.NestedDropout(groups=4, first=True, min_cut=0),
    "mean_field": lb.MeanField(),
    "deep_ensemble": lb.DeepEnsemble(components=2),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late conversion": {"convert_at_epoch": 1},
    "tile": {"tile": True},
    "tile at the end": {"tile_last_epochs": 1},
    "two samples": {"samples": 2},
    "mixture": {"samples": 2, "aggregate": "mixture"},
    "accumulate": {"accumulate": 2},
    "freeze": {"freeze": True},
    "alternate": {"alternate_epochs": 1},
    "augment": {"augment": "crop_flip", "clip_norm": 0.5, "anneal_epochs": 1.5},
    "adam": {"optimizer": "adam", "lr": 0.01, "posterior_lr": 0.02, "schedule": "step", "warmup_epochs": 0.5},
    "bfloat16": {"precision": "bf16-mixed", "schedule": "linear", "posterior_schedule": "constant"},
}
LONG = {"epochs": 3, "convert_at_epoch": 1, "tile_last_epochs": 1, "augment": "flip", "anneal_epochs": 2}
"""Three epochs, each of another kind, for trainings that are killed or shared."""


def record() -> digest.Records:
    """Return the records of every way for two methods, of the plain way for all, and of the rest."""
    records: digest.Records = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for way, fields in WAYS.items():
            for name in METHODS if way == "plain" else ("rank1", "patch"):
                model = network(name)
                history = lb.fit(model, images(), recipe(**fields), validation=images(33), progress=False)
                records |= _outcome(f"{way}/{name}", model.state_dict(), history)
        records |= _regression()
        records |= _resumed(Path(folder) / "killed")
        records |= _shared(Path(folder) / "shared")
    return records


def images(rows: int = 90) -> tuple[Tensor, Tensor]:
    """Return images (rows, 1, 4, 4) whose class is the brightest of three regions; the last batch is incomplete."""
    x = torch.randn(rows, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, x.flatten(1)[:, :15].unflatten(1, (3, 5)).sum(2).argmax(1)


def network(name: str) -> nn.Module:
    """Return the same converted network every time."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4),
        nn.ReLU(), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    method = METHODS[name]
    return plain if method is None else lb.convert(plain, method)


def recipe(**fields: Any) -> lb.Recipe:
    """Return a recipe for two epochs on the CPU."""
    return lb.Recipe(**{"epochs": 2, "batch_size": 16, "lr": 0.05, "accelerator": "cpu", **fields})


def _outcome(key: str, state: dict[str, Tensor], history: list[dict[str, Any]]) -> digest.Records:
    rows = [{name: value for name, value in row.items() if name not in TIMES} for row in history]
    return {f"{key}/weights": digest.tensors(state), f"{key}/history": digest.data(rows)}


def _regression() -> digest.Records:
    x, _ = images()
    torch.manual_seed(0)
    model = lb.convert(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)), lb.ImplicitNodes())
    likelihood = lb.Gaussian(std=0.5, learn=True)
    history = lb.fit(model, (x, x.sum((2, 3))), recipe(), likelihood=likelihood, progress=False)
    return _outcome("regression/implicit", model.state_dict() | likelihood.state_dict(), history)


def _resumed(folder: Path) -> digest.Records:
    killed = _start("killed", folder)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    model = network("rank1")
    history = lb.fit(model, images(), recipe(**LONG), folder=folder, resume=True, progress=False)
    return _outcome("resumed/rank1", model.state_dict(), history)


def _shared(folder: Path) -> digest.Records:
    done = _start("shared", folder)
    assert done.returncode == 0, done.stderr.decode()
    records: digest.Records = {}
    for rank in (0, 1):
        history = json.loads((folder / f"{rank}.json").read_text())
        records |= _outcome(f"two processes/rank {rank}", load_file(folder / f"{rank}.safetensors"), history)
    return records


def _start(what: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run this file as a program: a training that kills itself, or one in two processes."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.golden.fit", what, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300, check=False)


def _train_and_die(folder: Path) -> None:
    def die(state: Any) -> None:
        if state.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    lb.fit(network("rank1"), images(), recipe(**LONG), folder=folder, callbacks=[die], progress=False)


def _train_in_two(folder: Path) -> None:
    model = network("rank1")
    history = lb.fit(model, images(), recipe(**LONG, devices=2), validation=images(33), progress=False)
    rank = torch.distributed.get_rank()
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / f"{rank}.safetensors"
    )
    (folder / f"{rank}.json").write_text(json.dumps(history))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"killed": _train_and_die, "shared": _train_in_two}[sys.argv[1]](Path(sys.argv[2]))
