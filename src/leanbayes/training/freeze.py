"""Training the posterior alone, around a network that stays as it came: weights, statistics and all.

What a network learns without a gradient lies in buffers: the running statistics of norms, the vectors of spectral
norms. Their modules change them in train mode only, so they are kept in eval mode; dropout stays on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from leanbayes.convert import stochastic_layers
from leanbayes.training.phases import Phase


@contextmanager
def weights_frozen(phase: Phase) -> Iterator[None]:
    """Let posteriors, and the noise of a likelihood, be all that has a gradient while the context is open.

    Raises:
        ValueError: if the model has no posterior to train.
    """
    learned = {id(p) for _, layer in stochastic_layers(phase) for p in layer.extra_parameters() if p.requires_grad}
    if not learned:
        raise ValueError("freeze=True trains the posterior alone, and this model has none; convert it, or freeze=False")
    if phase.likelihood is not None:
        learned |= {id(p) for p in phase.likelihood.parameters()}
    resting = [p for p in phase.parameters() if p.requires_grad and id(p) not in learned]
    for parameter in resting:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in resting:
            parameter.requires_grad_(True)


def to_train_mode(model: nn.Module, *, freeze: bool) -> None:
    """Put a model into train mode; where it is frozen, all of it but the modules that have buffers of their own."""
    model.train()
    if freeze:
        for module in model.modules():
            module.training = not any(True for _ in module.buffers(recurse=False))
