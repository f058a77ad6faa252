"""A nested network at every width: metrics, share of weights in use, and correlation of uncertainties.

The uncertainty of width w at input x_i is the entropy of the mean prediction (Cui et al., section 3.5, Figure 5),

    U_w,i = H(E_q(theta | w)[p(y | x_i, theta)]),

and widths are compared by the Pearson correlation of U_w over the inputs. While it stays high, a narrower network ranks
inputs by uncertainty like the whole one, and is wide enough to be its student (`lb.slim.distill`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.plain import mean
from leanbayes.core.predictor import predict
from leanbayes.evaluation.evaluate import Data, evaluate, Result
from leanbayes.layers.family import LINEAR_MAPS
from leanbayes.methods.nested.config import channels_of, plain_layer
from leanbayes.methods.nested.eligibility import kept_share
from leanbayes.runtime._files import local, write_whole
from leanbayes.runtime.batches import Inputs
from leanbayes.runtime.passes import draws
from leanbayes.slim.narrowing import narrow, NormData, units_of

TENTHS = tuple(tenth / 10 for tenth in range(1, 11))


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
        test: test data.
        widths: shares or numbers of channel groups to keep.
        data: training inputs over which norm statistics are collected again at every width.
        batches: number of batches of `data` to use; None uses all.
        means: evaluate the posterior means (DT-BN3) instead of draws (BN3).
        options: of `lb.evaluate`; the paper has `samples=6`.

    Example:
        >>> results = lb.slim.widths(bnn, (x_test, y_test), [0.25, 0.5, 1.0], data=x_train[:1024])
    """
    narrowed = (narrow(model, width, data=data, batches=batches) for width in widths)
    return [evaluate(mean(small) if means else small, test, **options) for small in narrowed]


def usage(model: nn.Module, *, seed: int = 0, index: int = 0) -> float:
    """Return the share of the weights of linear maps that one draw of a nested network uses.

    A draw has its own width in every ordered stream. Weights that read or make a dropped channel are not used.

    Example:
        >>> lb.slim.usage(bnn, seed=0, index=3)
    """
    channels = channels_of(model)
    with torch.no_grad(), draws(model, seed=seed, index=index):
        kept = {root: float((unit.factors()[0] > 0).float().mean()) for root, unit in units_of(model, channels).items()}

    used = total = 0.0
    for path, module in model.named_modules():
        layer = plain_layer(module)
        if path in channels.outputs and isinstance(layer, LINEAR_MAPS):
            weight: Any = layer.weight
            inputs, outputs = channels.inputs[path], channels.outputs[path]
            of_inputs = 1.0 if inputs == outputs else kept_share(channels, inputs, kept)  # depthwise
            used += weight.numel() * of_inputs * kept_share(channels, outputs, kept)
            total += weight.numel()
    return used / total


@dataclass(frozen=True)
class Correlation:
    """Correlations between the uncertainties of a network at different widths.

    Attributes:
        widths: W widths, rising.
        uncertainty: of each of N inputs at each width (W, N).
        matrix: Pearson correlations between widths (W, W). The correlation of a constant uncertainty is zero.
    """

    widths: tuple[float | int, ...]
    uncertainty: Tensor = field(repr=False)
    matrix: Tensor

    def smallest(self, threshold: float = 0.9) -> float | int:
        """Return the smallest width such that it and all larger ones correlate with the largest by the threshold."""
        if not 0 < threshold <= 1:
            raise ValueError(f"expected a threshold above 0 and at most 1, got {threshold}; 0.9 is usual")
        found = self.widths[-1]
        for width, correlation in zip(reversed(self.widths[:-1]), self.matrix[-1].flip(0)[1:].tolist(), strict=True):
            if correlation < threshold:
                break
            found = width
        return found

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the matrix as in Figure 5, red for high correlations. Needs matplotlib."""
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
    """Correlate the uncertainties of a network at different widths, each cut out physically.

    Args:
        model: converted with `lb.NestedDropout` and trained.
        x: at least two inputs, or a DataLoader that yields `(inputs, target)` in a fixed order. The paper has inputs
            of the training domain and of another.
        widths: shares of the channel groups (floats) or numbers of them (ints), rising.
        data: as for `widths`.
        batches: as for `widths`.
        samples: draws of each prediction.
        seed: of the draws.

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
    """Return the correlations between rows (W, N) as a matrix (W, W); that of a constant row with another is zero."""
    if rows.shape[1] < 2:
        raise ValueError(f"expected at least two inputs to correlate uncertainties over, got {rows.shape[1]}")
    constant = rows.amax(1) == rows.amin(1)
    matrix = torch.corrcoef(rows).view(len(rows), len(rows))  # of one row, corrcoef returns a number
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
