"""A method that continues from the state of a plain network is the one that was trained from the beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leanbayes.cli.main import main as leanbayes
from leanbayes.runtime._files import read_tensors
from tools.branch import kept, main

FLAGS = "--data digits --net small --train-rows 200 --recipe.epochs 4 --recipe.warmup-epochs 1 --device cpu"


def flags(method: str, out: Path, more: str = "") -> list[str]:
    return f"{FLAGS} --seeds 0 --methods {method} {more} --out {out}".split()


def run_of(out: Path, method: str) -> Path:
    return out / "digits" / "small" / method / "seed0"


@pytest.mark.parametrize("method", ["implicit", "rank1"])
def test_a_branch_is_the_whole_training_bit_for_bit(method: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert leanbayes(["train", *flags(method, whole)]) == 0
    assert main(["keep", "3", *flags("plain", parts)]) == 0
    assert main(["begin", str(kept(run_of(parts, "plain"), 3)), *flags(method, parts)]) == 0
    assert leanbayes(["train", *flags(method, parts)]) == 0
    for name in ("model.safetensors", "checkpoint/last.safetensors"):
        (_, one), (_, other) = (read_tensors(run_of(out, method) / name) for out in (whole, parts))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name


def test_another_epoch_and_another_recipe_are_refused(tmp_path: Path) -> None:
    assert main(["keep", "2", *flags("plain", tmp_path)]) == 0
    state = str(kept(run_of(tmp_path, "plain"), 2))
    with pytest.raises(ValueError, match="after 3 epochs, where implicit is converted, got one after 2"):
        main(["begin", state, *flags("implicit", tmp_path)])
    with pytest.raises(ValueError, match=r"got lr 0\.1 there and 0\.3 here"):
        main(["begin", state, *flags("implicit", tmp_path, "--late 0.5 --recipe.lr 0.3")])
