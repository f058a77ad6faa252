"""Nested dropout says how much widths remove, refuses networks that can hardly be cut, and names the cure."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.layers import family
from leanbayes.layers.channels import follow
from tests.slim.networks import CASES, parameters, Residual, units_of, unsettle, X


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 3))


def said(net: nn.Module, method: lb.NestedDropout, **options) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lb.convert(net, method, **options)
    return "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize("name", CASES)
def test_the_shares_are_those_that_widths_remove(name):
    torch.manual_seed(0)
    net = CASES[name].make()
    each = ", ".join(rf"width {width} removes (\d+)%" for width in (0.25, 0.5, 0.75))
    found = re.search(rf"of ([\d,]+) weights {each}", said(net, lb.NestedDropout(groups=4)))
    assert found is not None
    assert int(found[1].replace(",", "")) == parameters(net)
    bnn = lb.convert(net, lb.NestedDropout(groups=4))
    for width, share in zip((0.25, 0.5, 0.75), found.groups()[1:], strict=True):
        removed = 1 - parameters(lb.slim.extract(bnn, width)) / parameters(net)
        assert abs(removed - int(share) / 100) <= 0.006


def test_one_message_counts_streams_by_reason():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
            self.gates = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.wide, self.back = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.read(x)
            for gate in self.gates:
                x = torch.sigmoid(gate(x))
            return self.head(torch.sigmoid(self.back(torch.relu(self.wide(x)))))

    text = said(Gated(), lb.NestedDropout(groups=4))
    assert text.count("\n") == 0
    assert (
        "5 of 7 streams are not ordered: 4 because the function sigmoid reads it, 1 because it is that of the" in text
    )


def test_a_reason_that_names_layers_is_said_once():
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            for block in self.blocks:
                x = torch.relu(block(x.to(block.weight.dtype)))
            return self.last(x)

    with pytest.raises(ValueError, match="8 of 8 streams cannot be ordered") as refused:
        lb.convert(Read(), lb.NestedDropout())
    assert "because the weights of 'blocks.0' (and others) are used outside of it" in str(refused.value)
    assert str(refused.value).count("are used outside of it") == 1


def test_networks_of_which_hardly_anything_can_go_are_refused():
    with pytest.raises(
        ValueError, match=r"can cut 10% of the weights, but the narrowest width would remove 0\.0% of the "
    ):
        lb.convert(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), lb.NestedDropout())
    narrow = nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 2), nn.ReLU(), nn.Linear(2, 3))
    with pytest.raises(
        ValueError, match=r"remove 0\.5% of the .*; NestedDropout\(min_cut=0\) converts it for the noise alone"
    ):
        lb.convert(narrow, lb.NestedDropout())
    assert units_of(lb.convert(narrow, lb.NestedDropout(min_cut=0)))
    assert units_of(lb.convert(narrow, lb.NestedDropout(), where="2"))  # layers that are named are not in question
    assert said(narrow, lb.NestedDropout(min_cut=0)) == ""


def test_a_network_that_cannot_be_traced_is_refused_with_the_line_and_the_cure():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls, self.a, self.b = nn.Parameter(torch.zeros(1, 1, 16)), nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, t: Tensor) -> Tensor:
            t = self.a(t)
            return self.b(torch.cat([self.cls.expand(len(t), -1, -1), t], 1)[:, 0])

    with pytest.raises(ValueError) as refused:
        lb.convert(Tokens(), lb.NestedDropout())
    text = str(refused.value)
    assert re.search(r"see line \d+ of test_nested_shares\.py, `return self\.b\(torch\.cat", text)
    assert "write x.shape[0] instead of len(x); lb.convert(..., example=inputs) follows the network by a pass" in text
    assert "such as lb.Rank1()" in text
    assert said(Tokens(), lb.NestedDropout(min_cut=0)) == ""


def test_files_of_networks_with_noise_alone_load(tmp_path):
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    bnn = lb.convert(net, lb.NestedDropout(min_cut=0))
    lb.save(bnn, tmp_path / "m.safetensors")
    assert lb.load(tmp_path / "m.safetensors", net)[0].method == bnn[0].method


def test_new_fields_are_kept_only_where_they_are_set():
    """Runs and files of earlier versions keep their names."""
    assert not {"min_cut", "inputs"} & set(lb.NestedDropout().fields())
    method = lb.NestedDropout(min_cut=0.2, inputs=[["", [2, 3], "float32"]])
    assert method.inputs == (("", (2, 3), "float32"),)
    assert lb.NestedDropout(**method.fields()) == method
    with pytest.raises(ValueError, match=r"expected inputs such as .* got 'x'"):
        lb.NestedDropout(inputs="x")
    with pytest.raises(ValueError, match="expected min_cut from 0 to below 1, got 1"):
        lb.NestedDropout(min_cut=1)
    with pytest.raises(TypeError, match="expected example inputs of tensors alone"):
        lb.convert(Residual(), lb.NestedDropout(), example=[X])


# ------------------------------------------------------------------------- norms with an activation


class NormAct(nn.BatchNorm2d):
    """A batch norm followed by an activation, as timm has it."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def with_norm_act(act: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), NormAct(8, act), nn.Conv2d(8, 6, 1), NormAct(6, act),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


@pytest.fixture
def norms_with_activation(monkeypatch):
    """Count them as norms."""
    same = family._same_map
    monkeypatch.setattr(family, "_same_map", lambda layer, kind: isinstance(layer, NormAct) or same(layer, kind))


@pytest.mark.usefixtures("norms_with_activation")
@pytest.mark.parametrize("fields", [{}, {"hard": False}], ids=["hard", "soft"])
def test_norms_with_an_activation_are_cut_exactly(fields):
    torch.manual_seed(0)
    bnn = unsettle(lb.convert(with_norm_act(nn.SiLU()), lb.NestedDropout(groups=4, **fields)))
    assert len(units_of(bnn)) == 2
    for width in (0.25, 0.5, 1.0):
        small = lb.slim.extract(bnn, width)
        with torch.no_grad(), lb.draws(bnn, mean=True, width=width):
            torch.testing.assert_close(small(X), bnn(X), atol=1e-5, rtol=1e-5)
    assert lb.slim.extract(bnn, 0.5)[3].num_features == 4
    with torch.no_grad(), lb.draws(bnn, seed=2):
        torch.testing.assert_close(lb.draw(bnn, seed=2)(X), bnn(X), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("norms_with_activation")
def test_norms_with_an_activation_are_trained():
    bnn = lb.convert(with_norm_act(nn.SiLU()), lb.NestedDropout(groups=4))
    lb.elbo(bnn, X, torch.tensor([0, 1, 2, 0, 1]), lb.Categorical(), num_data=5).loss.backward()
    assert all(p.grad is not None for p in bnn.parameters())
    assert bnn[3].running_mean.any()
    assert bnn[3].num_batches_tracked == 1
    assert isinstance(bnn[3].base.weight, nn.Parameter)


@pytest.mark.usefixtures("norms_with_activation")
def test_an_activation_that_fills_dropped_channels_holds_them():
    found = follow(with_norm_act(nn.Sigmoid()))
    layout = found.outputs["2"]
    assert layout is not None
    assert found.stream(layout[0].stream).held
