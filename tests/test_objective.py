"""The bound: its terms, its scaling, tiling, samples, aggregation and wrong inputs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import leanbayes as lb
from leanbayes.core.objective import linear_beta
from leanbayes.runtime.passes import assign_rows

from .networks import small_net, Tokens

X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 0, 1])


def members(bnn, x):
    """Outputs of every component's posterior means (K, B, C)."""
    count = bnn[0].components
    return torch.stack([lb.mean(bnn, component=k).eval()(x) for k in range(count)])


@pytest.fixture
def ensemble():
    return lb.convert(small_net().eval(), lb.BatchEnsemble(components=3, init_spread=0.5)).eval()


def test_loss_is_nll_plus_beta_kl_over_n():
    bnn = lb.convert(small_net(), lb.Rank1())
    terms = lb.elbo(bnn, X, Y, num_data=600, beta=0.3)
    torch.testing.assert_close(terms.loss, terms.nll + 0.3 * lb.kl(bnn) / 600)
    torch.testing.assert_close(terms.nll, F.cross_entropy(terms.outputs, Y))


def test_a_plain_model_has_no_kl():
    net = small_net().eval()
    terms = lb.elbo(net, X, Y, num_data=6)
    assert terms.kl == 0
    torch.testing.assert_close(terms.loss, F.cross_entropy(net(X), Y))


def test_tile_gives_every_row_to_every_component(ensemble):
    terms = lb.elbo(ensemble, X, Y, num_data=6, tile=True)
    expected = members(ensemble, X)
    torch.testing.assert_close(terms.outputs.view(3, 6, 4), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.nll, F.cross_entropy(expected.flatten(0, 1), Y.repeat(3)))


def test_samples_of_a_row_share_its_component(ensemble):
    terms = lb.elbo(ensemble, X, Y, num_data=6, samples=4)
    outputs = terms.outputs.view(4, 6, 4)
    torch.testing.assert_close(outputs, outputs[:1].expand_as(outputs))
    noisy = lb.convert(small_net(), lb.ImplicitNodes(components=3)).eval()
    outputs = lb.elbo(noisy, X, Y, num_data=6, samples=4).outputs.view(4, 6, 4)
    assert not torch.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("rows", [6, 5])
@pytest.mark.parametrize("samples", [2, 5])
def test_draws_of_a_row_are_dealt_to_consecutive_components(ensemble, rows, samples):
    x, y = X[:rows], Y[:rows]
    torch.manual_seed(1)
    terms = lb.elbo(ensemble, x, y, num_data=6, samples=samples, deal="draws")
    torch.manual_seed(1)
    first = assign_rows(rows, 3, x.device).rows()
    expected = [members(ensemble, x)[(first + turn) % 3, torch.arange(rows)] for turn in range(samples)]
    torch.testing.assert_close(terms.outputs.view(samples, rows, 4), torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.nll, F.cross_entropy(terms.outputs, y.repeat(samples)))


def test_draws_that_serve_a_component_are_dealt_pass_by_pass():
    bnn = lb.convert(small_net(), lb.Rank1(components=3, noise="component"))
    seen = []
    bnn[0].register_forward_hook(lambda layer, args, result: seen.append(layer.state.component.rows()))
    lb.elbo(bnn, X, Y, num_data=6, samples=4, deal="draws")
    assert len(seen) == 4
    assert all(torch.equal(later, (seen[0] + turn) % 3) for turn, later in enumerate(seen))


def test_tiled_rows_have_every_component_however_draws_are_dealt(ensemble):
    expected = members(ensemble, X).repeat(2, 1, 1)
    for deal in ("rows", "draws"):
        terms = lb.elbo(ensemble, X, Y, num_data=6, samples=2, tile=True, deal=deal)
        torch.testing.assert_close(terms.outputs.view(6, 6, 4), expected, atol=1e-5, rtol=1e-5)


def test_dealt_draws_of_a_row_have_noise_of_their_own():
    bnn, rows = lb.convert(nn.Linear(1, 1), lb.ImplicitNodes(components=2, init_spread=0.0)), 4000
    x = torch.ones(rows, 1)
    first, second = lb.elbo(bnn, x, x, lb.Gaussian(), num_data=rows, samples=2, deal="draws").outputs.view(2, rows)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / math.sqrt(rows)


