"""Noise goes to the rows it belongs to, wherever a layer has them, and a weight that is read is the drawn one."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.runtime.rows import Layout

LAYER_METHODS = {
    "rank1": lb.Rank1(),
    "batch_ensemble": lb.BatchEnsemble(),
    "implicit": lb.ImplicitNodes(),
    "patch": lb.ModelPatch(patch=("*",)),
    "variance": lb.VarianceLayers(init_log_alpha=0.0),
    "mean_field": lb.MeanField(init_std=0.1),
    "flipout": lb.MeanField(init_std=0.1, estimator="flipout"),
    "dropconnect": lb.DropConnect(rate=0.3),
    "mc_dropout": lb.MCDropout(rate=0.3),
}
ROW_METHODS = {name: LAYER_METHODS[name] for name in ("rank1", "batch_ensemble", "implicit", "flipout", "mc_dropout")}


class Pair(nn.Module):
    """Two frames on the batch axis, as an optical flow network has them."""

    def __init__(self):
        super().__init__()
        self.enc, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, a, b):
        one, two = self.enc(torch.cat([a, b])).chunk(2)
        return self.out(torch.tanh(one)), self.out(torch.tanh(two))


class TimeFirst(nn.Module):
    """Attention that calls its maps time-first, as Longformer does."""

    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.q(x.transpose(0, 1)).transpose(0, 1)))


class Table(nn.Module):
    """A map of relative positions, which sees no rows, as in Swin v2."""

    def __init__(self, positions=27):
        super().__init__()
        self.mlp, self.out = nn.Linear(2, 8), nn.Linear(8, 3)
        self.register_buffer("at", torch.randn(positions, 2))

    def forward(self, x):
        return self.out(x + self.mlp(self.at).mean(0))


class Windows(nn.Module):
    """Rows cut into windows, (B, T, d) -> (B T/2, 2, d), as in Swin."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        windows = self.qkv(x.reshape(-1, 2, 8))
        return self.out(windows.reshape(x.shape).mean(1))


class Queries(nn.Module):
    """Learned queries, the same for all rows, repeated for each of them."""

    def __init__(self):
        super().__init__()
        self.register_parameter("queries", nn.Parameter(torch.randn(1, 5, 8)))
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.q(self.queries.expand(len(x), -1, -1)) + x[:, None])


class Graph(nn.Module):
    """Rows are the nodes of one graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        return self.b(torch.relu(edges @ self.a(x)))


class Samples(nn.Module):
    """A network that draws random numbers in eval mode, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(h + torch.randn_like(h))


class Masked(nn.Module):
    """A mask over tokens, (T, T), which is no batch where T is the number of rows."""

    def __init__(self):
        super().__init__()
        self.v, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        return self.out(mask @ self.v(x))


def layouts(net, *inputs, method=None, **options):
    torch.manual_seed(0)
    bnn = lb.convert(net, method or lb.Rank1(), **options)
    bnn(*inputs)
    return {path: layer.layout for path, layer in lb.stochastic_layers(bnn)}


ROWS, NONE = Layout(0), Layout(None)


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_layouts_are_found_in_the_first_pass(rows):
    x, tokens = torch.randn(rows, 8), torch.randn(rows, 8, 8)
    assert layouts(Pair(), x, x) == {"enc": Layout(0, tiled=True), "out": ROWS}
    assert layouts(TimeFirst(), tokens) == {"q": Layout(1), "out": ROWS}
    assert layouts(Table(), x) == layouts(Table(rows), x) == layouts(Table(4 * rows), x) == {"mlp": NONE, "out": ROWS}
    assert layouts(Windows(), tokens) == {"qkv": ROWS, "out": ROWS}
    assert layouts(Queries(), x) == {"q": ROWS, "out": ROWS}
    assert layouts(Samples(), x) == {"a": ROWS, "b": ROWS}
    assert layouts(Masked(), torch.randn(rows, rows, 8), torch.rand(rows, rows).tril()) == {"v": ROWS, "out": ROWS}


@pytest.mark.parametrize("method", ROW_METHODS.values(), ids=ROW_METHODS.keys())
def test_the_entries_of_a_row_share_its_noise(method):
    torch.manual_seed(0)
    x = torch.randn(1, 8).expand(4, -1)
    one, two = lb.convert(Pair(), method, where="enc")(x, x)
    torch.testing.assert_close(one, two)  # the same image of the same example
    assert (one[0] - one[1]).abs().max() > 1e-4  # of another example
    y = lb.convert(TimeFirst(), method, where="q")(torch.ones(4, 8, 8))
    assert y.std(1).max() < 1e-6 < 1e-4 < y.std(0).max()


