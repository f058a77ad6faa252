"""Cost of a method: time of a training step and of a prediction, relative to the plain network.

Both networks take turns. The ratio is the median over turns, so a machine that slows down affects both networks alike.
On a CPU, process time is measured; on a GPU, wall time between synchronisations.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import elbo, ElboTerms, parameter_groups
from leanbayes.core.predictor import distinct_draws, Predictor
from leanbayes.core.step_graph import CapturedStep
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
        answer_ms: time of a prediction in milliseconds, per row of a large batch.
        answer_ms_one: the same for a single row.
        train_quartiles: quartiles of the turns of `train_step_ratio`.
        predict_quartiles: quartiles of the turns of `predict_ratio`.
        answer_quartiles: quartiles of the turns of `answer_ms`.
        answer_one_quartiles: quartiles of the turns of `answer_ms_one`.
        answer_madds: multiply-adds of a prediction for one row; None if they cannot be counted.
        answer_madds_ratio: the same in passes of the plain network.
    """

    parameters: int
    extra_parameters: int
    extra_percent: float
    train_step_ratio: float
    predict_ratio: float
    passes: int
    answer_ms: float
    answer_ms_one: float
    train_quartiles: tuple[float, float]
    predict_quartiles: tuple[float, float]
    answer_quartiles: tuple[float, float]
    answer_one_quartiles: tuple[float, float]
    answer_madds: int | None = None
    answer_madds_ratio: float | None = None


COUNTED = ("parameters", "extra_parameters", "extra_percent", "passes")
PRICES = tuple(field.name for field in fields(Cost) if field.name not in COUNTED)
"""Names of the measured costs; the others are counted."""


def count(model: nn.Module, samples: int = 16) -> dict[str, Any]:
    """Return the costs of a model that are counted: parameters, and passes of a prediction with `samples` draws."""
    found = summary(model)
    counts = {name: getattr(found, name) for name in COUNTED[:-1]}
    return counts | {"passes": min(samples, distinct_draws(model) or samples)}


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
    """Measure a model against its plain network, before conversion; neither is changed.

    A prediction covers all inputs with `samples` draws, a training step `batch_size` rows, default all. Both are
    measured `turns` times, and medians returned; `compile` measures compiled training steps.
    """
    counts = count(model, samples)
    device = device_of(plain)
    x, y = to_device(x, device), y.to(device)
    batch, classes = slice_rows(x, len(y), 0, batch_size or len(y)), y[: batch_size or len(y)]
    steps = [_training_step(network, batch, classes, likelihood, output, compile) for network in (model, plain)]
    twin = copy.deepcopy(plain).eval()

    predictor = Predictor(model, likelihood, samples=samples, keep_samples=False, output=output)
    one_row = slice_rows(x, len(y), 0, 1)

    @torch.no_grad()
    def plain_passes() -> None:
        for _ in range(counts["passes"]):
            call(twin, x, output).float().softmax(1)

    is_plain = counts["extra_parameters"] == 0 and distinct_draws(model) == 1
    known = _known_ratio(model) or (1.0 if is_plain else None)
    steps_taken = times(steps[0], steps[1], turns, device) if known is None else [(known, 1.0)]
    answers = times(lambda: predictor(x), plain_passes, turns, device)
    alone = times(lambda: predictor(one_row), lambda: None, turns, device)
    predicted = [(1.0, 1.0)] if is_plain else answers
    each, one = ([1e3 * mine / rows for mine, _ in found] for found, rows in ((answers, len(y)), (alone, 1)))
    price = predictor.price(one_row)
    return Cost(
        **counts,
        train_step_ratio=statistics.median(_ratios(steps_taken)),
        predict_ratio=statistics.median(_ratios(predicted)),
        answer_ms=statistics.median(each),
        answer_ms_one=statistics.median(one),
        train_quartiles=_quartiles(_ratios(steps_taken)),
        predict_quartiles=_quartiles(_ratios(predicted)),
        answer_quartiles=_quartiles(each),
        answer_one_quartiles=_quartiles(one),
        answer_madds=price.answer or None,
        answer_madds_ratio=price.passes or None,
    )


def measure_answers(answer: Work, rows: int, *, turns: int = 7) -> dict[str, Any]:
    """Return `answer_ms` and its quartiles of a predictor without a network, which answers `rows` rows on the CPU."""
    each = [1e3 * mine / rows for mine, _ in times(answer, lambda: None, turns, torch.device("cpu"))]
    return {"answer_ms": statistics.median(each), "answer_quartiles": _quartiles(each)}


def _known_ratio(model: nn.Module) -> float | None:
    """Return the cost of a training in plain ones, if all methods of a model train the plain network."""
    whole: Any = model
    methods = {whole.method} if members_of(model) else {layer.method for _, layer in stochastic_layers(model)}
    ratios = [method.training_ratio for method in methods]
    known = [each for each in ratios if each is not None]
    return max(known) if known and len(known) == len(ratios) else None


def ratio(one: Work, other: Work, turns: int, device: torch.device) -> float:
    """Return the median over turns of time(one) / time(other)."""
    return statistics.median(_ratios(times(one, other, turns, device)))


def times(one: Work, other: Work, turns: int, device: torch.device) -> list[tuple[float, float]]:
    """Return the seconds of both works, in turn, after one call of each."""
    one(), other()
    return [(_seconds(one, device), _seconds(other, device)) for _ in range(turns)]


def _ratios(pairs: list[tuple[float, float]]) -> list[float]:
    return [mine / theirs for mine, theirs in pairs]


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _training_step(
    model: nn.Module, x: Inputs, y: Tensor, likelihood: Likelihood | None, output: Any, compiled: bool
) -> Work:
    """Return a function that makes one SGD step of a copy of the model; every member of an ensemble takes one."""
    twin = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(parameter_groups(twin, lr=1e-4), lr=1e-4, momentum=0.9, nesterov=True)
    rows, tile = leading_rows(x) or 1, bool(members_of(model))

    def loss(x: Inputs, y: Tensor, beta: Any) -> ElboTerms:
        return elbo(twin, x, y, likelihood, num_data=100 * rows, beta=beta, tile=tile, output=output)

    learn_rows_from(twin, x)
    compiled = compiled and not tile
    loss_of = torch.compile(loss) if compiled else loss
    captured = CapturedStep(loss_of, twin) if compiled and y.device.type == "cuda" else None

    def step() -> None:
        optimizer.zero_grad()
        if captured is None or captured(x, y, 1.0) is None:
            torch.autograd.backward(loss_of(x, y, 1.0).loss)
        optimizer.step()

    return step


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
