"""Networks of a user's own, for tests: defined outside the package, with the habits of real code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn, Tensor


class Nested(nn.Module):
    """Containers in containers, a list and a dict of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"name": "nested"}
        self.stem = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 8))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.heads["a"](x)

    def greet(self) -> str:
        return self.config["name"]


@dataclass
class Output:
    """An output record in the manner of transformers."""

    logits: Tensor
    hidden: Tensor


class Tokens(nn.Module):
    """Called with keywords, folds time into rows inside, returns a record."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Output:
        hidden = self.embed(tokens)
        batch, time, width = hidden.shape
        hidden = self.mix(hidden.reshape(batch * time, width)).view(batch, time, width).tanh() * scale
        return Output(self.head(hidden.mean(1)), hidden)


class Pair(nn.Module):
    """Two inputs, a tuple of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(a) + self.right(b), b


class AlexNetShaped(nn.Module):
    """The layers of AlexNet as torchvision has them, for counting."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)
        )


def small_net() -> nn.Sequential:
    """A small convolutional network with a batch norm whose statistics are not 0 and 1."""
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, bias=False),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, 1, 8, 8) * 2 + 1)
    return net
