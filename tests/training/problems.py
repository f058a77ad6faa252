"""Small problems to train on: images in three classes, a line to fit, networks with and without batch statistics."""

from __future__ import annotations

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.training import Recipe


def images(rows: int = 96) -> tuple[Tensor, Tensor]:
    """Make images (rows, 1, 4, 4) whose class is the brightest of three regions."""
    x = torch.randn(rows, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, x.flatten(1)[:, :15].unflatten(1, (3, 5)).sum(2).argmax(1)


def line(rows: int = 64) -> tuple[Tensor, Tensor]:
    """Make targets y = 2 x - 1 with noise of 0.1."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 1, generator=generator)
    return x, 2 * x - 1 + 0.1 * torch.randn(rows, 1, generator=generator)


def network(norm: bool = True) -> nn.Sequential:
    """Make the same small convolutional network every time."""
    torch.manual_seed(0)
    between = nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), between, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def rank1(norm: bool = True) -> nn.Module:
    """Make the same converted network every time."""
    return lb.convert(network(norm), lb.Rank1(components=2))


def short(**fields: object) -> Recipe:
    """Return a recipe for tests: few epochs, small batches, a CPU."""
    defaults = {"epochs": 3, "batch_size": 16, "lr": 0.05, "accelerator": "cpu"}
    return Recipe(**(defaults | fields))


def same(a: nn.Module, b: nn.Module) -> bool:
    """Say whether two models have equal tensors, bit for bit."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
