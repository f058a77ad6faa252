"""Noise of a pass: one pooled tensor of each kind; every layer reads its own, independent slice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.runtime.noise import fresh_noise, function_noise, NoisePool, NoiseSpec, pass_specs

CPU = torch.device("cpu")
ROWS = 4000


class Declares:
    """A layer that only declares noise."""

    device = CPU

    def __init__(self, path: str, *specs: NoiseSpec) -> None:
        self.path, self.specs = path, specs

    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return self.specs


LAYERS = [
    Declares("a", NoiseSpec("normal", (3,)), NoiseSpec("uniform", (2,))),
    Declares("b", NoiseSpec("normal", (2,)), NoiseSpec("normal", (4, 5), per_row=False)),
    Declares("c", NoiseSpec("seed", (1,)), NoiseSpec("uniform", (6,), per_row=False)),
    Declares("a", NoiseSpec("normal", (3,)), NoiseSpec("uniform", (2,))),  # shares the noise of its path
    Declares("point", NoiseSpec("normal", (0,))),
    Declares("none"),
]


def test_every_layer_gets_the_shapes_that_it_declares():
    noise = NoisePool(LAYERS).draw(7)
    shapes = {path: [tuple(part.shape) for part in parts] for path, parts in noise.items()}
    assert shapes == {"a": [(7, 3), (7, 2)], "b": [(7, 2), (1, 4, 5)], "c": [(7, 1), (1, 6)], "point": [(7, 0)]}
    assert noise["c"][0].dtype == torch.int64


def test_a_pass_draws_one_tensor_of_each_kind(monkeypatch):
    drawn = []
    for name in ("randn", "rand", "randint"):
        draw = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, draw=draw, name=name, **k: (drawn.append(name), draw(*a, **k))[1])
    NoisePool(LAYERS).draw(7)
    assert sorted(drawn) == ["rand", "rand", "randint", "randn", "randn"]


def test_noise_has_standard_moments_and_is_independent_between_layers_and_rows():
    torch.manual_seed(0)
    noise = NoisePool(LAYERS).draw(ROWS)
    normal = torch.cat([noise["a"][0], noise["b"][0]], 1).double()
    error = 1 / math.sqrt(ROWS)
    assert normal.mean(0).abs().max() < 5 * error
    assert (normal.var(0) - 1).abs().max() < 5 * math.sqrt(2) * error
    correlation = torch.corrcoef(normal.T) - torch.eye(5, dtype=torch.float64)
    assert correlation.abs().max() < 5 * error
    assert (normal[1:] * normal[:-1]).mean(0).abs().max() < 5 * error  # neighbouring rows
    uniform = noise["a"][1].double()
    assert (uniform.mean(0) - 0.5).abs().max() < 5 * error / math.sqrt(12)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert len(noise["c"][0].unique()) > 0.99 * ROWS


def test_the_pool_has_the_distribution_of_noise_drawn_layer_by_layer():
    torch.manual_seed(0)
    pooled = NoisePool(LAYERS).draw(ROWS)
    for layer in LAYERS[:3]:
        for spec, ours, theirs in zip(pass_specs(layer), pooled[layer.path], fresh_noise(layer, ROWS), strict=True):
            assert ours.shape == theirs.shape
            if spec.per_row and spec.kind != "seed":
                for q in (0.1, 0.5, 0.9):
                    density = {"uniform": 1.0, "normal": {0.5: 0.399}.get(q, 0.175)}[spec.kind]
                    error = math.sqrt(2 * q * (1 - q) / ROWS) / density
                    assert (ours.quantile(q, 0) - theirs.quantile(q, 0)).abs().max() < 5 * error


def test_named_noise_depends_on_its_name_and_path_alone():
    first = function_noise(LAYERS[1], [(0, 1, 0), (0, 2, 0)])
    again = function_noise(LAYERS[1], [(0, 2, 0)])
    other = function_noise(Declares("d", *LAYERS[1].specs), [(0, 2, 0)])
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a[1:], b)
        assert not torch.equal(b, c)


@pytest.mark.parametrize("method", [lb.Rank1(), lb.ImplicitNodes(), lb.MCDropout(), lb.ModelPatch(), lb.DropConnect()])
def test_passes_of_a_model_have_different_noise(method):
    torch.manual_seed(0)
    bnn, x = lb.convert(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), method), torch.ones(6, 4)
    first, second = bnn(x), bnn(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    once = bnn(x)
    torch.manual_seed(3)
    assert torch.equal(bnn(x), once)
