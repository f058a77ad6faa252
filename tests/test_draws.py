"""The meaning of a draw: seeds, components, rows, and the one stateful object."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import leanbayes as lb

from .networks import Nested, small_net


@pytest.fixture
def bnn():
    return lb.convert(Nested(), lb.Rank1(components=3)).eval()


X = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))


def test_the_same_draw_is_the_same_function_for_any_batch_and_order(bnn):
    with lb.draws(bnn, seed=0, index=4):
        whole = bnn(X)
        assert torch.equal(whole, bnn(X))
        torch.testing.assert_close(torch.cat([bnn(row[None]) for row in X]), whole)
        order = torch.randperm(7)
        torch.testing.assert_close(bnn(X[order]), whole[order])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("change", [{"seed": 1}, {"index": 5}, {"component": 2}])
def test_another_seed_index_or_component_is_another_function(bnn, change, shared):
    name = {"seed": 0, "index": 4, "shared": shared}
    with lb.draws(bnn, **name):
        first = bnn(X)
    with lb.draws(bnn, **name):
        assert torch.equal(bnn(X), first)
    with lb.draws(bnn, **(name | change)):
        assert not torch.allclose(bnn(X), first)


def test_draw_i_uses_component_i_mod_k(bnn):
    with lb.draws(bnn, seed=0, index=4):
        first = bnn(X)
    with lb.draws(bnn, seed=0, index=4, component=1):
        torch.testing.assert_close(bnn(X), first)


def test_without_a_seed_functions_and_components_vary():
    bnn = lb.convert(nn.Linear(2, 2), lb.BatchEnsemble(components=3))
    x = torch.ones(1, 2)
    seen = set()
    for _ in range(40):
        with lb.draws(bnn):
            seen.add(tuple(bnn(x)[0].tolist()))
    assert len(seen) == 3


def test_outside_draws_noise_is_per_row_and_fresh(bnn):
    x = X[:1].expand(6, -1)
    first, second = bnn(x), bnn(x)
    assert len({tuple(row.tolist()) for row in first}) == 6
    assert not torch.equal(first, second)


def test_outside_draws_torchs_global_seed_decides(bnn):
    torch.manual_seed(5)
    first = bnn(X)
    torch.manual_seed(5)
    assert torch.equal(bnn(X), first)


def test_seeded_noise_per_row_repeats_and_differs_between_rows(bnn):
    with lb.draws(bnn, seed=0, shared=False):
        whole = bnn(X)
        assert torch.equal(whole, bnn(X))
        assert bnn(X[:3]).shape == (3, 3)
        same = bnn(X[:1].expand(7, -1))
    assert len({tuple(row.tolist()) for row in same}) == 7


@pytest.mark.parametrize("rows", [4, 6, 8])
def test_a_row_uses_the_same_component_in_every_layer(rows):
    bnn = lb.convert(Nested(), lb.BatchEnsemble(components=4, init_spread=0.5)).eval()
    members = [lb.mean(bnn, component=k) for k in range(4)]
    x = torch.randn(rows, 6)
    y = bnn(x)
    component = bnn.stem[1].state.component.rows()
    torch.testing.assert_close(y, torch.stack([members[k](row[None])[0] for k, row in zip(component, x, strict=True)]))


def test_prediction_and_means_leave_torchs_generator_alone(bnn):
    before = torch.get_rng_state()
    lb.predict(bnn, X, samples=4)
    lb.mean(bnn)
    lb.draw(bnn)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_smaller_than_k_reach_every_component():
    bnn = lb.convert(nn.Linear(2, 1), lb.BatchEnsemble(components=4, init_spread=0.5))
    values = {round(bnn(torch.ones(1, 2)).item(), 5) for _ in range(60)}
    assert len(values) == 4


def test_a_component_out_of_range_is_refused(bnn):
    with pytest.raises(ValueError, match="expected a component from 0 to 2, got 3"), lb.draws(bnn, component=3):
        pass


def test_contexts_nest_and_restore_also_after_errors(bnn):
    layer = bnn.stem[1]
    with lb.draws(bnn, seed=0):
        outer = bnn(X)
        with pytest.raises(RuntimeError, match="boom"), lb.draws(bnn, seed=1):
            raise RuntimeError("boom")
        assert torch.equal(bnn(X), outer)
    assert not layer.state.fixed


def test_a_plain_model_has_nothing_to_fix():
    net = Nested()
    with lb.draws(net, seed=0):
        assert torch.equal(net(X), net(X))


def test_models_put_together_from_converted_parts_have_independent_noise():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (lb.convert(nn.Sequential(nn.Linear(6, 6)), lb.Rank1()) for _ in range(2))

        def forward(self, x):
            return self.b(self.a(x))

    both = Both()
    with lb.draws(both, seed=0):
        first = both(X)
        noise = [part[0].state.noise["0"][0] for part in (both.a, both.b)]
    assert not torch.equal(*noise)
    torch.testing.assert_close(lb.draw(both, seed=0)(X), first)
    assert lb.predict(both, X, samples=4).samples.shape[0] == 4


def test_a_submodule_called_alone_draws_for_its_own_rows():
    bnn = lb.convert(small_net(), lb.Rank1())
    bnn(torch.randn(4, 1, 8, 8))
    assert bnn[7](torch.randn(9, 6)).shape == (9, 4)
    x = torch.ones(2, 6)
    assert not torch.equal(bnn[7](x), bnn[7](x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_sees_the_same_noise(reentrant):
    class Checkpointed(Nested):
        keep = False

        def forward(self, x):
            if self.keep:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    bnn = lb.convert(Checkpointed(), lb.Rank1())
    x = X.clone().requires_grad_()
    gradients = []
    for keep in (False, True):
        bnn.keep = keep
        torch.manual_seed(3)
        gradients.append(
            torch.autograd.grad(bnn(x).sum(), [x, *bnn.parameters()]) if not reentrant else _backward(bnn, x)
        )
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def _backward(bnn, x):
    bnn.zero_grad()
    x.grad = None
    bnn(x).sum().backward()
    return [x.grad.clone(), *(p.grad.clone() for p in bnn.parameters())]


def test_channels_last_and_half_precision_weights_work():
    net = small_net().to(memory_format=torch.channels_last).eval()
    bnn = lb.convert(net, lb.Rank1())
    x = torch.randn(5, 1, 8, 8).to(memory_format=torch.channels_last)
    with lb.draws(bnn, seed=0):
        torch.testing.assert_close(lb.draw(bnn, seed=0)(x), bnn(x), atol=1e-5, rtol=1e-5)
    half = lb.convert(nn.Linear(4, 3).bfloat16(), lb.Rank1())
    assert half.posterior.input.loc.dtype == torch.float32
    assert half(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
    assert lb.draw(half).weight.dtype == torch.bfloat16
    assert lb.draw(half).bias.dtype == torch.bfloat16


@pytest.mark.parametrize("method", [lb.Rank1(), lb.NestedDropout(groups=4), lb.MeanField()], ids=lambda m: m.name)
def test_threads_that_share_a_model_get_their_own_draws(method):
    bnn = lb.convert(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)), method)
    x = torch.randn(16, 8)
    alone = [lb.predict(bnn, x, samples=4, seed=seed).mean for seed in range(4)]
    network = lb.draw(bnn, seed=1, index=2)(x)

    def right(job: int) -> bool:
        if job % 5 == 4:
            return torch.equal(lb.draw(bnn, seed=1, index=2)(x), network)
        return torch.equal(lb.predict(bnn, x, samples=4, seed=job % 4).mean, alone[job % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(60)))
    assert not torch.equal(bnn(x), bnn(x))  # nothing is left fixed


def test_a_model_may_make_draws_while_one_of_its_draws_is_fixed():
    bnn = lb.convert(nn.Linear(8, 3), lb.Rank1())
    x = torch.randn(5, 8)
    with lb.draws(bnn, seed=0, index=1):
        fixed = bnn(x)
        other = lb.draw(bnn, seed=0, index=2)(x)
        assert torch.equal(bnn(x), fixed)
    assert torch.equal(other, lb.draw(bnn, seed=0, index=2)(x))


def test_a_pass_that_failed_is_over():
    bnn = lb.convert(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), lb.Rank1())
    x = torch.randn(32, 8)
    with pytest.raises(RuntimeError):
        bnn(x.double())
    assert not torch.equal(bnn[0](x), bnn[0](x))
    assert bnn[0](x[:5]).shape == (5, 16)


def test_a_copy_does_not_take_the_noise_of_a_pass_with_it():
    bnn = lb.convert(nn.Linear(8, 3), lb.Rank1())
    bnn(torch.randn(5, 8))
    assert bnn.state.noise
    assert not copy.deepcopy(bnn).state.noise
