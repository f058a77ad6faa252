"""Tracing without a global patch: other threads continue, the network stays unchanged, parts are followed alone."""

from __future__ import annotations

import math
import sys
import threading

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.layers.channels import follow
from leanbayes.layers.streams import Channels


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), *layers, nn.ReLU(), nn.Linear(16, 3))


def held(found: Channels, path: str) -> str:
    layout = found.outputs[path]
    assert layout is not None
    return found.stream(layout[0].stream).held


# ------------------------------------------------------------------------- threads


@pytest.fixture
def served():
    """Let another thread call a plain network all the time, and return its errors."""
    stop, errors, net, calls = threading.Event(), [], mlp(nn.Dropout(0.5)), [0]

    def serve() -> None:
        while not stop.is_set():
            try:
                net(torch.zeros(2, 8))
                calls[0] += 1
            except Exception as error:
                errors.append(error)
                return

    usual, thread = sys.getswitchinterval(), threading.Thread(target=serve)
    sys.setswitchinterval(1e-5)
    thread.start()
    yield errors
    stop.set()
    thread.join()
    sys.setswitchinterval(usual)
    assert calls[0]
    assert not errors


@pytest.mark.usefixtures("served")
def test_other_threads_go_on_while_a_nested_network_is_converted_loaded_and_cut(tmp_path):
    file = tmp_path / "model.safetensors"
    for _ in range(4):
        bnn = lb.convert(mlp(), lb.NestedDropout(groups=4))
        lb.save(bnn, file)
        lb.load(file, mlp())
        lb.slim.extract(bnn, 0.5)
        lb.slim.usage(bnn)
        lb.convert(Cls(), lb.NestedDropout(groups=4), example=torch.zeros(2, 3, 8))


@pytest.mark.usefixtures("served")
def test_other_threads_go_on_while_a_network_with_dropout_is_drawn():
    bnn = lb.convert(mlp(nn.Dropout(0.5)), lb.MCDropout())
    for index in range(8):
        lb.draw(bnn, index=index)


def test_networks_of_two_threads_are_converted_at_a_time():
    found, errors = [], []

    def convert() -> None:
        try:
            found.extend(len(follow(mlp()).makers) for _ in range(10))
        except Exception as error:
            errors.append(error)

    usual, threads = sys.getswitchinterval(), [threading.Thread(target=convert) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(usual)
    assert not errors
    assert found == [3] * 20


# ------------------------------------------------------------------------- what stays


class Counting(nn.Module):
    """A network that keeps count in a buffer, and registers its subclasses."""

    subclasses: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        Counting.subclasses.append(cls.__name__)

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.body(x + torch.rand(()))


@pytest.mark.parametrize("example", [None, torch.ones(2, 8)], ids=["traced", "recorded"])
def test_following_changes_nothing(example):
    net = Counting()
    kinds, state = [type(module) for module in net.modules()], torch.get_rng_state()
    follow(net, example=example)
    if example is not None:  # on proxies the function itself runs once, as it does in torch.fx
        assert torch.equal(torch.get_rng_state(), state)
    assert net.calls == 0
    assert [type(module) for module in net.modules()] == kinds
    assert Counting.subclasses == []
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_sizes_are_numbers_for_mathematical_functions_and_values_are_not():
    class Scaled(nn.Module):
        def __init__(self, size) -> None:
            super().__init__()
            self.first, self.last, self.size = nn.Linear(8, 16), nn.Linear(16, 3), size

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) / math.sqrt(self.size(x)))

    assert not follow(Scaled(lambda x: x.shape[1] * 2)).untraced
    assert "float" in follow(Scaled(lambda x: x.sum())).untraced[""]


def test_optional_inputs_are_followed_as_torch_fx_does():
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, *inputs: Tensor, scale: Tensor | None = None) -> Tensor:
            y = self.first(inputs[0] + inputs[1])
            return self.last(y if scale is None else y * scale)

    assert held(follow(Optional()), "first") == "it is added to something of another layout"


# ------------------------------------------------------------------------- parts


class Attention(nn.Module):
    """Heads, made as Hugging Face's models do: sizes are unpacked."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.size = width // heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        shape = (*x.shape[:-1], -1, self.size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1)), None


class TanhGelu(nn.Module):
    """An activation that adds a number: zero of zero all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.norm, self.act = attention or Attention(), nn.LayerNorm(8), TanhGelu()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        x = x + self.attention(x, **options)[0]
        return x + self.down(self.act(self.up(self.norm(x))))


class Cls(nn.Module):
    """Patches, a token in front of them, blocks in a list, and a batch size that is a length."""

    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.token, self.patches = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 8)
        self.blocks, self.head = nn.ModuleList([Block(attention), Block(attention)]), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[-1] != 8:
            raise ValueError("expected 8 features")
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask=mask)
        return self.head(x[:, 0])


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def test_a_network_that_cannot_be_traced_is_followed_in_parts():
    found = follow(Cls())
    assert set(found.untraced) == {"", "blocks.0.attention", "blocks.1.attention"}
    assert found.makers == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert [held(found, path) for path in found.makers] == ["", "it is added to something of another layout"] * 2
    assert found.first == "patches"


def test_an_example_shows_heads_of_attention():
    found = follow(Cls(), example=X)
    assert not found.untraced
    for k in (0, 1):
        roots = {found.root(found.outputs[f"blocks.{k}.attention.{name}"][0].stream) for name in "qkv"}
        assert len(roots) == 1
        assert found.root(found.inputs[f"blocks.{k}.attention.out"][0].stream) in roots
        stream = found.stream(roots.pop())
        assert (stream.block, stream.held) == (2, "")
        assert held(found, f"blocks.{k}.up") == ""
    assert found.scores == {f"blocks.{k}.attention.{name}" for k in (0, 1) for name in "qk"}


@pytest.mark.parametrize("example", [None, X], ids=["parts", "recorded"])
def test_followed_networks_are_cut_exactly(example, tmp_path):
    bnn = lb.convert(Cls(), lb.NestedDropout(groups=4), example=example).eval()
    lb.save(bnn, tmp_path / "model.safetensors")
    bnn = lb.load(tmp_path / "model.safetensors", Cls()).eval()
    sizes = []
    for width in (0.25, 0.5, 1.0):
        small = lb.slim.extract(bnn, width)
        with torch.no_grad(), lb.draws(bnn, mean=True, width=width):
            torch.testing.assert_close(small(X), bnn(X), atol=1e-5, rtol=1e-5)
        sizes.append((small.blocks[0].up.out_features, small.blocks[1].attention.v.out_features))
    assert sizes == [(3, 2 if example is not None else 8), (6, 4 if example is not None else 8), (12, 8)]
    with torch.no_grad(), lb.draws(bnn, seed=1):
        torch.testing.assert_close(lb.draw(bnn, seed=1)(X), bnn(X), atol=1e-5, rtol=1e-5)


def test_a_mask_for_each_head_holds_heads():
    mask = torch.zeros(3, 4, 6, 6)
    found = follow(Cls(), example={"x": X, "mask": mask})
    assert held(found, "blocks.0.attention.v") == "the function scaleddotproductattention reads heads of attention"
    assert not held(follow(Cls(), example={"x": X, "mask": mask[:, :1]}), "blocks.0.attention.v")


def test_a_module_that_is_reached_into_from_outside_is_held():
    class Reaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block.up(x[: len(x)]).sum(1))

    assert "may use it" in held(follow(Reaching()), "block.up")
    assert held(follow(Reaching(), example=X), "block.up") == ""
