"""Run draws over the rows of a batch: in chunks whose activations stay small, or all draws of a small batch at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import cat, nn, Tensor

from leanbayes.core.batched import BatchedDraws, Way
from leanbayes.core.frozen import FrozenDraws, RowDraws
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.layers.hooks import every_module
from leanbayes.runtime.batches import cloned, device_of, divisible, Inputs, Output, slice_rows, versions
from leanbayes.runtime.twins import tensors_of

LARGEST_ACTIVATION = {"cpu": 16 * 2**20, "cuda": 2**30}
"""Bytes of the largest activation of an automatic chunk; on a CPU, larger ones cause page faults at every call."""

FIRST_CHUNK = {"cpu": 64, "cuda": 256}
"""Rows of the first automatic chunk, which measures the size of activations."""


class Chunks:
    """Runs the selected draw over rows in chunks; the first chunk sets the size of the others."""

    def __init__(
        self, draws: FrozenDraws | RowDraws, likelihood: Likelihood, chunk_size: int | None, output: Output | None
    ) -> None:
        self.draws, self.likelihood, self.chunk_size, self.output = draws, likelihood, chunk_size, output
        self.asked = chunk_size
        self.largest = 0.0
        self.keeps_inputs = False  # whether a pass left its inputs unchanged
        self.averages = any(_averages_rows(module) for module in every_module(draws.network))
        self.batched = BatchedDraws(draws) if isinstance(draws, FrozenDraws) and not self.averages else None

    def run(self, x: Inputs, rows: int, done: int = 0) -> Tensor:
        """Return the outputs for all rows of x, `done` rows after the first."""
        outputs: list[Tensor] = []
        sizes: list[int] = []
        start = 0
        whole = self.averages or not divisible(self.draws.network, x)
        while start < rows:
            stop = rows if whole else min(rows, start + self._next_size(outputs, sizes))
            outputs.append(self._run_chunk(slice_rows(x, rows, start, stop), (done + start, done + stop)))
            sizes.append(stop - start)
            start = stop
        check_alike(outputs, sizes)
        return cat(outputs) if len(outputs) > 1 else outputs[0]

    def divisible(self, x: Inputs) -> bool:
        """Return whether rows can be taken out of a batch without changing the others."""
        return not self.averages and divisible(self.draws.network, x)

    def way(self, x: Inputs, rows: int) -> Way:
        """Return how to run the draws on a batch: together only if one chunk holds it."""
        whole = self.asked is None or self.asked >= rows
        if self.batched is None or not whole or not divisible(self.draws.network, x):
            return "folded"
        return self.batched.way(x)

    def run_together(self, way: Way, group: range, x: Inputs) -> Tensor | None:
        """Return the outputs of several draws (G, B, ...); None if the network cannot be run in this way."""
        assert self.batched is not None
        chunk = x if self.keeps_inputs else cloned(x)
        before = versions(chunk)
        try:
            outputs = self.batched.run(way, group, chunk, self.output)
        except Exception:  # of any kind: the same inputs go through draw by draw, and raise there if they are wrong
            return None
        self.keeps_inputs = self.keeps_inputs or versions(chunk) == before
        return outputs if outputs.dim() > 1 else None

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept for the next call."""
        yield from self.caches()
        yield from tensors_of(self.draws.network)

    def caches(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept for the next call, without those of the twin."""
        yield from self.draws.caches()
        if self.batched is not None:
            yield from self.batched.kept()

    def _next_size(self, outputs: list[Tensor], sizes: list[int]) -> int:
        if self.chunk_size is None:
            return FIRST_CHUNK.get(device_of(self.draws.network).type, FIRST_CHUNK["cpu"])
        if sizes == [self.chunk_size] and self.chunk_size in outputs[0].shape[1:]:
            # This axis may count examples (similarities of all pairs); a chunk of another size shows that.
            return self.chunk_size - 1 or 2
        return self.chunk_size

    def _run_chunk(self, chunk: Inputs, rows: tuple[int, int]) -> Tensor:
        """Run one chunk; the largest activation of the first one sets the size of the others."""
        if self.chunk_size is not None:
            return self._run_copy(chunk, rows)
        watched = [m for m in self.draws.network.modules() if not any(True for _ in m.children())]
        handles = [module.register_forward_hook(self._measure) for module in watched]
        outputs = self._run_copy(chunk, rows)
        for handle in handles:
            handle.remove()
        limit = LARGEST_ACTIVATION.get(outputs.device.type, LARGEST_ACTIVATION["cuda"])
        self.chunk_size = max(1, int(limit * (rows[1] - rows[0]) / max(self.largest, 1)))
        return outputs

    def _run_copy(self, chunk: Inputs, rows: tuple[int, int]) -> Tensor:
        """Run a copy of one chunk, unless an earlier pass left its inputs unchanged."""
        if self.keeps_inputs:
            return self.draws.run(chunk, rows, self.output)
        chunk = cloned(chunk)
        before = versions(chunk)
        outputs = self.draws.run(chunk, rows, self.output)
        self.keeps_inputs = versions(chunk) == before
        return outputs

    def _measure(self, module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.nbytes)


def _averages_rows(module: nn.Module) -> bool:
    """Return whether a module is a batch norm without running statistics, which averages over rows in eval mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def check_alike(outputs: list[Tensor], sizes: list[int], remedy: str = "") -> None:
    """Raise if the outputs of chunks cannot be joined: an output then depends on other examples."""
    first = outputs[0]
    for output, size in zip(outputs[1:], sizes[1:], strict=True):
        if not output.dim() or output.shape[1:] != first.shape[1:]:
            remedy = remedy or f"pass chunk_size={sum(sizes)}"
            raise ValueError(
                f"the outputs of {sizes[0]} and of {size} examples have shapes {tuple(first.shape)} and "
                f"{tuple(output.shape)}, which cannot be joined: they depend on the other examples; {remedy}, or "
                "output= for features of one example each"
            )
