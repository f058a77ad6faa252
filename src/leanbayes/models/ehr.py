"""An LSTM over health records: embeddings of the measurements of an hour are summed and read hour by hour."""

from __future__ import annotations

import torch
from torch import nn, Tensor

from leanbayes.models._checks import check_positive

# B stays, T steps, V variables, E embedding, H hidden units

START = 0.05
"""Initial standard deviation of the embeddings; with torch's default of 1, the network memorises rare bins."""

REMEMBER = 3.0
"""Initial bias of the forget gates, so that the last state still depends on the first day."""


class EHRNet(nn.Module):
    r"""LSTM over hourly measurements, each looked up by variable and bin.

    Every bin of every variable has an embedding E. With :math:`x_{tv}` the bin of variable v in step t, 0 if it was not
    measured,

    .. math:: e_t = \sum_{v : x_{tv} > 0} E_{v, x_{tv}}

    An LSTM reads :math:`e_1, ..., e_T`, and a linear layer its last state. The embeddings are summed, not averaged:
    the number of measurements is informative. It is the simplest form of the network of Dusenberry et al. (2019).

    Example:
        >>> EHRNet(2, (48, 42))(torch.zeros(3, 48, 42, dtype=torch.int64)).shape
        torch.Size([3, 2])

    Args:
        num_outputs: Number of classes.
        input_shape: Steps and variables (T, V) of one stay.
        bins: Most bins of a variable.
        embedding: Length of an embedding.
        hidden: Units of the LSTM.
        dropout: Rate at which elements of the sums and of the last state are dropped in training.
    """

    offsets: Tensor

    def __init__(
        self,
        num_outputs: int,
        input_shape: tuple[int, ...],
        *,
        bins: int = 10,
        embedding: int = 32,
        hidden: int = 64,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if len(input_shape) != 2:
            raise ValueError(
                f"EHRNet expected input_shape (steps, variables), got {input_shape}. Give it a series of bins, such as "
                "physionet2012."
            )
        steps, variables = input_shape
        check_positive("EHRNet", num_outputs=num_outputs, steps=steps, variables=variables)
        check_positive("EHRNet", bins=bins, embedding=embedding, hidden=hidden)
        self.register_buffer("offsets", bins * torch.arange(variables), persistent=False)
        self.embedding = nn.Embedding(1 + bins * variables, embedding, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_outputs)
        with torch.no_grad():
            self.embedding.weight.mul_(START)
            for bias, start in (("bias_ih_l0", REMEMBER), ("bias_hh_l0", 0.0)):
                # torch's order of the gates is input, forget, cell, output
                self.lstm.get_parameter(bias)[hidden : 2 * hidden] = start

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise ValueError(f"EHRNet expected whole numbers, the bins of values, got {x.dtype}. Give it a series.")
        measured = x > 0
        vectors = self.embedding((x + self.offsets) * measured)
        # A mask, not the zeros of the padding row alone: a method may give that row another value.
        total = (measured.to(vectors.dtype)[..., None, :] @ vectors).squeeze(-2)
        states, _ = self.lstm(self.dropout(total))
        logits: Tensor = self.head(self.dropout(states[:, -1]))
        return logits
