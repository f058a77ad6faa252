"""Networks, inputs and training steps that are measured: on a GPU in full size, elsewhere with small inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor

import leanbayes as lb
from benchmarks.naive import naive_rank1
from leanbayes.core.objective import ElboTerms
from leanbayes.core.step_graph import CapturedStep
from leanbayes.methods import all_methods

Step = Callable[[], object]
NUM_DATA = 50_000
VARIANTS = {
    "mean_field_weights": lb.MeanField(estimator="weights"),
    "rank1_component": lb.Rank1(noise="component"),
    "patch_crossed": lb.ModelPatch(crossed=True),
}
"""Methods in another form than their default, where it costs something else."""


@dataclass(frozen=True)
class Problem:
    """A network and the shape of a batch.

    Attributes:
        net: name of the network in `lb.models`, or "bert-base".
        batch: rows of a batch.
        size: pixels of a side of an image, or tokens of a text.
        classes: number of outputs.
        small: settings of the BERT that replace those of BERT-base.
    """

    net: str
    batch: int
    size: int = 32
    classes: int = 10
    small: tuple[tuple[str, int], ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the inputs are tokens."""
        return self.net == "bert-base"

    def network(self, device: str = "cpu") -> nn.Module:
        """Make the plain network; images are in channels_last on a GPU."""
        if self.is_text:
            from transformers import BertConfig, BertForSequenceClassification

            config = BertConfig(num_labels=self.classes, attn_implementation="sdpa", **dict(self.small))
            return BertForSequenceClassification(config).to(device)
        net = lb.models.build(self.net, num_outputs=self.classes, input_shape=(3, self.size, self.size)).to(device)
        return net.to(memory_format=torch.channels_last) if device == "cuda" else net

    def inputs(self, device: str = "cpu", rows: int | None = None) -> tuple[Any, Tensor]:
        """Make a batch of random inputs and targets."""
        rows = rows or self.batch
        y = torch.randint(self.classes, (rows,), device=device)
        if self.is_text:
            words = torch.randint(5, dict(self.small).get("vocab_size", 20_000), (rows, self.size), device=device)
            return {"input_ids": words, "attention_mask": torch.ones_like(words)}, y
        x = torch.randn(rows, 3, self.size, self.size, device=device)
        return (x.to(memory_format=torch.channels_last) if device == "cuda" else x), y

    def shrunk(self) -> Problem:
        """Return as many layers, as narrow as possible, with a tiny batch: a step then costs its operations' calls."""
        if self.is_text:
            few = (("hidden_size", 24), ("intermediate_size", 24), ("vocab_size", 200))
            return replace(self, batch=8, size=4, small=few)
        if self.net.startswith("wrn"):
            return replace(self, net=self.net.rsplit("-", 1)[0] + "-2", batch=4, size=8)
        return replace(self, batch=4, size=32)


PROBLEMS = {
    "wrn-28-10": Problem("wrn-28-10", 256),
    "wrn-16-4": Problem("wrn-16-4", 128),
    "resnet-50": Problem("resnet50", 128, size=224, classes=1000),
    "bert-base": Problem("bert-base", 32, size=128, classes=2),
}


def layer_methods() -> list[str]:
    """Return the methods that wrap layers, and their variants; an explicit ensemble costs what its members cost."""
    return [*(name for name, kind in all_methods().items() if kind.targets), *VARIANTS]


def converted(name: str, net: nn.Module, example: Any = None) -> nn.Module:
    """Return a network under a method of this name; "plain" leaves it."""
    if name == "plain":
        return net
    if name == "naive_rank1":
        return naive_rank1(net).to(next(net.parameters()).device)
    method = VARIANTS[name] if name in VARIANTS else all_methods()[name]()
    return lb.convert(net, method, example=example)


def train_step(
    model: nn.Module, x: Any, y: Tensor, *, half: bool, compiled: bool = False, captured: bool = False
) -> TrainStep:
    """Return a training step: zero_grad, forward, loss with KL, backward, SGD with momentum (foreach).

    Args:
        model: a plain or converted network, on the device of the inputs.
        x: inputs, a tensor or a mapping by name.
        y: classes.
        half: whether the forward runs under bfloat16 autocast.
        compiled: whether the loss is compiled.
        captured: whether forward and backward are replayed as a CUDA graph, as `fit` does on a GPU.
    """
    has_kl, zero = any(True for _ in lb.stochastic_layers(model)), torch.zeros((), device=y.device)

    def terms_of(x: Any, y: Tensor, beta: Any = 1.0) -> ElboTerms:
        with torch.autocast(y.device.type, torch.bfloat16, enabled=half):
            found = model(**x) if isinstance(x, dict) else model(x)
        outputs = logits_of(found)
        nll, kl = F.cross_entropy(outputs.float(), y), lb.kl(model) if has_kl else zero
        return ElboTerms(nll, kl, nll + beta * kl / NUM_DATA if has_kl else nll, outputs)

    return TrainStep(model, torch.compile(terms_of) if compiled else terms_of, x, y, captured=captured)


class TrainStep:
    """The step that `train_step` returns; the first call compiles it, and `capture` comes before captured ones."""

    def __init__(self, model: nn.Module, loss: Any, x: Any, y: Tensor, *, captured: bool) -> None:
        groups = lb.parameter_groups(model, lr=1e-3)
        self.optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9, foreach=True)
        self.loss, self.x, self.y = loss, x, y
        self.waiting = CapturedStep(loss, model) if captured else None
        self.captured: CapturedStep | None = None
        # A captured step reads the weight of the KL from a tensor, and code is compiled for either.
        self.beta: Any = torch.ones((), device=y.device) if captured else 1.0

    def capture(self) -> None:
        """Make the next call the first captured one."""
        self.captured = self.waiting

    def __call__(self) -> None:
        """Make a step."""
        self.optimizer.zero_grad()
        if self.captured is None:
            self.loss(self.x, self.y, self.beta).loss.backward()
        elif self.captured(self.x, self.y, 1.0) is None:
            raise RuntimeError("expected a step that can be captured as a CUDA graph")
        self.optimizer.step()


def logits_of(found: Any) -> Tensor:
    """Return the outputs of a network of tensors, or of transformers."""
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits
