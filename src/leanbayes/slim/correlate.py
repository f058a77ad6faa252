"""Which width still knows what the whole network does not know (Cui et al., section 3.5, Figure 5).

For every width w and every input x_i the uncertainty is the entropy of the mean prediction,

    U_w,i = H(E_q(theta | w)[p(y | x_i, theta)]),

and widths are compared by the Pearson correlation of U_w over the inputs. Where it stays high, a narrower network ranks
inputs by uncertainty as the whole one does, and is wide enough to be its student (`lb.slim.distill`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.predictor import predict
from leanbayes.runtime._files import local, write_whole
from leanbayes.runtime.batches import Inputs
from leanbayes.slim.narrow import narrow, NormData

TENTHS = tuple(tenth / 10 for tenth in range(1, 11))


@dataclass(frozen=True)
class Correlation:
    """How alike the uncertainties of a network are at different widths.

    Attributes:
        widths: W widths, rising.
        uncertainty: of each of N inputs at each width (W, N).
        matrix: Pearson correlations between widths (W, W). An uncertainty that is the same for all inputs ranks none:
            its correlation is zero with every other width, where the formula says 0 / 0.
    """

    widths: tuple[float | int, ...]
    uncertainty: Tensor = field(repr=False)
    matrix: Tensor

    def smallest(self, threshold: float = 0.9) -> float | int:
        """Return the smallest width from which on all are correlated with the largest, at or above a threshold.

        Raises:
            ValueError: if the threshold is not above 0 and at most 1.
        """
        if not 0 < threshold <= 1:
            raise ValueError(f"expected a threshold above 0 and at most 1, got {threshold}; 0.9 is usual")
        found = self.widths[-1]
        for width, correlation in zip(reversed(self.widths[:-1]), self.matrix[-1].flip(0)[1:].tolist(), strict=True):
            if correlation < threshold:
                break
            found = width
        return found

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the matrix as Figure 5 does: red where widths are alike.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("figures need matplotlib, which is not here; install leanbayes[examples]") from error
        figure = Figure(figsize=(5, 4.2), layout="constrained")
        axis: Any = figure.subplots()
        image = axis.imshow(self.matrix.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, origin="lower")
        figure.colorbar(image, ax=axis, label="correlation")
        places, names = range(len(self.widths)), [f"{width:g}" for width in self.widths]
        axis.set(xlabel="width", ylabel="width", xticks=places, yticks=places, xticklabels=names, yticklabels=names)
        for row, values in enumerate(self.matrix.tolist()):
            for column, value in enumerate(values):
                color = "white" if abs(value) > 0.7 else "black"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color)
        kind = local(path).suffix.removeprefix(".") or "svg"
        write_whole(local(path), lambda temporary: figure.savefig(temporary, format=kind))


def correlate(
    model: nn.Module,
    x: Inputs | DataLoader[Any],
    widths: Sequence[float | int] = TENTHS,
    *,
    data: NormData | None = None,
    batches: int | None = None,
    samples: int = 6,
    seed: int = 0,
) -> Correlation:
    """Compare the uncertainties of a network at different widths, each cut out physically.

    Args:
        model: converted with `lb.NestedDropout` and trained.
        x: inputs, or a DataLoader that yields `(inputs, target)` in a fixed order: from the training domain, or from
            another. The paper looks at both.
        widths: shares of the channel groups (floats) or numbers of them (ints), rising.
        data: training inputs over which the statistics of norms are collected anew at every width.
        batches: use only so many batches of `data`.
        samples: draws of each prediction.
        seed: of the draws.

    Raises:
        ValueError: if the widths do not rise, or there are fewer than two inputs.

    Example:
        >>> found = lb.slim.correlate(bnn, x_test, data=x_train[:1024])
        >>> student = lb.slim.distill(bnn, (x_train, y_train), width=found.smallest())
    """
    _check(x, data, widths)
    rows = []
    for width in widths:
        small = narrow(model, width, data=data, batches=batches)
        total = predict(small, x, samples=samples, seed=seed, keep_samples=False).total
        rows.append(total.double().cpu().flatten(1).mean(1) if total.dim() > 1 else total.double().cpu())
    uncertainty = torch.stack(rows)
    return Correlation(tuple(widths), uncertainty, pearson(uncertainty))


def pearson(rows: Tensor) -> Tensor:
    """Return the correlations between rows (W, N) as a matrix (W, W); a constant row has none with any other.

    Raises:
        ValueError: if there are fewer than two columns.
    """
    if rows.shape[1] < 2:
        raise ValueError(f"expected at least two inputs to correlate uncertainties over, got {rows.shape[1]}")
    constant = rows.amax(1) == rows.amin(1)
    matrix = torch.corrcoef(rows).view(len(rows), len(rows))  # of one row it is a number
    matrix = matrix.masked_fill(constant[:, None] | constant[None, :], 0.0)
    matrix.fill_diagonal_(1.0)
    return matrix


def _check(x: object, data: object, widths: Sequence[float | int]) -> None:
    if isinstance(x, Iterator) or isinstance(data, Iterator):
        raise TypeError("expected inputs that can be read again for every width, got an iterator; pass a DataLoader")
    if not widths or any(b <= a for a, b in pairwise(widths)) or len(set(map(type, widths))) > 1:
        raise ValueError(
            f"expected rising widths, all shares such as 0.25 or all whole numbers of groups, got {tuple(widths)}"
        )
