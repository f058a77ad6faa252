"""Numbers of several seeds at once: the same as those of one generator after the other, bit by bit."""

from __future__ import annotations

import pytest
import torch

from leanbayes.distributions.random import Rows, standard, standard_rows

CPU = torch.device("cpu")
SEEDS = [3, 2**62 + 11, 0, 77]
KINDS = [
    [Rows("normal", (5,)), Rows("normal", (50,))],
    [Rows("uniform", (3,)), Rows("normal", (0,)), Rows("uniform", (40,))],
    [Rows("seed", (1,)), Rows("normal", (17,))],
    [Rows("normal", (7, 3), counted=True), Rows("uniform", (5,), counted=True), Rows("normal", (2,))],
    [Rows("normal", (300, 301), counted=True)],  # more numbers than are computed in one operation
]


@pytest.mark.parametrize("wanted", KINDS, ids=["normal", "uniform", "seed", "counted", "large"])
def test_rows_are_those_of_one_generator_per_seed(wanted):
    found = standard_rows(wanted, SEEDS, CPU)
    for row, seed in enumerate(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        for one, whole in zip(wanted, found, strict=True):
            expected = standard(one.kind, (1, *one.shape), CPU, generator, counted=one.counted)
            assert torch.equal(whole[row : row + 1], expected)
            assert whole.dtype == expected.dtype