@pytest.mark.parametrize("method", LAYER_METHODS.values(), ids=LAYER_METHODS.keys())
def test_a_layer_that_sees_no_rows_trains(method):
    torch.manual_seed(0)
    bnn = lb.convert(Table(), method)
    lb.elbo(bnn, torch.randn(4, 8), torch.arange(4) % 3, num_data=100).loss.backward()
    assert ("one draw per batch" in str(lb.summary(bnn))) == bnn.mlp.row_noise
    assert all(p.grad is not None for p in bnn.mlp.posterior.parameters())


def test_one_draw_per_batch_uses_every_component_in_turn():
    torch.manual_seed(0)
    bnn = lb.convert(Table(), lb.BatchEnsemble(components=3))
    x, y = torch.randn(6, 8), torch.arange(6) % 3
    used = torch.zeros(3)
    for _ in range(40):
        bnn.zero_grad()
        lb.elbo(bnn, x, y, num_data=100, tile=True).loss.backward()
        used += bnn.mlp.posterior.input.loc.grad.abs().sum(1) > 0
    assert used.sum() == 40
    assert used.min() > 3


def test_mixed_rows_are_one_draw_and_are_said():
    torch.manual_seed(0)
    bnn = lb.convert(Graph(), lb.Rank1())
    x, edges = torch.randn(5, 8), torch.rand(5, 5)
    with pytest.warns(UserWarning, match="mixed or left out before layer 'b'"):
        bnn(x, edges)
    assert bnn.a.layout == bnn.b.layout == NONE
    same = torch.ones(5, 8), torch.ones(5, 5)
    assert bnn(*same).std(0).max() < 1e-6


def test_the_probe_leaves_no_trace():
    class Counts(TimeFirst):
        def __init__(self):
            super().__init__()
            self.norm, self.calls, self.seen = nn.BatchNorm1d(3), 0, []

        def forward(self, x):
            self.calls += 1
            return self.norm(super().forward(x).mean(1))

    torch.manual_seed(0)
    net = Counts()
    seen = []
    net.q.register_forward_hook(lambda *_: seen.append(1))
    bnn, x = lb.convert(net, lb.Rank1()), torch.randn(4, 5, 8)
    known = copy.deepcopy(bnn)
    torch.manual_seed(1)
    y = bnn(x)
    state = torch.get_rng_state()
    assert (bnn.calls, len(seen), bnn.training, int(bnn.norm.num_batches_tracked)) == (1, 1, True, 1)
    for _, layer in lb.stochastic_layers(known):
        layer.layout = bnn.get_submodule(layer.path).layout
        layer.state.rows_known = True
    torch.manual_seed(1)
    assert torch.equal(known(x), y)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_example_shows_the_rows_and_the_layers_that_are_not_used():
    class Spare(TimeFirst):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(8, 8)

    bnn = lb.convert(Spare(), lb.Rank1(), example=torch.randn(4, 6, 8))
    assert (bnn.q.layout, bnn.out.layout) == (Layout(1), ROWS)
    assert (bnn.q.used, bnn.spare.used) == (True, False)
    assert "rank1 (not used in eval mode)" in str(lb.summary(bnn))
    assert lb.convert(Pair(), lb.Rank1(), example=(torch.randn(3, 8), torch.randn(3, 8))).enc.layout.tiled
    with pytest.raises(ValueError, match="at least two rows"):
        lb.convert(TimeFirst(), lb.Rank1(), example=torch.randn(1, 6, 8))


def test_the_caller_may_say_where_the_rows_are():
    tokens = torch.randn(4, 8, 8)
    assert layouts(TimeFirst(), tokens, batch_axis={"q": None})["q"] == NONE
    assert layouts(TimeFirst(), tokens, batch_axis={"q": 1, "out": 0}) == {"q": Layout(1), "out": ROWS}
    with pytest.raises(ValueError, match="batch_axis='nothing' matches no converted layer"):
        lb.convert(TimeFirst(), lb.Rank1(), batch_axis={"nothing": 1})
    with pytest.raises(ValueError, match="to be an axis from 0 on, or None, got 'time'"):
        lb.convert(TimeFirst(), lb.Rank1(), batch_axis={"q": "time"})


