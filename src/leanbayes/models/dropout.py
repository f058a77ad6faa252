"""Dropout in front of norms: the dropout baseline of ensemble model patching (Chang et al., 2019), for any network."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn, Tensor

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""`_NormBase` is the base of batch norms and instance norms."""


class DropoutNorm(nn.Module):
    """A norm after a dropout: ``norm(dropout(x))``; in eval mode the norm alone.

    Other attributes (``weight``, ``eps``, ...) are those of the norm. A state dict of the plain network loads:
    ``PATH.weight`` is read as ``PATH.norm.weight``.

    Args:
        norm: The norm, which is kept and called.
        rate: Probability that an entry of its input is dropped.
    """

    def __init__(self, norm: nn.Module, rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)
        self.norm = norm
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.dropout(x))
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            norm = self._modules.get("norm")
            if norm is None or name.startswith("_"):
                raise
            return getattr(norm, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = tuple(f"{prefix}{name}." for name in self._modules)
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(own)]:
            state_dict[f"{prefix}norm.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def dropout_before_norms(net: nn.Module, rate: float = 0.005) -> nn.Module:
    """Return a copy of a network with a dropout in front of every batch, layer, group and instance norm.

    ``lb.convert(copy, lb.MCDropout())`` keeps these dropouts active in predictions, and the network's own. In eval mode
    the copy equals the network. Norms of ``nn.TransformerEncoderLayer`` are skipped: it may read their weights without
    calling them.

    Args:
        net: A plain network; it is not changed.
        rate: Probability that an entry of the input of a norm is dropped.

    Raises:
        ValueError: The rate is not between 0 and 1, or the network has no norm.

    Example:
        >>> bnn = lb.convert(lb.models.dropout_before_norms(net), lb.MCDropout())
    """
    if not 0 < rate < 1:
        raise ValueError(f"expected a dropout rate between 0 and 1, got {rate!r}. Pass a share such as 0.005.")
    holder = nn.ModuleDict({"root": copy.deepcopy(net)})  # a norm may be the whole network
    parents = (m for m in holder.modules() if not isinstance(m, (DropoutNorm, nn.TransformerEncoderLayer)))
    places = [(m, name, child) for m in parents for name, child in m._modules.items() if isinstance(child, NORMS)]
    done: dict[int, DropoutNorm] = {}  # a shared norm stays shared
    for parent, name, norm in places:
        parent._modules[name] = done.setdefault(id(norm), DropoutNorm(norm, rate))
    if not done:
        raise ValueError(
            f"expected a network with norms that have no dropout in front of them, got {type(net).__name__} without "
            "any. Choose another network, or convert this one with lb.MCDropout(), which needs no norms."
        )
    return holder["root"]
