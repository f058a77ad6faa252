"""Many small regression networks as one: the twin of ensemble model patching, for all splits of a data set.

Networks that share nothing are stacked on an axis of their own: one batched product does for all of them what
`leanbayes.models.RegressionNet` does for one. A test takes the same steps with `lb.ModelPatch`. Shapes: S draws, T
networks, F features, B rows, K copies; activations are (S, T, F, B). Features come before rows, so that all features
of all networks are the channels of a single batch norm.

Steps are made in chunks. Rows and noise of a chunk are drawn together and put into buffers, and the steps only read
them. On a GPU the steps of a chunk are captured once as a CUDA graph and replayed from then on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from typing_extensions import override

MOMENTUM, EPS = 0.1, 1e-5  # those of `nn.BatchNorm1d`
CHUNK = 50  # steps of a chunk
WARM_UP = 3  # steps before any are captured: libraries and the optimiser set themselves up
IN_FLIGHT = 2  # chunks that may wait on a GPU; more would make the progress shown untrue
Noise = tuple[Tensor, Tensor]  # of the two places of a network; the first axis counts draws, or steps of a training


class Place(nn.Module, ABC):
    """The module before a linear layer: a norm with copies, a mask, or nothing. Maps (S, T, F, B) to the same shape."""

    @abstractmethod
    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        """Draw noise for `count` draws or steps, and for `rows` rows if rows have noise of their own."""


class Nothing(Place):
    """The place of the networks of an explicit ensemble."""

    @override
    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        return torch.empty(count, 0, device=generator.device)

    @override
    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return x


class Mask(Place):
    """Dropout: every feature is kept with probability 1 - rate, and is then divided by it."""

    def __init__(self, nets: int, features: int, *, rate: float) -> None:
        """Set the sizes."""
        super().__init__()
        self.nets, self.features, self.rate = nets, features, rate

    @override
    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        chances = torch.rand(count, self.nets, self.features, rows, generator=generator, device=generator.device)
        return (chances >= self.rate).to(chances.dtype).div_(1 - self.rate)

    @override
    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return x * noise


class PatchedNorm(Place):
    """A batch norm with K copies of its scale and shift, and one pair of running statistics for all of them.

    The noise holds the chosen copies (S, 2, T, F): one for a whole norm (EMP), or one for every element (ECMP,
    `crossed`). Copies start at scale (1 + spread n) and scale spread n, n standard normal.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, shape: tuple[int, int, int], *, crossed: bool, scale: float, spread: float) -> None:
        """Make the copies (K, 2, T, F), scales before shifts, from torch's global generator; `shape` is (K, T, F)."""
        super().__init__()
        copies, nets, features = shape
        start = scale * spread * torch.randn(copies, 2, nets, features)
        start[:, 0] += scale
        self.copies = nn.Parameter(start)
        self.crossed = crossed
        self.register_buffer("running_mean", torch.zeros(nets, features))
        self.register_buffer("running_var", torch.ones(nets, features))

    @override
    def noise(self, count: int, rows: int, generator: torch.Generator) -> Tensor:
        copies, _, nets, features = self.copies.shape
        size = (count, 2, nets, features) if self.crossed else (count, 1, nets, 1)
        choice = torch.randint(copies, size, generator=generator, device=generator.device)
        return choice.expand(count, 2, nets, features)

    @override
    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        scale, shift = self.copies.gather(0, noise).unbind(1)
        if not self.training:
            mean, std = self.running_mean.unsqueeze(-1), (self.running_var + EPS).sqrt().unsqueeze(-1)
            return (x - mean) / std * scale.unsqueeze(-1) + shift.unsqueeze(-1)
        channels = x.view(1, -1, x.shape[-1])  # one draw
        mean, var = self.running_mean.view(-1), self.running_var.view(-1)
        return F.batch_norm(channels, mean, var, scale.view(-1), shift.view(-1), True, MOMENTUM, EPS).view_as(x)


class BatchedRegression(nn.Module):
    """T = `nets` networks place, linear, ReLU, place, linear; weights start as torch's linear layers do."""

    def __init__(self, first: Place, second: Place, *, nets: int, inputs: int, hidden: int) -> None:
        """Build the layers from torch's global generator."""
        super().__init__()
        self.first, self.second = first, second
        self.hidden_weight, self.hidden_bias = _linear(nets, inputs, hidden)
        self.output_weight, self.output_bias = _linear(nets, hidden, 1)

    def noise(self, count: int, rows: int, generator: torch.Generator) -> Noise:
        """Draw the noise of `count` draws or steps."""
        return self.first.noise(count, rows, generator), self.second.noise(count, rows, generator)

    def forward(self, x: Tensor, noise: Noise) -> Tensor:
        """Map inputs (1, T, d, B) to outputs (S, T, 1, B)."""
        x = self.first(x, noise[0])
        x = torch.relu(self.hidden_weight @ x + self.hidden_bias)
        x = self.second(x, noise[1])
        return self.output_weight @ x + self.output_bias


def _linear(nets: int, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return weights (1, T, out, in) and biases (1, T, out, 1), both uniform within 1 / sqrt(in) of zero."""
    edge = inputs**-0.5
    weight = torch.empty(1, nets, outputs, inputs).uniform_(-edge, edge)
    bias = torch.empty(1, nets, outputs, 1).uniform_(-edge, edge)
    return nn.Parameter(weight), nn.Parameter(bias)


# ------------------------------------------------------------------------------------ training


class Shuffles:
    """Row numbers of batches: for every network shuffled epochs in a row, cut into batches of equal size."""

    def __init__(self, nets: int, rows: int, batch: int, generator: torch.Generator) -> None:
        """Begin with no rows left."""
        self.rows, self.batch, self.generator = rows, batch, generator
        self.left = torch.empty(nets, 0, dtype=torch.int64, device=generator.device)

    def take(self, steps: int) -> Tensor:
        """Return the rows of the next batches (steps, T, batch); a batch may end one epoch and begin the next."""
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
    Data are standardised inputs (T, N, d) and targets (T, N); all is on their device; a GPU needs a fused optimiser.
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
        """Allocate the buffers of a chunk."""
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
        """Make the next steps, first those that do not fill a chunk, then chunk by chunk; return their number."""
        count = CHUNK if self.done else self.steps % CHUNK or CHUNK
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
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
        for buffer, noise in zip(self.noise, self.net.noise(count, self.batch, self.generator), strict=True):
            buffer[:count] = noise

    def _make(self, count: int) -> None:
        """Make the steps of the buffers."""
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

    def _wait_a_little(self) -> None:
        """Wait until few chunks are in flight."""
        if self.stream is None:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self.waiting.append(event)
        if len(self.waiting) > IN_FLIGHT:
            self.waiting.popleft().synchronize()
