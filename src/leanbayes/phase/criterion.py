"""Which weights need sampling: the curvature criterion of variance networks (Neklyudov et al., 2019, eq. 16).

    kappa_ij = sigma_ij^2 |d^2 L / d W_ij^2|  at W = M,      L = - sum_n log p(y_n | x_n, W)

(printed without a sign and for one input; the second derivative is taken in absolute value and summed over the data).
Where kappa is small, the loss is almost linear in the weight over its own noise, and the weight may be replaced by its
mean. The second derivatives are exact: no Gauss-Newton or Fisher approximation. For a linear layer b = W a,

    d^2 L / d W_ji^2 = sum_n a_ni^2 d^2 L_n / d b_nj^2,

so that only the diagonal of the Hessian by the pre-activations is needed, one backward pass for each output. Weights of
convolutions meet several positions; theirs takes one backward pass for each weight. Rectifiers have no curvature where
they are not smooth: use softplus behind the layer (`lb.layers.activate`), as the paper does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import own_likelihood, stochastic_layers
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._gaussian import GaussianLayer
from leanbayes.runtime.batches import call, Inputs, leading_rows, Output, slice_rows, to_device
from leanbayes.runtime.passes import draws
from leanbayes.runtime.twins import in_eval_mode

AT_ONCE = 2**24
"""Numbers of the Hessian that are computed at a time."""


def kappa(
    model: nn.Module,
    data: tuple[Inputs, Tensor] | DataLoader[tuple[Inputs, Tensor]],
    likelihood: Likelihood | None = None,
    *,
    batch_size: int = 256,
    output: Output | None = None,
) -> dict[str, Tensor]:
    """Return kappa of every weight of every Gaussian layer of a model, by path; norms are in eval mode.

    Args:
        model: a network with variance layers or mean-field layers.
        data: inputs and targets, over which the curvature is summed: as in the loss, all training data.
        likelihood: how outputs are read; default the model's own, else `Categorical`.
        batch_size: rows at a time.
        output: picks the tensor out of what the model returns.

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
    data: tuple[Inputs, Tensor] | DataLoader[tuple[Inputs, Tensor]],
    likelihood: Likelihood,
    batch_size: int = 256,
    output: Output | None = None,
) -> Tensor:
    """Return the diagonal of the Hessian of the summed loss by the weights of one layer, at the posterior means."""
    layer = model.get_submodule(path)
    assert isinstance(layer, GaussianLayer)
    total = torch.zeros_like(layer.base.weight, dtype=torch.promote_types(layer.base.weight.dtype, torch.float32))
    with in_eval_mode(model):
        for x, y in _batches(data, batch_size, layer.device):
            if isinstance(layer.base, nn.Linear):
                total += _of_linear(model, layer, x, y, likelihood, output)
            else:
                total += _of_any(model, layer, x, y, likelihood, output)
    return total


def _of_linear(
    model: nn.Module, layer: GaussianLayer, x: Inputs, y: Tensor, likelihood: Likelihood, output: Output | None
) -> Tensor:
    """Go by the pre-activations: inputs squared times their second derivatives."""
    seen: dict[str, Tensor] = {}

    def cut(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
        if "b" in seen:
            raise ValueError(f"layer '{layer.path}' is called twice in a pass; its curvature is not that of one call")
        seen["a"], seen["b"] = args[0].detach(), result.detach().requires_grad_()
        return seen["b"]

    handle = layer.register_forward_hook(cut)
    try:
        loss = _loss(model, x, y, likelihood, output)
    finally:
        handle.remove()
    a, b = seen["a"].flatten(0, -2), seen["b"]
    if b.dim() != 2:
        return _of_any(model, layer, x, y, likelihood, output)  # positions of a row meet in the loss
    (slope,) = torch.autograd.grad(loss, b, create_graph=True)
    second = _diagonal(slope, b)
    return second.T @ a.to(second.dtype).square()


def _diagonal(slope: Tensor, b: Tensor) -> Tensor:
    """Return d^2 L / d b_nj^2 for rows n that do not meet: column j of the gradient's gradient by b."""
    rows, outputs = b.shape
    if not slope.requires_grad:  # the rest of the network is linear
        return torch.zeros_like(b)
    columns = torch.empty_like(b)
    step = max(1, AT_ONCE // b.numel())
    for start in range(0, outputs, step):
        wanted = torch.arange(start, min(outputs, start + step), device=b.device)
        directions = torch.zeros(len(wanted), rows, outputs, dtype=b.dtype, device=b.device)
        directions[torch.arange(len(wanted)), :, wanted] = 1
        (found,) = torch.autograd.grad(slope, b, directions, retain_graph=True, is_grads_batched=True)
        columns[:, wanted] = found[torch.arange(len(wanted)), :, wanted].T
    return columns


def _of_any(
    model: nn.Module, layer: GaussianLayer, x: Inputs, y: Tensor, likelihood: Likelihood, output: Output | None
) -> Tensor:
    """Differentiate the gradient by every weight in turn."""
    weight: Tensor = layer.base.weight
    if layer.family.weight is not None:
        raise ValueError(
            f"layer '{layer.path}' computes its weight from the stored one; the curvature is that of stored weights. "
            "Leave it out (where=...)"
        )
    if layer.means is None:
        raise ValueError(
            f"layer '{layer.path}' has no means to differentiate at; curvature of a convolution needs them"
        )
    loss = _loss(model, x, y, likelihood, output)
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    flat = slope.flatten()
    found = torch.zeros_like(flat)
    step = max(1, AT_ONCE // flat.numel())
    for start in range(0, flat.numel(), step):
        wanted = torch.arange(start, min(flat.numel(), start + step), device=flat.device)
        directions = torch.zeros(len(wanted), flat.numel(), dtype=flat.dtype, device=flat.device)
        directions[torch.arange(len(wanted)), wanted] = 1
        (rows,) = torch.autograd.grad(flat, weight, directions, retain_graph=True, is_grads_batched=True)
        found[wanted] = rows.flatten(1)[torch.arange(len(wanted)), wanted]
    return found.view_as(weight).detach()


def _loss(model: nn.Module, x: Inputs, y: Tensor, likelihood: Likelihood, output: Output | None) -> Tensor:
    """Return the summed negative log-likelihood of the network of means."""
    with draws(model, mean=True), torch.enable_grad():
        return -likelihood.log_prob(call(model, x, output), y).sum()


def _batches(
    data: tuple[Inputs, Tensor] | DataLoader[tuple[Inputs, Tensor]], size: int, device: torch.device
) -> Iterator[tuple[Inputs, Tensor]]:
    if isinstance(data, DataLoader):
        yield from ((to_device(x, device), y.to(device)) for x, y in data)
        return
    x, y = data
    rows = leading_rows(x) or 0
    for start in range(0, rows, size):
        stop = min(rows, start + size)
        yield to_device(slice_rows(x, rows, start, stop), device), y[start:stop].to(device)
