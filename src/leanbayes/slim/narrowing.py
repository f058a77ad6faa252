"""Cut a network whose channels are ordered down to a width, and compare its widths.

A narrower network has fewer parameters, less work and the same function. Channels are dropped in the layers that make,
normalise and read them, through sums, concatenations, flattening, grouped and depthwise convolutions
(`leanbayes.layers.channels`). torch-pruning does this for plain networks, but needs example inputs, has no stochastic
layers, and would choose other channels.

The uncertainty of width w at input x_i is the entropy of the mean prediction (Cui et al., section 3.5, Figure 5),

    U_w,i = H(E_q(theta | w)[p(y | x_i, theta)]),

and widths are compared by the Pearson correlation of U_w over the inputs. While it stays high, a narrower network ranks
inputs by uncertainty like the whole one, and is wide enough to be its student (`lb.slim.distill`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import attach_likelihood, own_likelihood, unwrap
from leanbayes.core.plain import mean
from leanbayes.core.predictor import predict
from leanbayes.evaluation.evaluate import Data, evaluate, Result
from leanbayes.layers.family import CHANNEL_NORMS, Conv1D, LINEAR_MAPS, LinearLike, TRANSPOSED
from leanbayes.layers.streams import Channels, Layout
from leanbayes.methods._base import plain_copy, StochasticLayer
from leanbayes.methods.nested.eligibility import kept_share, unordered
from leanbayes.methods.nested.layer import channels_of, NestedLayer, NestedNorm, plain_layer
from leanbayes.methods.nested.units import OrderingUnit
from leanbayes.runtime._files import local, write_whole
from leanbayes.runtime.batches import Inputs
from leanbayes.runtime.norm import update_norm
from leanbayes.runtime.passes import draws

_SIZES = ("in_features", "in_channels", "nx", "out_features", "out_channels", "nf")
"""Attributes with the number of inputs, then of outputs, of a linear layer, a convolution and a `Conv1D`."""

NormData = Tensor | tuple[Any, Any] | Iterable[Any]
TENTHS = tuple(tenth / 10 for tenth in range(1, 11))


def extract(
    model: nn.Module, width: float | int, *, data: NormData | None = None, batches: int | None = None
) -> nn.Module:
    """Return a plain, physically narrower network of posterior means.

    Args:
        model: converted with `lb.NestedDropout`.
        width: the share of channel groups to keep (a float), or their number (an int).
        data: training inputs over which batch norm statistics are collected again; two batches of 512 suffice (C.2).
            None keeps the trained ones, and the result equals the masked network exactly.
        batches: number of batches of `data` to use; None uses all.

    Example:
        >>> small = lb.slim.extract(bnn, width=0.25, data=loader, batches=2)
    """
    small = mean(narrow(model, width))
    if data is not None:
        update_norm(small, data, batches=batches)
    return small


def narrow(
    model: nn.Module, width: float | int, *, data: NormData | None = None, batches: int | None = None
) -> nn.Module:
    """Return a narrower network of a fixed width that is still stochastic: its weights keep their noise.

    It is a converted model like any other (`predict`, `evaluate`, `draw`, `fit`). Arguments as of `extract`.
    """
    small = copy.deepcopy(unwrap(model))
    channels = channels_of(small)
    units = units_of(small, channels)
    if not units:
        raise ValueError(
            f"expected a model whose channels are ordered, got one without ordering units; {_remedy(small, channels)}"
        )
    kept = {root: unit.kept(width) for root, unit in units.items()}
    likelihood = own_likelihood(small)
    with torch.no_grad():
        _settle(small, width)
        for path, module in list(small.named_modules()):
            if path in channels.outputs:
                inputs, outputs = (_kept(channels, where[path], kept) for where in (channels.inputs, channels.outputs))
                if inputs is not None or outputs is not None:
                    _cut(path, module, inputs, outputs)
    if likelihood is not None:
        attach_likelihood(small, likelihood)  # the layer that stored it may be plain now
    if data is not None:
        update_norm(small, data, batches=batches)
    return small


def _remedy(model: nn.Module, channels: Channels) -> str:
    """Return why no channels of a model are ordered, or how to order them."""
    nested = next((layer for layer in model.modules() if isinstance(layer, NestedLayer)), None)
    if nested is None:
        return "convert it with lb.NestedDropout() and train it"
    left_out = {path for path, layer in model.named_modules() if isinstance(layer, LINEAR_MAPS)}
    found = nested.method.obstacles(channels, left_out & set(channels.outputs))
    if all(found.values()):
        return unordered(channels, found)
    return "if it was narrowed already, narrow the original network; otherwise, convert more of its layers"


def units_of(model: nn.Module, channels: Channels) -> dict[int, OrderingUnit]:
    """Return the ordering unit of every ordered stream, by stream number."""
    found: dict[int, OrderingUnit] = {}
    for path, layer in model.named_modules():
        layout = channels.outputs.get(path)
        if isinstance(layer, NestedLayer) and layer.posterior.order is not None and layout:
            found[channels.root(layout[0].stream)] = layer.posterior.order
    return found


def _settle(model: nn.Module, width: float | int) -> None:
    """Fold the factors of a width into weights and norms, and remove the ordering units."""
    for layer in list(model.modules()):
        if isinstance(layer, NestedLayer) and layer.posterior.order is not None:
            layer.base = plain_copy(layer.base, layer.at_width(width)) if layer.masked else layer.base
            layer.leave()
    plain = {id(layer): found for layer in model.modules() if (found := _plain(layer, width)) is not None}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in plain:
                module._modules[name] = plain[id(child)]


def _plain(layer: Any, width: float | int) -> nn.Module | None:
    """Return the replacement of a layer whose weight depends on an order or a parametrisation; None keeps it."""
    if isinstance(layer, NestedNorm):
        return layer.at_width(width)
    if isinstance(layer, NestedLayer):
        return None if layer.method.weight_noise else layer.freeze()
    if nn.utils.parametrize.is_parametrized(layer, "weight"):
        return plain_copy(layer, {"weight": layer.weight})
    return None


def _kept(channels: Channels, layout: Layout | None, kept: dict[int, Tensor]) -> Tensor | None:
    """Return the kept indices of a channel axis; None for all."""
    if layout is None:
        return None
    parts = []
    for part in layout:
        root = channels.root(part.stream)
        every = torch.ones(channels.stream(root).size, dtype=torch.bool, device="cpu")
        parts.append(kept.get(root, every).cpu().repeat_interleave(part.repeat))
    mask = torch.cat(parts)
    return None if bool(mask.all()) else torch.nonzero(mask).flatten()


def _cut(path: str, module: nn.Module, inputs: Tensor | None, outputs: Tensor | None) -> None:
    layer = plain_layer(module)
    if isinstance(module, NestedLayer):
        old = module.posterior.log_alpha
        new = cut_like_weight(layer, old.detach(), inputs, outputs)
        module.posterior.log_alpha = nn.Parameter(new.clone(), requires_grad=old.requires_grad)
        module.nodes = new.numel()
    elif isinstance(module, StochasticLayer):
        raise ValueError(
            f"layer '{path}' touches channels that are dropped, but {type(module.method).__name__} cannot be narrowed; "
            "leave it out of that conversion, or keep it away from ordered channels with where="
        )
    cut(layer, inputs, outputs)


def cut(layer: Any, inputs: Tensor | None, outputs: Tensor | None) -> None:
    """Keep the given input and output channels of a layer, in place; None keeps all.

    Args:
        layer: a linear map, a norm of single channels, or a PReLU with a slope for each.
        inputs: rising indices of the kept input channels, the same number in each group of a grouped convolution.
        outputs: the same of output channels.
    """
    if isinstance(layer, (*CHANNEL_NORMS, nn.PReLU)):
        for name in ("weight", "bias", "running_mean", "running_var"):
            _keep(layer, name, outputs, 0)
        if isinstance(layer, nn.PReLU):
            layer.num_parameters = len(layer.weight)
        elif outputs is not None:
            layer.num_features = len(outputs)
        return
    depthwise = 1 < getattr(layer, "groups", 1) == layer.in_channels == layer.out_channels
    first, second = _weight_indices(layer, inputs, outputs)
    _keep(layer, "weight", first, 0)
    _keep(layer, "weight", second, 1)
    _keep(layer, "bias", outputs, 0)
    for name, kept in zip(_SIZES, [inputs] * 3 + [outputs] * 3, strict=True):
        if kept is not None and name in vars(layer):
            setattr(layer, name, len(kept))
    if depthwise:
        layer.groups = layer.out_channels


def cut_like_weight(layer: Any, tensor: Tensor, inputs: Tensor | None, outputs: Tensor | None) -> Tensor:
    """Return the part of a tensor in the shape of the weight that `cut` will keep."""
    first, second = _weight_indices(layer, inputs, outputs)
    tensor = tensor if first is None else tensor[first]
    return tensor if second is None else tensor[:, second]


def _weight_indices(layer: Any, inputs: Tensor | None, outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the kept indices of the weight's first two axes: (out, in / groups), transposed (in, out / groups)."""
    if isinstance(layer, nn.Linear) or (layer.weight.dim() == 2 and isinstance(layer, LinearLike)):
        return outputs, inputs
    if isinstance(layer, Conv1D):
        return inputs, outputs
    first, second = (inputs, outputs) if isinstance(layer, TRANSPOSED) else (outputs, inputs)
    size = layer.out_channels if isinstance(layer, TRANSPOSED) else layer.in_channels
    if second is not None and layer.groups > 1:  # every group keeps the same channels
        second = second[second < size // layer.groups]
    return first, second


def _keep(layer: Any, name: str, index: Tensor | None, axis: int) -> None:
    tensor: Tensor | None = getattr(layer, name, None)
    if tensor is None or index is None:
        return
    kept = tensor.detach().index_select(axis, index.to(tensor.device)).clone()
    if isinstance(tensor, nn.Parameter):
        kept = nn.Parameter(kept, requires_grad=tensor.requires_grad)
    setattr(layer, name, kept)


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
    widths = tuple(widths)  # an array, too
    _check(x, data, widths)
    rows = []
    for width in widths:
        small = narrow(model, width, data=data, batches=batches)
        total = predict(small, x, samples=samples, seed=seed, keep_samples=False).total
        rows.append(total.double().cpu().flatten(1).mean(1) if total.dim() > 1 else total.double().cpu())
    uncertainty = torch.stack(rows)
    return Correlation(widths, uncertainty, pearson(uncertainty))


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
