"""Nested dropout in use: gradients, the order that training finds, files, compilation, precisions, `fit`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods.nested.layer import NestedLayer, NestedNorm
from tests.needs import need_torch
from tests.slim.networks import CASES, Residual, residual, set_keep_logits, units_of, unsettle, X


def normed(**fields) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    )  # fmt: skip
    bnn = lb.convert(net, lb.NestedDropout(groups=4, **fields))
    set_keep_logits(bnn, -0.5, 0.5)
    return bnn


def likelihood_gradient(bnn: nn.Module) -> Tensor:
    torch.manual_seed(1)
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    bnn[3].get_parameter("base.bias" if isinstance(bnn[3], NestedNorm) else "bias").data.fill_(0.5)
    sum(F.cross_entropy(bnn(x), y) for _ in range(4)).backward()  # one mask may be flat for some group
    gradient = units_of(bnn)[0].keep_logits.grad
    assert gradient is not None
    return gradient


def test_keep_probabilities_learn_from_the_likelihood_behind_a_norm():
    for hard in (True, False):
        gradient = likelihood_gradient(normed(hard=hard))
        assert gradient.isfinite().all()
        assert (gradient.abs() > 1e-5).all()


def test_in_front_of_a_norm_soft_masks_would_learn_nothing():
    """The reason why masks follow norms: a norm divides the size of its input out again."""
    behind, in_front = normed(hard=False), normed(hard=False)
    in_front[2].masked, in_front[3] = True, in_front[3].base
    for norm in (behind[3].base, in_front[3]):
        norm.eps = 1e-12
    assert likelihood_gradient(in_front).abs().max() < 1e-4 * likelihood_gradient(behind).abs().max()


def test_every_parameter_gets_a_gradient():
    for name in CASES:
        torch.manual_seed(0)
        bnn = lb.convert(CASES[name].make(), lb.NestedDropout(groups=3))
        x = CASES[name].inputs(6)
        (bnn(x).square().sum() + lb.kl(bnn)).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters()), name


def test_several_draws_of_a_batch_have_a_mask_each():
    bnn = residual()
    set_keep_logits(bnn, -2, 0)
    calls = []
    bnn.norm.register_forward_hook(lambda layer, args, y: calls.append(layer.factors().sum().item()))
    terms = lb.elbo(bnn, X, torch.randint(3, (5,)), num_data=5, samples=20)
    assert len(calls) == 20
    assert len(set(calls)) > 1
    assert terms.outputs.shape == (100, 3)


def decoder_of(x: Tensor, steps: int, method: lb.NestedDropout | None) -> Tensor:
    """Train a linear autoencoder and return the columns of its decoder, one after the other."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(64, 10, bias=False), nn.Linear(10, 64, bias=False))
    net = net if method is None else lb.convert(net, method)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = x[torch.randint(len(x), (256,))]
        optimizer.zero_grad()
        (net(rows) - rows).square().mean().backward()
        optimizer.step()
        schedule.step()
    return net[1].weight.detach().T


