"""The Triton kernels without a GPU: interpreted against float64, and compiled for the GPU that they are meant for.

Triton is no dependency. Where it is installed, call `pytest tests/runtime/test_row_kernels.py`, with and without
TRITON_INTERPRET=1: Triton reads the variable when it is imported. Its interpreter needs NumPy below 2.4.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from leanbayes.runtime.row_gradients import by_position

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start")

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 16, 4, 4), (1, 130, 3, 3), (5, 17, 1, 1), (2, 5, 40, 30), (1, 2, 70, 70)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def forms(x: Tensor) -> dict[str, Tensor]:
    """Return the same numbers in several orders of memory."""
    wide = torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1, 2)
    return {"plain": x, "last": x.contiguous(memory_format=torch.channels_last), "every other": wide[:, ::2]}


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_float64(shape, axis, both, dtype):
    from leanbayes.runtime import row_kernels

    a, b = torch.randn(2, *shape).to(dtype)
    x, y = by_position(a.double(), axis), by_position(b.double(), axis)
    exact = torch.stack([x * y, x][: 1 + both])
    bound = 1e-6 * exact.abs().sum(2)
    for one in forms(a).values():
        for other in forms(b).values():
            found = row_kernels.launch(by_position(one, axis), by_position(other, axis), both=both)
            assert found.dtype == torch.float32
            assert found.is_contiguous()
            assert ((found - exact.sum(2)).abs() <= bound).all()


@interpreted
def test_many_positions_are_summed_in_parts():
    from leanbayes.runtime import row_kernels

    a, b = torch.randn(2, 1, 70_000, 3)
    found = row_kernels.launch(a, b, both=True)
    torch.testing.assert_close(
        found.double(), torch.stack([(a.double() * b).sum(1), a.double().sum(1)]), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("shape", [(70_000, 8, 3), (1, 8, 70_000), (70_000, 64, 512), (2, 10**6, 3)], ids=str)
def test_a_launch_fits_the_limits_of_a_grid(shape, monkeypatch):
    from leanbayes.runtime import row_kernels

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args: None

    monkeypatch.setattr(row_kernels, "_row_sums", Kernel())
    a = torch.empty(1).expand(shape)
    row_kernels.launch(a, a, both=True)
    ((first, *others),) = grids
    assert 1 <= first < 2**31
    assert all(1 <= count <= 65_535 for count in others)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is not compiled")
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(128, 3136, 64), (4, 49, 2048), (3, 63, 5)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_the_kernel_compiles_for_an_h200(shape, last, dtype, both):
    import triton
    from triton.backends.compiler import GPUTarget

    from leanbayes.runtime import row_kernels

    a = torch.empty(shape, device="meta", dtype=dtype)
    a = a if last else a.mT.contiguous().mT
    block_c, block_p = row_kernels.blocks(a)
    kernel = row_kernels._row_sums
    kind = "*" + {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    types = dict.fromkeys(kernel.arg_names, "i32") | {"a": kind, "b": kind, "out": "*fp32"}
    constants = {"BOTH": both, "BLOCK_P": block_p, "BLOCK_C": block_c}
    constants |= dict.fromkeys(("a_channel", "b_channel") if last else ("a_position", "b_position"), 1)
    types |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