@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("deal", ["rows", "draws"])
def test_the_bound_is_unbiased_however_draws_are_dealt(deal, samples):
    # A linear map of Gaussian nodes is Gaussian: E (y - f)^2 = (y - mean)^2 + variance, averaged over the components.
    torch.manual_seed(0)
    bnn = lb.convert(nn.Linear(3, 1), lb.ImplicitNodes(components=3, init_spread=0.7, init_std=0.4)).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 1).double()
    weight, bias = bnn.base.weight.detach(), bnn.base.bias.detach()
    law = bnn.posterior.distribution()
    mean = torch.einsum("kn,bn->kb", law.mean.double() * weight, x) + bias
    variance = torch.einsum("kn,bn->kb", (law.stddev.double() * weight).square(), x.square())
    std = 0.5
    exact = math.log(std * math.sqrt(2 * math.pi)) + ((y[:, 0] - mean).square() + variance).mean() / (2 * std**2)
    with torch.no_grad():
        terms = [lb.elbo(bnn, x, y, lb.Gaussian(std=std), num_data=5, samples=samples, deal=deal) for _ in range(1500)]
    found = torch.stack([term.nll for term in terms])
    assert abs(found.mean() - exact) < 4 * found.std() / math.sqrt(len(found))


def test_mixture_is_the_log_of_the_mean_likelihood_and_tighter(ensemble):
    average = lb.elbo(ensemble, X, Y, num_data=6, tile=True)
    mixture = lb.elbo(ensemble, X, Y, num_data=6, tile=True, aggregate="mixture")
    log_p = members(ensemble, X).log_softmax(-1)[:, torch.arange(6), Y]
    torch.testing.assert_close(mixture.nll, -(log_p.logsumexp(0) - math.log(3)).mean(), atol=1e-5, rtol=1e-5)
    assert mixture.nll < average.nll


def test_mixture_counts_only_targets_that_are_not_ignored(ensemble):
    y = Y.clone()
    y[:2] = -100
    some = lb.elbo(ensemble, X, y, num_data=6, tile=True, aggregate="mixture")
    rest = lb.elbo(ensemble, X[2:], Y[2:], num_data=6, tile=True, aggregate="mixture")
    torch.testing.assert_close(some.nll, rest.nll, atol=1e-5, rtol=1e-5)


def test_any_callable_loss_works_and_mixture_refuses_it(ensemble):
    terms = lb.elbo(ensemble, X, Y, nn.CrossEntropyLoss(), num_data=6)
    assert terms.nll.isfinite()
    per_row = lb.elbo(ensemble, X, Y, lambda o, y: F.cross_entropy(o, y, reduction="none"), num_data=6)
    assert per_row.loss.shape == ()
    with pytest.raises(TypeError, match="needs a Likelihood"):
        lb.elbo(ensemble, X, Y, nn.CrossEntropyLoss(), num_data=6, tile=True, aggregate="mixture")


def test_the_models_own_likelihood_is_used_and_trained():
    bnn = lb.convert(nn.Linear(3, 1), lb.Rank1(), likelihood=lb.Gaussian(std=2.0, learn=True))
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    terms = lb.elbo(bnn, x, y, num_data=8)
    terms.loss.backward()
    assert all(p.grad is not None for p in bnn.parameters())
    expected = torch.distributions.Normal(terms.outputs, 2.0).log_prob(y).sum(1).mean()
    torch.testing.assert_close(terms.nll, -expected)
    torch.testing.assert_close(lb.predict(bnn, x).aleatoric, torch.full((8, 1), 4.0))
    assert type(lb.draw(bnn)) is nn.Linear


def test_a_sequential_keeps_its_likelihood_out_of_the_chain_and_out_of_weight_decay():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    bnn = lb.convert(net, lb.Rank1(), likelihood=lb.Gaussian(learn=True))
    assert bnn(torch.randn(5, 3)).shape == (5, 1)
    groups = {g["name"]: {id(p) for p in g["params"]} for g in lb.parameter_groups(bnn, lr=0.1, weight_decay=0.1)}
    assert id(bnn[0].likelihood.log_std) in groups["posterior"]
    assert lb.summary(bnn).parameters == sum(p.numel() for p in net.parameters())
    assert lb.draw(bnn).state_dict().keys() == net.state_dict().keys()


def test_components_are_balanced_in_training():
    bnn = lb.convert(small_net(), lb.Rank1(components=3))
    lb.elbo(bnn, X, Y, num_data=6)
    assert bnn[0].state.component.rows().bincount().tolist() == [2, 2, 2]
    assert (bnn[0].state.component.rows().diff() != 0).sum() == 2


def test_batches_in_a_fixed_order_reach_every_component():
    bnn = lb.convert(small_net(), lb.BatchEnsemble(components=3))
    seen = set()
    for _ in range(40):
        lb.elbo(bnn, X, Y, num_data=6)
        seen.add(bnn[0].state.component.rows()[0].item())
    assert seen == {0, 1, 2}