@pytest.mark.slow  # 3,000 steps; the order of masks is that of test_nested.py
def test_nested_dropout_of_a_linear_autoencoder_finds_the_principal_components_in_order():
    """Rippel et al. (2014): where every truncation is optimal, D_k E_k projects on k components, for all k.

    Differences of neighbours are d_k e_k = u_k u_k^T. So without any constraint the k-th column of the decoder points
    along the k-th component; no Gram-Schmidt is needed. Without masks only what they span together is found.
    """
    from sklearn.datasets import load_digits

    x = torch.tensor(load_digits().data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std()
    components = torch.linalg.svd(x, full_matrices=False).Vh[:5]
    fixed = {"tail": "geometric", "prior_keep": 0.8, "weight_noise": False, "rescale": False}
    nested = decoder_of(x, 3000, lb.NestedDropout(groups=10, first=True, **fixed))
    plain = decoder_of(x, 300, None)
    assert (F.cosine_similarity(nested[:5], components).abs() > 0.95).all()
    assert (F.cosine_similarity(plain[:5], components).abs() < 0.8).any()


# ------------------------------------------------------------------------- round trips


def test_round_trips_keep_every_draw_and_what_is_shared(tmp_path):
    bnn = unsettle(residual())
    expected = lb.draw(bnn, seed=2, index=1)(X)
    fresh = residual().eval()
    fresh.load_state_dict(bnn.state_dict())
    lb.save(bnn, tmp_path / "whole.safetensors")
    lb.save(bnn, tmp_path / "posterior.safetensors", only="posterior")
    plain = Residual().eval()
    plain.load_state_dict(lb.mean(bnn).state_dict())
    twins = {
        "state dict": fresh,
        "file": lb.load(tmp_path / "whole.safetensors", Residual()).eval(),
        "file of the posterior": lb.load(tmp_path / "posterior.safetensors", plain).eval(),
        "pickle": pickle.loads(pickle.dumps(bnn)),
        "copy": copy.deepcopy(bnn),
    }
    for name, twin in twins.items():
        assert torch.equal(lb.draw(twin, seed=2, index=1)(X), expected), name
        assert len(units_of(twin)) == 2, name
        assert twin.skip.posterior.order is twin.outer.posterior.order is twin.last.posterior.orders["0"], name
        assert twin.skip.posterior.order.state is twin.outer.state is not bnn.outer.state, name
        torch.testing.assert_close(lb.slim.extract(twin, 0.5)(X), lb.slim.extract(bnn, 0.5)(X))


@pytest.mark.parametrize(
    "convert",
    [
        lambda net: lb.convert(net, lb.NestedDropout(groups=3, weight_noise=False)),
        lambda net: lb.convert(net, lb.NestedDropout(groups=3), where=["inner", "norm", "head"]),
        lambda net: lb.convert(net, lb.NestedDropout(groups=3, streams="inner", first=True)),
        lambda net: lb.convert(
            lb.convert(net, lb.NestedDropout(groups=3), where=["inner", "norm"]), lb.Rank1(components=2), where="s*"
        ),
    ],
    ids=["no noise", "where", "inner", "chain"],
)
def test_partial_and_chained_conversions_are_loaded_again(convert, tmp_path):
    torch.manual_seed(0)
    bnn = unsettle(convert(Residual()))
    lb.save(bnn, tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", Residual()).eval()
    for index in range(2):
        assert torch.equal(lb.draw(loaded, index=index)(X), lb.draw(bnn, index=index)(X))
    assert [path for path, _ in lb.stochastic_layers(loaded)] == [path for path, _ in lb.stochastic_layers(bnn)]
    assert len(units_of(loaded)) == len(units_of(bnn))


def test_a_plain_checkpoint_loads_and_only_posterior_keys_are_missing():
    bnn, other = residual().eval(), unsettle(Residual())
    result = bnn.load_state_dict(other.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(".posterior." in key for key in result.missing_keys)
    torch.testing.assert_close(lb.mean(bnn)(X), other(X), atol=1e-5, rtol=1e-5)


def test_the_summary_names_layers_and_what_they_cost():
    bnn = residual()
    said = lb.summary(bnn)
    kinds = {row.path: row.method for row in said.rows}
    assert kinds == dict.fromkeys(("stem", "skip", "inner", "norm", "outer", "last", "head"), "nested")
    weights = sum(layer.base.weight.numel() for _, layer in lb.stochastic_layers(bnn) if isinstance(layer, NestedLayer))
    assert said.nodes == weights + 4 + 4  # and a mask over four groups for each of two streams
    assert said.headline.startswith("nested: 100.0 % of the weights, 7 of 7 linear maps and norms")


# ------------------------------------------------------------------------- compilation and precision


@pytest.mark.parametrize("fields", [{}, {"hard": False, "weight_noise": False}], ids=str)
def test_a_compiled_network_gives_the_eager_numbers_without_recompiling(fields):
    need_torch("2.11", "dynamo of 2.5 compiles it again and again; 2.11 does not, those between were not tried")
    dynamo.reset()
    bnn = residual(**fields)
    compiled = torch.compile(bnn, fullgraph=True, backend="aot_eager")
    losses = []
    for index in range(12):  # in training mode, with fresh noise and the statistics of norms changing
        with dynamo.config.patch(error_on_recompile=index > 0):
            loss = compiled(X).square().mean()
            loss.backward()
        losses.append(loss.item())
    assert len(set(losses)) == 12
    assert all(unit.keep_logits.grad.abs().sum() > 0 for unit in units_of(bnn))
    dynamo.reset()
    bnn.eval()
    for index in range(12):
        with lb.draws(bnn, seed=0, index=index), dynamo.config.patch(error_on_recompile=index > 0):
            torch.testing.assert_close(compiled(X), bnn(X), atol=1e-5, rtol=1e-5)
    dynamo.reset()


def test_autocast_and_double_precision():
    bnn = residual()
    with torch.autocast("cpu", torch.bfloat16):
        y = bnn(X)
    assert y.dtype == torch.bfloat16
    (y.float().square().mean() + lb.kl(bnn)).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in bnn.parameters())
    torch.manual_seed(0)
    double = unsettle(lb.convert(Residual().double(), lb.NestedDropout(groups=4)))
    x = X.double()
    assert double(x).dtype == torch.float64
    assert lb.kl(double).dtype == torch.float32
    for width in (None, 0.5):
        with torch.no_grad(), lb.draws(double, seed=1, width=width):
            expected = double(x)
        torch.testing.assert_close(lb.draw(double, seed=1, width=width)(x), expected, atol=1e-6, rtol=1e-6)


def test_activation_checkpointing_sees_the_same_masks():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            if torch.fx.Proxy in type(x).__mro__:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=False)

    gradients = []
    for kind in (Residual, Checkpointed):
        torch.manual_seed(0)
        bnn = lb.convert(kind(), lb.NestedDropout(groups=4)).eval()
        set_keep_logits(bnn)
        torch.manual_seed(7)
        bnn(X).square().sum().backward()
        gradients.append([p.grad for p in bnn.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------- fit


class Stop(Exception):
    """Raised by a callback, as an interruption would be."""


def stop(state) -> None:
    raise Stop


def test_fit_learns_digits_and_resumes_bit_by_bit(tmp_path):
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 10),
        )  # fmt: skip
        return lb.convert(net, lb.NestedDropout(groups=8))

    recipe = lb.Recipe(epochs=2, batch_size=64, lr=0.05, beta=1e-3, accelerator="cpu")
    unbroken, broken, resumed = fresh(), fresh(), fresh()
    history = lb.fit(unbroken, (x, y), recipe, progress=False)
    assert history[1]["nll"] < history[0]["nll"] < 2.3
    with pytest.raises(Stop):
        lb.fit(broken, (x, y), recipe, folder=tmp_path, callbacks=[stop], progress=False)
    torch.randn(99)
    lb.fit(resumed, (x, y), recipe, folder=tmp_path, resume=True, progress=False)
    ours, theirs = resumed.state_dict(), unbroken.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not units_of(unbroken)[0].keep_logits.eq(3).all()
    small = lb.slim.extract(unbroken.eval(), 0.75, data=x[:1024])
    assert (small(x).argmax(1) == y).float().mean() > 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tail": "normal"}, "expected tail to be one of learned, geometric, categorical, got 'normal'"),
        ({"streams": "outer"}, "expected streams to be one of all, inner, got 'outer'"),
        ({"temperature": 0.0}, "temperature"),
        ({"weight_cost": -1.0}, "weight_cost"),
        ({"always_on": 0}, "expected always_on from 1 to groups=32, got 0"),
        ({"groups": 4, "always_on": 5}, "expected always_on from 1 to groups=4, got 5"),
        ({"prior_keep": 1.0}, r"expected prior_keep between 0 and 1, got 1\.0"),
        ({"init_keep": 0.0}, r"expected init_keep between 0 and 1, got 0\.0"),
    ],
)
def test_wrong_fields_say_what_was_expected(fields, message):
    with pytest.raises(ValueError, match=message):
        lb.NestedDropout(**fields)


def test_a_network_that_cannot_be_traced_is_refused():
    class Branching(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.mean() > 0 else super().forward(-x)

    with pytest.raises(ValueError, match=r"cannot be traced, see line \d+ of test_nested_training\.py"):
        lb.convert(Branching(), lb.NestedDropout())
