"""Networks for tables with codes: a learned vector replaces each code, then any network for features follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast, ClassVar

import torch
from torch import nn, Tensor

from leanbayes.models._blocks import Chain, check_positive

# B rows, d columns

_WIDEST = 32  # largest size of a vector


def vector_size(codes: int) -> int:
    """Return the size of the learned vectors of a column: 1.6 n^0.56 for n codes, rounded, at most 32."""
    return min(_WIDEST, round(1.6 * math.pow(codes, 0.56)))


def embedded_width(inputs: int, codes: Mapping[int, int]) -> int:
    """Return the number of columns after `EmbedCodes`."""
    return inputs - len(codes) + sum(map(vector_size, codes.values()))


class EmbedCodes(nn.Module):
    """Replace columns of codes by learned vectors: (B, d) to (B, outputs), other columns first.

    Code 0 is for unseen values: its vector starts at zero, the centre of the others. A code outside of the known ones
    counts as 0.

    Args:
        inputs: Number of columns d.
        codes: Number of codes of each column of codes, by position.

    Attributes:
        outputs: Number of columns after the replacement.
    """

    def __init__(self, inputs: int, codes: Mapping[int, int]) -> None:
        super().__init__()
        check_positive("EmbedCodes", inputs=inputs, **{f"codes[{i}]": count for i, count in codes.items()})
        if outside := [i for i in codes if not 0 <= i < inputs]:
            raise ValueError(f"EmbedCodes expected columns from 0 to {inputs - 1}, got {outside[0]}.")
        self.columns = sorted(codes)
        self.others = [i for i in range(inputs) if i not in codes]
        self.counts = [codes[i] for i in self.columns]
        self.vectors = nn.ModuleList(nn.Embedding(count, vector_size(count)) for count in self.counts)
        self.outputs = embedded_width(inputs, codes)
        with torch.no_grad():
            for vectors in self.vectors:
                cast(nn.Embedding, vectors).weight[0].zero_()

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[..., self.others]]
        for column, count, vectors in zip(self.columns, self.counts, self.vectors, strict=True):
            code = x[..., column].round().long()
            known = (code >= 0) & (code < count)
            parts.append(vectors(torch.where(known, code, 0)))
        return torch.cat([part.to(parts[-1].dtype) for part in parts], -1)


class TableNet(Chain):
    """A network for tables with codes: ``embed``, then ``body``.

    Args:
        make: Makes the body, from its number of inputs.
        inputs: Number of columns d.
        codes: Number of codes of each column of codes, by position, such as ``lb.data.load(...).embedded``.

    Example:
        >>> from leanbayes.models import MLP
        >>> TableNet(lambda inputs: MLP(inputs, 3), 4, {2: 50})(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    parts: ClassVar[tuple[str, ...]] = ("embed", "body")

    def __init__(self, make: Callable[[int], nn.Module], inputs: int, codes: Mapping[int, int]) -> None:
        super().__init__()
        self.embed = EmbedCodes(inputs, codes)
        self.body = make(self.embed.outputs)
