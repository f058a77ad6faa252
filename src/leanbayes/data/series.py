"""Series of numbers with gaps as series of tokens: quantile bins that the training rows define."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leanbayes.data.checks import Array

# N rows, T steps, V variables

BINS = 10
"""Most bins of a variable."""

NOT_MEASURED = 0


def quantile_edges(x: Array, bins: int = BINS) -> list[Array]:
    """Return what separates the bins of every variable: its quantiles at 1/bins, ..., (bins - 1)/bins, each once.

    Every edge is a value that was measured. A variable of few values (a yes or no, a score) has fewer bins.

    Args:
        x: Training values (N, ..., V); NaN is not measured.
        bins: Most bins of a variable.
    """
    shares = np.arange(1, bins) / bins
    columns = x.reshape(-1, x.shape[-1]).T
    measured = [column[~np.isnan(column)] for column in columns]
    none = np.empty(0, x.dtype)
    return [np.unique(np.quantile(v, shares, method="inverted_cdf")) if len(v) else none for v in measured]


def binned(x: Array, edges: Sequence[Array]) -> Array:
    """Return the bin of every value, uint8 of the shape of `x`: 0 where it is NaN, else 1 + (number of edges below it).

    The first and the last bin are open, so that outliers vanish in them.

    Args:
        x: Values (N, ..., V); NaN is not measured.
        edges: Of every variable, rising, as `quantile_edges` returns them.
    """
    found = np.empty(x.shape, np.uint8)
    for variable, between in enumerate(edges):
        values = x[..., variable]
        # An edge itself belongs to the bin below: a value that is one edge for many quantiles has a bin of its own.
        place = 1 + np.searchsorted(between, values, side="left")
        found[..., variable] = np.where(np.isnan(values), NOT_MEASURED, place)
    return found
