"""All draws of a chain of linear layers and activations in one batched product per layer, without `vmap`.

A chain is an `nn.Sequential` of linear layers, activations and dropouts. With the draws on a first axis of their own,
(G, B, n), activations work unchanged, and a linear layer with G weights is `torch.baddbmm`:

    h <- W_g h + b_g        one call for all draws

`vmap` does the same for any network, at several times the overhead; in an MLP of a few thousand weights it dominates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor

ELEMENTWISE = frozenset((
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Identity),
    *(nn.Dropout, nn.AlphaDropout),
))  # fmt: skip
"""Modules that change every entry alone in eval mode."""


def chain_of(network: nn.Module) -> list[nn.Module] | None:
    """Return the modules of a chain in order; None for any other network."""
    found = list(_parts(network))
    known = all(type(module) is nn.Linear or type(module) in ELEMENTWISE for module in found)
    return found if known else None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    if type(module).forward is not nn.Sequential.forward:
        yield module
        return
    for child in module.children():
        yield from _parts(child)


def run_chain(modules: list[nn.Module], x: Tensor, drawn: dict[int, dict[str, Tensor]]) -> Tensor:
    """Return the outputs of G draws (G, B, n) for rows (B, m); `drawn` has stacked tensors by identity of a layer."""
    for module in modules:
        own = drawn.get(id(module))
        x = module(x) if own is None else _linear(module, x, own)
    return x


def _linear(module: Any, x: Tensor, own: dict[str, Tensor]) -> Tensor:
    weight, bias = own["weight"], own.get("bias", module.bias)
    draws, outputs, _ = weight.shape
    if x.dim() == 2:  # the same rows for all draws: one product with all weights
        stacked = None if bias is None else bias.expand(draws, outputs).flatten()
        return F.linear(x, weight.flatten(0, 1), stacked).view(len(x), draws, outputs).transpose(0, 1)
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)
