"""The network for health records: what it computes, what it leaves out, and errors that teach."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanbayes import models
from leanbayes.models import EHRNet
from leanbayes.models.classic import START

STEPS, VARIABLES, BINS = 5, 4, 3


def make(**options) -> EHRNet:
    torch.manual_seed(0)
    return EHRNet(2, (STEPS, VARIABLES), bins=BINS, **{"embedding": 6, "hidden": 7} | options).eval()


def stays(rows: int = 8) -> torch.Tensor:
    return torch.randint(BINS + 1, (rows, STEPS, VARIABLES), generator=torch.Generator().manual_seed(1))


def by_hand(net: EHRNet, x: torch.Tensor) -> torch.Tensor:
    """Sum the vectors of the measurements, one by one, then step through the LSTM's equations."""
    h = c = torch.zeros(net.lstm.hidden_size)
    for step in x:
        found = [net.embedding.weight[1 + v * BINS + (b - 1)] for v, b in enumerate(step.tolist()) if b > 0]
        e = sum(found, torch.zeros(net.lstm.input_size))
        gates = net.lstm.weight_ih_l0 @ e + net.lstm.bias_ih_l0 + net.lstm.weight_hh_l0 @ h + net.lstm.bias_hh_l0
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return net.head.weight @ h + net.head.bias


def test_outputs_are_those_of_the_equations():
    net, x = make(), stays()
    x[0, 2] = 0  # an hour in which nothing was measured
    x[1] = 0  # a stay without any measurement
    with torch.no_grad():
        torch.testing.assert_close(net(x), torch.stack([by_hand(net, stay) for stay in x]))


def test_the_row_of_what_was_not_measured_counts_for_nothing():
    net, x = make(), stays()
    before = net(x)
    with torch.no_grad():
        net.embedding.weight[0] = 1e3
    torch.testing.assert_close(net(x), before)


def test_every_bin_of_every_variable_has_a_vector_of_its_own():
    net = make()
    one = torch.zeros(VARIABLES * BINS, STEPS, VARIABLES, dtype=torch.int64)
    for row in range(len(one)):
        one[row, 0, row // BINS] = 1 + row % BINS
    seen = []
    net.embedding.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    net(one)
    assert seen[0].sum((1, 2)).tolist() == list(range(1, 1 + VARIABLES * BINS))
    assert net.embedding.num_embeddings == 1 + VARIABLES * BINS


def test_it_remembers_at_the_start():
    net = make(hidden=50)
    forget = (net.lstm.bias_ih_l0 + net.lstm.bias_hh_l0)[50:100]
    assert (forget.sigmoid() > 0.9).all()
    assert not net.embedding.weight[0].any()
    assert net.embedding.weight[1:].std().item() == pytest.approx(START, rel=0.3)


def test_it_is_made_of_ordinary_layers():
    kinds = {type(layer) for layer in models.build("lstm-ehr", num_outputs=2, input_shape=(48, 42)).children()}
    assert kinds == {nn.Embedding, nn.LSTM, nn.Linear, nn.Dropout}


def test_double_precision_and_narrow_integers_are_kept():
    net, x = make().double(), stays()
    assert net(x).dtype == torch.float64
    torch.testing.assert_close(net(x.to(torch.uint8)), net(x))


def test_dropout_is_for_training_only():
    net, x = make(dropout=0.5), stays()
    torch.testing.assert_close(net(x), net(x))
    assert not torch.equal(net.train()(x), net(x))


@pytest.mark.parametrize("shape", [(3, 8, 8), (8,), ()])
def test_rows_that_are_no_series_are_refused(shape):
    with pytest.raises(ValueError, match=r"EHRNet expected input_shape \(steps, variables\), got "):
        EHRNet(2, shape)


@pytest.mark.parametrize("name", ["bins", "embedding", "hidden"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"EHRNet expected {name} >= 1, got 0"):
        EHRNet(2, (4, 3), **{name: 0})


def test_measured_values_in_place_of_bins_are_refused():
    with pytest.raises(ValueError, match=r"EHRNet expected whole numbers, the bins of values, got torch\.float32"):
        make()(torch.randn(2, STEPS, VARIABLES))
