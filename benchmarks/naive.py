"""Rank-1 factors as one writes them on a first day: the mark that a library should beat."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn, Tensor


class NaiveRank1(nn.Module):
    """Draws fresh factors in every forward pass, in training and in prediction alike."""

    def __init__(self, base: nn.Module, components: int = 4) -> None:
        super().__init__()
        self.base, self.components = base, components
        conv = isinstance(base, nn.Conv2d)
        sizes = (base.in_channels, base.out_channels) if conv else (base.in_features, base.out_features)
        self.means = nn.ParameterList(1 + 0.1 * torch.randn(components, size) for size in sizes)
        self.raw = nn.ParameterList(torch.full((components, size), -3.4) for size in sizes)

    def factor(self, side: int, x: Tensor) -> Tensor:
        rows = x.shape[0]
        k = torch.arange(rows, device=x.device) * self.components // rows
        mean, std = self.means[side][k], F.softplus(self.raw[side])[k]
        return (mean + std * torch.randn_like(mean)).view(*mean.shape, *[1] * (x.dim() - 2)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x * self.factor(0, x))
        return y * self.factor(1, y)


def naive_rank1(net: nn.Module) -> nn.Module:
    """Convert a network the naive way."""
    net = copy.deepcopy(net)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.Conv2d, nn.Linear)):
                setattr(module, name, NaiveRank1(child))
    return net