def test_inputs_without_the_batch_on_their_first_axis_are_not_tiled():
    bnn = lb.convert(Tokens(), lb.Rank1(components=2))
    inputs = {"tokens": torch.randint(11, (5, 3)), "scale": torch.tensor(0.5)}
    assert lb.elbo(bnn, inputs, torch.tensor([0, 1, 2, 3, 0]), num_data=5, tile=True).outputs.shape == (10, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_data": 0}, "expected num_data to be the size of the training set, got 0"),
        ({"samples": 0}, "expected samples to be a whole number of at least 1, got 0"),
        ({"samples": 1.5}, "expected samples to be a whole number of at least 1, got 1.5"),
        ({"aggregate": "sum"}, "expected aggregate to be one of average, mixture, got 'sum'"),
        ({"deal": "both"}, "expected deal to be one of rows, draws, got 'both'"),
        ({"beta": float("nan")}, "expected beta to be a finite number of at least 0, got nan"),
        ({"beta": float("inf")}, "expected beta to be a finite number of at least 0, got inf"),
        ({"beta": -1}, "expected beta to be a finite number of at least 0, got -1"),
    ],
)
def test_wrong_arguments_give_one_clear_sentence(ensemble, change, message):
    with pytest.raises(ValueError, match=message):
        lb.elbo(ensemble, X, Y, **({"num_data": 6} | change))


@pytest.mark.parametrize("options", [{"class_weight": [1.0, 2.0, 3.0, 4.0]}, {"label_smoothing": 0.1}])
def test_weights_and_smoothing_have_no_mixture(ensemble, options):
    likelihood = lb.Categorical(**options)
    with pytest.raises(ValueError, match=r"without class_weight and label_smoothing.*take aggregate='average'"):
        lb.elbo(ensemble, X, Y, likelihood, num_data=6, tile=True, aggregate="mixture")
    lb.elbo(ensemble, X, Y, likelihood, num_data=6, tile=True)


def test_arrays_are_refused(ensemble):
    with pytest.raises(TypeError, match=r"expected x as tensors, got a NumPy array; torch\.as_tensor\(x\)"):
        lb.elbo(ensemble, X.numpy(), Y, num_data=6)
    with pytest.raises(TypeError, match=r"expected x as tensors, got a list without one; torch\.as_tensor\(x\)"):
        lb.elbo(ensemble, X.tolist(), Y, num_data=6)
    for y in (Y.numpy(), Y.tolist(), None):
        with pytest.raises(TypeError, match=f"expected y as a tensor of targets, got {type(y).__name__}"):
            lb.elbo(ensemble, X, y, num_data=6)


def test_every_pass_has_the_same_input_whatever_a_network_does_to_it():
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(64, 4), []

        def forward(self, x):
            self.seen.append(x.clone())
            return self.layer(x.mul_(2).flatten(1))

    bnn = lb.convert(Careless(), lb.ModelPatch(components=2))
    before = X.clone()
    lb.elbo(bnn, X, Y, num_data=6, samples=3)
    assert len(bnn.seen) == 3
    assert all(torch.equal(seen, before) for seen in (*bnn.seen, X))


def test_num_data_must_be_given(ensemble):
    with pytest.raises(TypeError, match="num_data"):
        lb.elbo(ensemble, X, Y)


def test_outputs_that_are_no_tensor_ask_for_output():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return {"y": self.layer(x)}

    bnn = lb.convert(Odd(), lb.Rank1())
    with pytest.raises(TypeError, match="pass output= to pick one"):
        lb.elbo(bnn, torch.randn(3, 2), torch.tensor([0, 1, 0]), num_data=3)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(over=st.floats(0.1, 1e4), progress=st.floats(0, 1e5), start=st.floats(0, 1), end=st.floats(0, 1))
def test_linear_beta_rises_from_start_to_end_and_stays(over, progress, start, end):
    beta = linear_beta(progress, over, start=start, end=end)
    assert min(start, end) - 1e-9 <= beta <= max(start, end) + 1e-9
    assert linear_beta(0, over, start=start, end=end) == start
    assert linear_beta(over, over, start=start, end=end) == pytest.approx(end)


def test_training_in_a_users_own_loop_lowers_the_loss():
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    y = (x[:, 0] > 0).long()
    bnn = lb.convert(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)), lb.Rank1())
    optimiser = torch.optim.SGD(lb.parameter_groups(bnn, lr=0.1, posterior_lr=0.1), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(bnn(x), y) + lb.kl(bnn) / 10_000
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert (lb.predict(bnn, x).mean.argmax(1) == y).float().mean() > 0.9


@pytest.mark.parametrize(
    ("likelihood", "kind", "message"),
    [
        (
            nn.CrossEntropyLoss(reduction="sum"),
            ValueError,
            "a loss of one row or a mean, since the KL is divided by num_",
        ),
        (lb.Categorical, TypeError, r"expected a likelihood such as lb\.Categorical\(\), or a function .* got <class"),
        ("categorical", TypeError, r"expected a likelihood such as lb\.Categorical\(\), .* got 'categorical'"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused(likelihood, kind, message):
    net = lb.convert(nn.Linear(4, 3), lb.Rank1())
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    with pytest.raises(kind, match=message):
        lb.elbo(net, x, y, likelihood, num_data=8)
    with pytest.raises(kind, match=message):
        lb.fit(net, (x, y), lb.Recipe(epochs=1), likelihood=likelihood, progress=False)
