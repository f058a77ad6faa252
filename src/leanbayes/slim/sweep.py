"""Judge a network at every width, accuracy and calibration against cost; tell how much of it a draw uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from leanbayes.core.plain import mean
from leanbayes.evaluation.evaluate import Data, evaluate, Result
from leanbayes.layers.channels import Layout
from leanbayes.layers.family import LINEAR_MAPS
from leanbayes.methods.nested.config import channels_of, plain_layer
from leanbayes.runtime.passes import draws
from leanbayes.slim.narrow import narrow, NormData, units_of


def widths(
    model: nn.Module,
    test: Data,
    widths: Iterable[float | int],
    *,
    data: NormData | None = None,
    batches: int | None = None,
    means: bool = False,
    **options: Any,
) -> list[Result]:
    """Evaluate a model at every width, each cut out physically.

    Args:
        model: converted with `lb.NestedDropout`.
        test: what it is judged on.
        widths: shares or numbers of channel groups to keep.
        data: training inputs over which the statistics of norms are collected anew at every width.
        batches: use only so many batches of `data`.
        means: judge the posterior means (DT-BN3) instead of draws (BN3).
        options: of `lb.evaluate`; the paper takes `samples=6`.

    Example:
        >>> results = lb.slim.widths(bnn, (x_test, y_test), [0.25, 0.5, 1.0], data=x_train[:1024])
    """
    wanted: Sequence[float | int] = list(widths)
    found = []
    for width in wanted:
        small = narrow(model, width, data=data, batches=batches)
        if means:
            small = mean(small)
        found.append(evaluate(small, test, **options))
    return found


def usage(model: nn.Module, *, seed: int = 0, index: int = 0) -> float:
    """Return the share of the weights of linear maps that one draw of a nested network uses.

    A draw has a width of its own in every ordered stream; what reads or makes a dropped channel is not used.

    Example:
        >>> lb.slim.usage(bnn, seed=0, index=3)
    """
    channels = channels_of(model)
    with torch.no_grad(), draws(model, seed=seed, index=index):
        kept = {root: float((unit.factors()[0] > 0).float().mean()) for root, unit in units_of(model, channels).items()}

    def share(layout: Layout | None) -> float:
        if not layout:
            return 1.0
        sizes = [channels.stream(part.stream).size * part.repeat for part in layout]
        parts = [kept.get(channels.root(part.stream), 1.0) for part in layout]
        return sum(size * part for size, part in zip(sizes, parts, strict=True)) / sum(sizes)

    used = total = 0.0
    for path, module in model.named_modules():
        layer = plain_layer(module)
        if path in channels.outputs and isinstance(layer, LINEAR_MAPS):
            weight: Any = layer.weight
            count, is_depthwise = weight.numel(), channels.inputs[path] == channels.outputs[path]
            of_inputs = 1.0 if is_depthwise else share(channels.inputs[path])
            used, total = used + count * of_inputs * share(channels.outputs[path]), total + count
    return used / total
