"""Work that runs once for all draws: never at the price of a draw that is not `lb.draw`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from leanbayes.core import batched, frozen

X = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))


class Counted(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        Counted.calls += 1
        return super().forward(x)


class Parts(nn.Module):
    """Modules that the networks below put together, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.act = Counted(8, 8), nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.ReLU(inplace=True), Counted(8, 8))
        self.last, self.head = Counted(8, 8), nn.Linear(8, 3)


class KeepsItsInput(Parts):
    """The block rectifies h in place; the residual adds the rectified one."""

    def forward(self, x):
        h = self.stem(x)
        return self.head(h + self.block(h))


class KeepsWhatNoModuleMade(Parts):
    def forward(self, x):
        h = self.stem(x) + 1
        return self.head(h + self.block(h))


class NamesItsArgument(Parts):
    def forward(self, x):
        h = [self.stem(x) - 0.5]
        y = self.rectify(given={"h": h})
        return self.head(h[0] + self.last(y))

    def __init__(self) -> None:
        super().__init__()
        self.rectify = Rectify()


class Rectify(nn.Module):
    """Finds its tensor in what it is given, and changes it."""

    def forward(self, given):
        return given["h"][0].relu_().square()


class ThroughAView(Parts):
    """A view is rectified, and what it is a view of with it."""

    def forward(self, x):
        h = self.stem(x)
        self.act(h.view(-1))
        return self.head(h + self.last(h))


class Overwrites(Parts):
    """A residual of torchvision's kind: in-place activations everywhere, a sum in place."""

    def forward(self, x):
        h = self.act(self.stem(x))
        y = self.last(h)
        y += h
        return self.head(self.act(y) + self.block(self.stem(h)))


class Preprocesses(Parts):
    """Changes its own inputs."""

    def forward(self, x):
        h = self.act(self.stem(x.sub_(0.5).div_(2.0)))
        return self.head(self.last(h) + x)


class ReadsWeights(Parts):
    """The stochastic layer is never called."""

    def forward(self, x):
        h = F.linear(self.stem(x), self.head.weight, self.head.bias)
        return self.last(F.pad(h, (0, 5)))


class ReadsThenCalls(Parts):
    def forward(self, x):
        h = F.linear(self.stem(x), self.head.weight, self.head.bias)
        return self.head(self.last(F.pad(h, (0, 5))))


class ReadsInside(Parts):
    """The weight is read by a module that contains no stochastic layer, but is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.back = Transposed()

    def forward(self, x):
        return self.head(self.last(self.back(self.stem(x)[:, :3], self.head)))


class Transposed(nn.Module):
    def forward(self, x, layer):
        return x @ layer.weight


class Pair(nn.Module):
    """Two modules."""

    def __init__(self, first, second) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


class Shares(Parts):
    """One module has two parents: both with a stochastic layer, or one of them replayed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = Pair(self.last, self.stem)
        self.before, self.after = Pair(self.last, self.head), Pair(self.last, self.head)

    def forward(self, x):
        h = self.alone(x) + self.last(2 * x)
        return self.before(h + self.after.first(h))


NETWORKS = [
    KeepsItsInput, KeepsWhatNoModuleMade, NamesItsArgument, ThroughAView, Overwrites, Preprocesses, ReadsWeights,
    ReadsThenCalls, ReadsInside, Shares,
]  # fmt: skip


@pytest.mark.parametrize("small", [0, batched.SMALL["cpu"]], ids=["draw by draw", "together"])
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_every_sample_is_its_draw_whatever_a_network_does_in_place(network, chunk_size, small, monkeypatch):
    monkeypatch.setitem(batched.SMALL, "cpu", small)
    bnn = lb.convert(network(), lb.Rank1(init_std=0.3), where="head")
    p = lb.predict(bnn, X, samples=5, chunk_size=chunk_size)
    for index in range(5):
        expected = lb.draw(bnn, index=index)(X.clone()).softmax(1)
        torch.testing.assert_close(p.samples[index], expected, atol=1e-6, rtol=1e-5)


class Stem(nn.Sequential):
    """Convolution, norm, in-place activation and pooling, then stages: as in torchvision."""

    def __init__(self) -> None:
        stages = [nn.Sequential(Counted(8, 8), nn.ReLU(inplace=True), Counted(8, 8)) for _ in range(3)]
        super().__init__(Counted(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), *stages, nn.Linear(8, 3))


def test_in_place_on_what_nobody_else_uses_costs_no_more_than_itself(monkeypatch):
    monkeypatch.setitem(batched.SMALL, "cpu", 0)
    bnn = lb.convert(Stem(), lb.Rank1(), where="6")
    Counted.calls = 0
    p = lb.predict(bnn, X, samples=8)
    assert Counted.calls == 7  # each once: again run only the norm, which was overwritten, and the activation
    torch.testing.assert_close(p.samples[7], lb.draw(bnn, index=7).eval()(X).softmax(1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode_changes_nothing(made_inside):
    bnn = lb.convert(nn.Sequential(nn.Flatten(), Overwrites()), lb.Rank1(), where="1.head")
    with torch.inference_mode():
        x = X.clone() if made_inside else X
        p = lb.predict(bnn, x, samples=4)
    q = lb.predict(bnn, x, samples=4)
    expected = torch.stack([lb.draw(bnn, index=index)(X).softmax(1) for index in range(4)])
    torch.testing.assert_close(p.samples, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(q.samples, expected, atol=1e-6, rtol=1e-5)


MODES = {
    "draw by draw": (0, {}),
    "stacked": (batched.SMALL["cpu"], {}),
    "noise per row": (0, {"noise": "activation"}),
    "tolerance": (0, {"tolerance": 1e9}),
    "paired": (0, {"design": "paired"}),
}


@pytest.mark.parametrize("mode", MODES)
def test_layers_before_the_first_stochastic_one_run_once_in_every_mode(mode, monkeypatch):
    small, options = MODES[mode]
    monkeypatch.setitem(batched.SMALL, "cpu", small)
    predictor = lb.Predictor(lb.convert(Stem(), lb.Rank1(), where=lb.layers.head()), samples=8, **options)
    for _ in range(2):
        Counted.calls = 0
        predictor(X)
        assert Counted.calls == 7


def test_factored_draws_run_the_layers_before_them_once():
    draws = lb.Predictor(lb.convert(Stem(), lb.Rank1(), where=lb.layers.head()), samples=8).tree
    Counted.calls = 0
    assert draws.run_together("factored", range(8), X).shape == (8, 20, 3)
    assert Counted.calls == 7


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_noise_per_row_does_not_depend_on_what_runs_once(network, monkeypatch):
    bnn = lb.convert(network(), lb.Rank1(init_std=0.3), where="head")
    once = lb.predict(bnn, X, samples=3, noise="activation").samples
    monkeypatch.setattr(frozen.PrefixCache, "_keep", lambda *_: None)
    torch.testing.assert_close(lb.predict(bnn, X, samples=3, noise="activation").samples, once, atol=0, rtol=0)
