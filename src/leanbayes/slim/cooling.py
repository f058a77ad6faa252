"""Let the relaxed masks of a nested network harden during training: a callback for `fit`."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from leanbayes.methods.ordering import OrderingUnit


class Epoch(Protocol):
    """What `fit` tells a callback: the epochs that are done, and the model in training."""

    epoch: int
    model: nn.Module


class Cooling:
    """Lowers the temperature of every ordering unit from epoch to epoch, by equal factors.

        tau = start (end / start)^(epoch / epochs)

    A training that is resumed goes on where it was: the temperature depends on the epoch alone.

    Args:
        start: the temperature at the beginning; give the same to `lb.NestedDropout`.
        end: the temperature of the last epoch.
        epochs: over how many epochs it falls; afterwards it stays.

    Example:
        >>> bnn = lb.convert(net, lb.NestedDropout(temperature=2.0, hard=False))
        >>> lb.fit(bnn, (x, y), recipe, callbacks=[lb.slim.Cooling(2.0, 0.5, epochs=recipe.epochs)])
    """

    def __init__(self, start: float, end: float, *, epochs: int) -> None:
        """Take the two temperatures."""
        if not (start > 0 and end > 0 and epochs > 0):
            raise ValueError(f"expected positive temperatures and epochs, got {start}, {end} and {epochs}")
        self.start, self.end, self.epochs = start, end, epochs

    def __call__(self, state: Epoch) -> None:
        """Set the temperature of the coming epoch."""
        share = min(1.0, state.epoch / self.epochs)
        temperature = self.start * (self.end / self.start) ** share
        for module in state.model.modules():
            if isinstance(module, OrderingUnit):
                module.temperature.fill_(temperature)
