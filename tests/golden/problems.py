"""Six small networks with a batch each, and every example of every method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn, Tensor

import leanbayes as lb
from tests.golden.names import all_methods


class Recurrent(nn.Module):
    """An LSTM over words of six numbers, and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    """A transformer layer with dropout, and a head on the mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Tied(nn.Module):
    """The rarer layers: an embedding tied to the head, a GRU, a grouped and a transposed convolution, an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.narrow, self.widen = nn.Conv1d(8, 8, 3, stride=2, groups=2), nn.ConvTranspose1d(8, 8, 3, bias=False)
        self.gru = nn.GRU(8, 8, bidirectional=True)  # time first
        self.join, self.norm = nn.Linear(16, 8), nn.RMSNorm(8)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.widen(self.narrow(self.embed(words).transpose(1, 2)).relu())
        return self.head(self.norm(self.join(self.gru(x.permute(2, 0, 1))[0][-1])))


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: lb.models.MLP(6, 4, hidden=(16, 16)), (6,)),
    "conv": (_conv, (2, 6, 6)),
    "lstm": (Recurrent, (5, 6)),
    "transformer": (Attention, (5, 8)),
    "unet": (lambda: lb.models.UNet(4, (1, 8, 8), widths=(8, 12)), (1, 8, 8)),
    "tied": (Tied, (7,)),
}

EXAMPLES = {f"{name}:{label}": m for name, kind in all_methods().items() for label, m in kind.examples().items()}

ROWS = 10
"""Rows of a batch: more than components, and no multiple of them."""


def network(name: str) -> nn.Module:
    """Return a fresh network of a fixed seed."""
    torch.manual_seed(1)
    return NETWORKS[name][0]()


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of a fixed seed; classes of pixels for the U-Net."""
    row = NETWORKS[name][1]
    generator = torch.Generator().manual_seed(2)
    words = name == "tied"
    x = torch.randint(4, (ROWS, *row), generator=generator) if words else torch.randn(ROWS, *row, generator=generator)
    y = torch.randint(4, (ROWS, *row[1:]) if name == "unet" else (ROWS,), generator=generator)
    return x, y


def converted(name: str, method: str) -> nn.Module:
    """Return a network after its conversion, both of fixed seeds."""
    net = network(name)
    torch.manual_seed(3)
    return lb.convert(net, EXAMPLES[method])