def test_a_network_that_cannot_be_probed_is_refused_where_shapes_leave_a_doubt():
    class Once(TimeFirst):
        batches = 4

        def forward(self, x):
            if "cannot" in vars(self) and not self.training:
                raise RuntimeError("in training only")
            return super().forward(x)

    net = Once()
    net.cannot = True
    bnn = lb.convert(net, lb.Rank1())
    with pytest.raises(ValueError, match=r"layer 'q' got an input of shape \(8, 4, 8\).*batch_axis=\{'q': 1\}.*where="):
        bnn(torch.randn(4, 8, 8))
    with lb.draws(bnn, seed=0):
        assert bnn(torch.randn(4, 8, 8)).shape == (4, 8, 3)


class Reads(nn.Module):
    """Reads weights instead of calling layers, as Swin and BEiT do; with a region of checkpointing on request."""

    checkpointed = False

    def __init__(self):
        super().__init__()
        self.a, self.conv, self.b = nn.Linear(8, 16), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(16, 3)

    def body(self, x):
        h = F.linear(x, self.a.weight, self.a.bias).tanh()
        return F.conv1d(h.view(-1, 4, 4), self.conv.weight, self.conv.bias, padding=1).flatten(1).tanh()

    def forward(self, x):
        assert self.a.weight.dtype == x.dtype
        return self.b(checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x))


@pytest.mark.parametrize("method", LAYER_METHODS.values(), ids=LAYER_METHODS.keys())
def test_a_weight_that_is_read_is_the_drawn_one(method):
    torch.manual_seed(0)
    bnn, x = lb.convert(Reads().eval(), method).eval(), torch.randn(4, 8)
    with torch.no_grad():
        for index in range(3):
            with lb.draws(bnn, seed=0, index=index):
                pass_ = bnn(x)
            torch.testing.assert_close(pass_, lb.draw(bnn, seed=0, index=index)(x), rtol=1e-5, atol=1e-6)
        assert (bnn(x) - bnn(x)).abs().max() > 1e-5
    for _ in range(12):  # components and masks take turns
        bnn(x).square().mean().backward()
    assert all(p.grad is not None for layer in (bnn.a, bnn.conv) for p in layer.posterior.parameters())
    names = dict(bnn.named_parameters())
    bnn(x)
    assert dict(bnn.named_parameters()).keys() == names.keys()
    assert bnn.a.weight is bnn.a.base.weight  # outside a pass, the parameter
    assert bnn.a.bias is bnn.a.base.bias


def test_reads_in_a_checkpointed_region_have_the_gradients_without_it():
    for method in (lb.Rank1(), lb.MeanField(init_std=0.1)):
        torch.manual_seed(0)
        bnn, x = lb.convert(Reads(), method), torch.randn(4, 8)
        found = []
        for bnn.checkpointed in (False, True):
            bnn.zero_grad()
            torch.manual_seed(1)
            (bnn(x).square().mean() + bnn(x).mean()).backward()
            found.append([p.grad.clone() for p in bnn.parameters() if p.grad is not None])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_compiled_reads_are_drawn():
    torch.manual_seed(0)
    bnn, x = lb.convert(Reads().eval(), lb.Rank1()), torch.randn(4, 8)
    bnn(x)
    fast = torch.compile(bnn, fullgraph=True, backend="aot_eager")
    assert not torch.equal(fast(x), fast(x))
    with lb.draws(bnn, seed=1):
        torch.testing.assert_close(fast(x), bnn(x))


def test_the_members_of_an_ensemble_are_probed_each():
    members = [lb.convert(Windows(), lb.Rank1()) for _ in range(2)]
    x, y = torch.randn(4, 8, 8), torch.arange(4) % 3
    lb.elbo(lb.Ensemble(members), x, y, num_data=100).loss.backward()
    assert [member.qkv.layout for member in members] == [ROWS, ROWS]


def test_no_warning_where_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for net, inputs in ((Pair(), (torch.randn(4, 8),) * 2), (Windows(), (torch.randn(4, 8, 8),))):
            lb.convert(net, lb.Rank1())(*inputs)


@pytest.mark.parametrize("method", [lb.Rank1(), lb.ImplicitNodes(), lb.BatchEnsemble(), lb.MCDropout(rate=0.1)])
def test_an_empty_batch_passes_as_in_the_plain_network(method):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(2), nn.Linear(36, 2))
    bnn = lb.convert(net, method)
    y = bnn(torch.zeros(0, 3, 8, 8))
    assert y.shape == (0, 4, 2)
    (y.sum() + lb.kl(bnn)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in bnn.parameters())
