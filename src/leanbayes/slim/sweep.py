"""Judge a network at every width: accuracy and calibration against cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from leanbayes.convert import mean
from leanbayes.evaluation import Data, evaluate, Result
from leanbayes.slim.narrow import narrow, NormData


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
