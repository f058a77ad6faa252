"""Training many small networks at once, without waiting for a processor that launches one tiny operation at a time.

Steps are made in chunks. What a chunk needs (rows, noise) is drawn and gathered for all of its steps together and put
into buffers; the steps themselves only read them. On a GPU the steps of a chunk are captured once as a CUDA graph and
replayed from then on. As nothing in the graph draws random numbers, no generator has to be known to it, and trainings
on streams of their own do not disturb each other.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes_papers.batched_regression import BatchedRegression

CHUNK = 50
"""Steps of a chunk."""

WARM_UP = 3
"""Steps that are made before any are captured, so that libraries and the optimiser have set themselves up."""

IN_FLIGHT = 2
"""Chunks that may wait on a GPU; more would only make the progress shown untrue."""


class Shuffles:
    """Row numbers of batches: for every network an endless row of shuffled epochs, cut into batches of equal size.

    A batch may end one epoch and begin the next; that is what keeps all of them equally large.
    """

    def __init__(self, nets: int, rows: int, batch: int, generator: torch.Generator) -> None:
        """Begin with nothing shuffled."""
        self.rows, self.batch, self.generator = rows, batch, generator
        self.left = torch.empty(nets, 0, dtype=torch.int64, device=generator.device)

    def take(self, steps: int) -> Tensor:
        """Return the rows of the next batches (steps, T, batch)."""
        nets, there = self.left.shape
        wanted = steps * self.batch
        if there < wanted:
            epochs = math.ceil((wanted - there) / self.rows)
            chances = torch.rand(nets, epochs, self.rows, generator=self.generator, device=self.left.device)
            self.left = torch.cat([self.left, chances.argsort(-1).flatten(1)], 1)
        taken, self.left = self.left[:, :wanted], self.left[:, wanted:]
        return taken.reshape(nets, steps, self.batch).transpose(0, 1)


class Training:
    """T networks under Adam, each on rows of its own, with one draw a step and the mean squared error as loss.

    The losses of the networks are added up: they share no parameters, so each has the gradient it would have alone.

    Args:
        net: the networks, on the device of the data, in training mode.
        data: inputs (T, N, d) and targets (T, N), standardised.
        optimizer: over the parameters of `net`; on a GPU it must be a fused one.
        generator: decides shuffles and noise; on the device of the data.
        steps: number of steps.
        batch: rows of a step; all rows where there are fewer.
    """

    def __init__(
        self,
        net: BatchedRegression,
        data: tuple[Tensor, Tensor],
        optimizer: torch.optim.Adam,
        generator: torch.Generator,
        *,
        steps: int,
        batch: int,
    ) -> None:
        """Lay out the buffers of a chunk."""
        self.net, self.optimizer, self.generator = net, optimizer, generator
        self.x, self.y = data
        self.steps, self.done = steps, 0
        nets, rows, features = self.x.shape
        self.batch = min(batch, rows)
        self.shuffles = Shuffles(nets, rows, self.batch, generator)
        self.nets = torch.arange(nets, device=self.x.device)[:, None]
        self.inputs = self.x.new_empty(CHUNK, nets, features, self.batch)
        self.targets = self.x.new_empty(CHUNK, nets, 1, self.batch)
        first, second = net.noise(CHUNK, self.batch, generator)
        self.noise = (first.clone(), second.clone())
        self.stream = torch.cuda.Stream() if self.x.is_cuda else None  # type: ignore[no-untyped-call]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self.waiting: deque[torch.cuda.Event] = deque()
        self.graph: torch.cuda.CUDAGraph | None = None

    def advance(self) -> int:
        """Make the next steps, first those that do not fill a chunk, then chunk by chunk; return how many."""
        count = CHUNK if self.done else self.steps % CHUNK or CHUNK
        with self._on_the_stream():
            self._fill(count)
            if self.stream is None or self.done < WARM_UP:
                self._make(count)
            else:
                self.graph = self.graph or self._capture(self.stream)
                self.graph.replay()
            self._wait_a_little()
        self.done += count
        return count

    def finish(self) -> BatchedRegression:
        """Wait for the last step and return the networks, in evaluation mode."""
        if self.stream is not None:
            self.stream.synchronize()
        self.graph = None
        return self.net.eval()

    def loss(self, step: int) -> Tensor:
        """Return the mean squared error of a step of the chunk, added up over networks."""
        at = slice(step, step + 1)
        outputs = self.net(self.inputs[at], (self.noise[0][at], self.noise[1][at]))
        return F.mse_loss(outputs, self.targets[at], reduction="sum") / self.batch

    def _fill(self, count: int) -> None:
        """Gather rows and draw noise for the next steps."""
        rows = self.shuffles.take(count)
        self.inputs[:count] = self.x[self.nets, rows].transpose(-1, -2)
        self.targets[:count, :, 0] = self.y[self.nets, rows]
        for buffer, drawn in zip(self.noise, self.net.noise(count, self.batch, self.generator), strict=True):
            buffer[:count] = drawn

    def _make(self, count: int) -> None:
        """Make the steps whose rows and noise are in the buffers."""
        parameters = list(self.net.parameters())
        for step in range(count):
            gradients = torch.autograd.grad(self.loss(step), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Capture the steps of a chunk; capturing does not make them."""
        for group in self.optimizer.param_groups:
            group["capturable"] = True  # not before: torch warns of it when steps are not captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._make(CHUNK)
        return graph

    def _on_the_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _wait_a_little(self) -> None:
        """Wait until few chunks are in flight."""
        if self.stream is None:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self.waiting.append(event)
        if len(self.waiting) > IN_FLIGHT:
            self.waiting.popleft().synchronize()
