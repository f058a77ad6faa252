"""Curvature criterion for the weights that need sampling (Neklyudov et al., 2019, eq. 16).

    kappa_ij = sigma_ij^2 |d^2 L / d W_ij^2|  at W = M,      L = - sum_n log p(y_n | x_n, W)

(printed without a sign and for one input; here in absolute value and summed over the data). If kappa is small, the loss
is almost linear in the weight over its noise, and the weight may be replaced by its mean. The second derivatives are
exact, without Gauss-Newton or Fisher approximation. For a linear layer b = W a,

    d^2 L / d W_ji^2 = sum_n a_ni^2 d^2 L_n / d b_nj^2,

so only the diagonal of the Hessian by the pre-activations is needed, one backward pass for each output. Weights of
convolutions act at several positions and take one backward pass each. Rectifiers have no curvature: use softplus after
the layer (`lb.layers.activate`), as the paper does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import own_likelihood, stochastic_layers
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._gaussian import GaussianLayer
from leanbayes.runtime.batches import call, Inputs, leading_rows, Output, slice_rows, to_device
from leanbayes.runtime.passes import draws
from leanbayes.runtime.twins import in_eval_mode

Rows = tuple[Inputs, Tensor]
Loss = Callable[[], Tensor]  # summed negative log-likelihood of the network of means

AT_ONCE = 2**24
"""Numbers of the Hessian that are computed at a time."""


def kappa(
    model: nn.Module,
    data: Rows | DataLoader[Rows],
    likelihood: Likelihood | None = None,
    *,
    batch_size: int = 256,
    output: Output | None = None,
) -> dict[str, Tensor]:
    """Return kappa of every weight of every Gaussian layer, by path; norms are in eval mode.

    Args:
        model: a network with variance layers or mean-field layers.
        data: inputs and targets, over which the curvature is summed: all training data, as in the loss.
        likelihood: default the model's own, else `Categorical`.
        batch_size: rows at a time.
        output: picks the tensor out of the model's output.

    Example:
        >>> k = lb.phase.kappa(bnn, (x, y))["fc1"]
    """
    layers = {path: layer for path, layer in stochastic_layers(model) if isinstance(layer, GaussianLayer)}
    if not layers:
        raise ValueError("expected a model with Gaussian weights, such as lb.VarianceLayers() makes, got none")
    likelihood = likelihood or own_likelihood(model) or Categorical()
    return {
        path: layer.scales.detach().float().square()
        * curvature(model, path, data, likelihood, batch_size, output).abs()
        for path, layer in layers.items()
    }


def curvature(
    model: nn.Module,
    path: str,
    data: Rows | DataLoader[Rows],
    likelihood: Likelihood,
    batch_size: int = 256,
    output: Output | None = None,
) -> Tensor:
    """Return the diagonal of the Hessian of the summed loss by the weights of one layer, at the posterior means."""
    layer = model.get_submodule(path)
    assert isinstance(layer, GaussianLayer)
    total = torch.zeros_like(layer.base.weight, dtype=torch.promote_types(layer.base.weight.dtype, torch.float32))
    of_layer = _of_linear if isinstance(layer.base, nn.Linear) else _of_any
    seen = 0
    with in_eval_mode(model):
        for x, y in _batches(data, batch_size, layer.device):
            total += of_layer(layer, partial(_loss, model, x, y, likelihood, output), len(y))
            seen += len(y)
    if not seen:
        raise ValueError("expected at least one row to sum the curvature over, got none")
    return total


def _of_linear(layer: GaussianLayer, loss_of_means: Loss, rows: int) -> Tensor:
    """Return squared inputs times the second derivatives by the pre-activations."""
    seen: dict[str, Tensor] = {}

    def cut(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
        if "b" in seen:
            raise ValueError(f"layer '{layer.path}' is called twice in a pass; its curvature is not that of one call")
        seen["a"], seen["b"] = args[0].detach(), result.detach().requires_grad_()
        return seen["b"]

    handle = layer.register_forward_hook(cut)
    try:
        loss = loss_of_means()
    finally:
        handle.remove()
    a, b = seen["a"].flatten(0, -2), seen["b"]
    if b.dim() != 2 or len(b) != rows:
        return _of_any(layer, loss_of_means)  # positions of a row interact in the loss
    second = _diagonal(loss, b, rows=rows)
    return second.T @ a.to(second.dtype).square()


def _of_any(layer: GaussianLayer, loss_of_means: Loss, rows: int = 1) -> Tensor:
    """Return the second derivatives by every weight in turn; the number of rows has no effect."""
    if layer.family.weight is not None:
        raise ValueError(
            f"layer '{layer.path}' computes its weight from the stored one; the curvature is that of stored weights. "
            "Leave it out (where=...)"
        )
    if layer.means is None:
        raise ValueError(
            f"layer '{layer.path}' has no means to differentiate at; curvature of a convolution needs them"
        )
    return _diagonal(loss_of_means(), layer.base.weight, rows=1).detach()


def _diagonal(loss: Tensor, by: Tensor, rows: int) -> Tensor:
    """Return d^2 L / d by^2, an element each; `by` flattens to (rows, n), and rows do not interact in the loss."""
    (slope,) = torch.autograd.grad(loss, by, create_graph=True)
    if not slope.requires_grad:  # the loss is linear
        return torch.zeros_like(by)
    slope = slope.reshape(rows, -1)
    columns = slope.shape[1]
    found = torch.zeros_like(slope)
    step = max(1, AT_ONCE // by.numel())
    for start in range(0, columns, step):
        wanted = torch.arange(start, min(columns, start + step), device=by.device)
        each = torch.arange(len(wanted), device=by.device)
        directions = torch.zeros(len(wanted), rows, columns, dtype=by.dtype, device=by.device)
        directions[each, :, wanted] = 1
        (second,) = torch.autograd.grad(slope, by, directions, retain_graph=True, is_grads_batched=True)
        found[:, wanted] = second.reshape(len(wanted), rows, columns)[each, :, wanted].T
    return found.view_as(by)


def _loss(model: nn.Module, x: Inputs, y: Tensor, likelihood: Likelihood, output: Output | None) -> Tensor:
    """Return the summed negative log-likelihood of the network of means."""
    with draws(model, mean=True), torch.enable_grad():
        return -likelihood.log_prob(call(model, x, output), y).sum()


def _batches(data: Rows | DataLoader[Rows], size: int, device: torch.device) -> Iterator[Rows]:
    if isinstance(data, DataLoader):
        yield from ((to_device(x, device), y.to(device)) for x, y in data)
        return
    x, y = data
    rows = leading_rows(x) or 0
    if len(y) != rows:
        raise ValueError(f"expected one target for each of {rows} rows, got {len(y)}")
    for start in range(0, rows, size):
        stop = min(rows, start + size)
        yield to_device(slice_rows(x, rows, start, stop), device), y[start:stop].to(device)
