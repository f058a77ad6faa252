"""Cost of a method: time of a training step and of a prediction, relative to the plain network.

Both networks take turns. The ratio is the median over turns, so a machine that slows down affects both networks alike.
On a CPU, process time is measured; on a GPU, wall time between synchronisations.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import elbo, parameter_groups
from leanbayes.core.predictor import distinct_draws, predict
from leanbayes.core.summary import summary
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime.batches import call, device_of, Inputs, leading_rows, Output, slice_rows, to_device
from leanbayes.runtime.probe import learn_rows_from

Work = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """Parameters, and time relative to the plain network.

    Attributes:
        parameters: of the plain network.
        extra_parameters: parameters that the method adds.
        extra_percent: the same in percent.
        train_step_ratio: time of a training step / time of a plain step on the same batch. For methods that train the
            plain network, it is the number of their epochs / that of a plain training.
        predict_ratio: time of a prediction / time of the same number of plain passes.
        passes: forward passes per prediction.
    """

    parameters: int
    extra_parameters: int
    extra_percent: float
    train_step_ratio: float
    predict_ratio: float
    passes: int


def measure_cost(
    model: nn.Module,
    plain: nn.Module,
    x: Inputs,
    y: Tensor,
    likelihood: Likelihood | None = None,
    *,
    samples: int = 16,
    batch_size: int | None = None,
    turns: int = 7,
    output: Output | None = None,
    compile: bool = False,
) -> Cost:
    """Measure a model against its plain network; neither is changed.

    Args:
        model: a converted model, or the plain one itself.
        plain: the network before conversion.
        x: inputs; a prediction covers all of them.
        y: their targets.
        likelihood: how to read outputs.
        samples: draws per prediction.
        batch_size: rows per training step; default all.
        turns: number of measurements; the median is returned.
        output: picks the tensor from the model's return value.
        compile: measure compiled training steps.
    """
    counts = summary(model)
    passes = min(samples, distinct_draws(model) or samples)
    device = device_of(plain)
    x, y = to_device(x, device), y.to(device)
    batch, classes = slice_rows(x, len(y), 0, batch_size or len(y)), y[: batch_size or len(y)]
    steps = [_training_step(network, batch, classes, likelihood, output, compile) for network in (model, plain)]
    predictions: list[Work] = [
        lambda: predict(model, x, likelihood, samples=samples, keep_samples=False, output=output),
        _passes(plain, x, passes, output),
    ]
    is_plain = counts.extra_parameters == 0 and distinct_draws(model) == 1
    return Cost(
        parameters=counts.parameters,
        extra_parameters=counts.extra_parameters,
        extra_percent=counts.extra_percent,
        train_step_ratio=1.0 if is_plain else _known_ratio(model) or ratio(steps[0], steps[1], turns, device),
        predict_ratio=1.0 if is_plain else ratio(predictions[0], predictions[1], turns, device),
        passes=passes,
    )


def _known_ratio(model: nn.Module) -> float | None:
    """Return the cost of a training in plain ones, if all methods of a model train the plain network."""
    whole: Any = model
    methods = {whole.method} if members_of(model) else {layer.method for _, layer in stochastic_layers(model)}
    ratios = [method.training_ratio for method in methods]
    known = [each for each in ratios if each is not None]
    return max(known) if known and len(known) == len(ratios) else None


def ratio(one: Work, other: Work, turns: int, device: torch.device) -> float:
    """Return the median over turns of time(one) / time(other)."""
    one(), other()
    return statistics.median(_seconds(one, device) / _seconds(other, device) for _ in range(turns))


def _training_step(
    model: nn.Module, x: Inputs, y: Tensor, likelihood: Likelihood | None, output: Any, compiled: bool
) -> Work:
    """Return a function that makes one SGD step of a copy of the model; every member of an ensemble takes one."""
    twin = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(parameter_groups(twin, lr=1e-4), lr=1e-4, momentum=0.9, nesterov=True)
    rows, tile = leading_rows(x) or 1, bool(members_of(model))

    def loss(x: Inputs, y: Tensor) -> Tensor:
        return elbo(twin, x, y, likelihood, num_data=100 * rows, tile=tile, output=output).loss

    learn_rows_from(twin, x)
    loss_of = torch.compile(loss) if compiled and not tile else loss

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(x, y))
        optimizer.step()

    return step


def _passes(plain: nn.Module, x: Inputs, count: int, output: Output | None) -> Work:
    twin = copy.deepcopy(plain).eval()

    @torch.no_grad()
    def run() -> None:
        for _ in range(count):
            call(twin, x, output).float().softmax(1)

    return run


def _seconds(work: Work, device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start
