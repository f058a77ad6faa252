"""Embeddings with random vectors, and transformers' transposed Linear: families next to torch's linear maps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import kl_divergence, Normal

import leanbayes as lb
from leanbayes.layers.family import Conv1D, family_of, LINEAR_MAPS, refusal
from leanbayes.methods import all_methods
from leanbayes.models.classic import EHRNet

WORDS, WIDTH, PADDING = 7, 4, 2


def table(**options) -> nn.Embedding:
    layer = nn.Embedding(WORDS, WIDTH, **options)
    with torch.no_grad():
        layer.weight.normal_()  # the padding's vector need not be zero
    return layer


class Reader(nn.Module):
    """Classes from the sum of a sentence's vectors; the output layer may share them."""

    def __init__(self, *, tied: bool = False, **options) -> None:
        super().__init__()
        self.embed, self.mix = table(**options), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)).tanh().sum(1))


# Embeddings


def test_an_embedding_is_the_linear_map_of_unit_vectors():
    layer, words = table(), torch.tensor([[3, 0, 6], [1, 1, 2]])
    family, units = family_of(layer), F.one_hot(words, WORDS).float()
    assert (family.inputs(layer), family.outputs(layer)) == (WORDS, WIDTH)
    torch.testing.assert_close(family.linear(layer, words, layer.weight), units @ layer.weight)
    s, r = torch.randn(WORDS), torch.randn(WIDTH)
    scaled = family.linear(layer, words, family.scale(layer, layer.weight, s, r))
    torch.testing.assert_close(scaled, ((units * s) @ layer.weight) * r)
    assert nn.Embedding not in LINEAR_MAPS


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_word_has_one_vector_in_a_pass_and_another_in_the_next(estimator):
    bnn = lb.convert(table(), lb.MeanField(init_std=0.5, estimator=estimator))
    words = torch.tensor([[1, 3, 1], [3, 1, 5]])
    y, later = bnn(words), bnn(words)
    assert torch.equal(y[0, 0], y[0, 2])
    assert torch.equal(y[0, 0], y[1, 1])
    assert torch.equal(y[0, 1], y[1, 0])
    assert not torch.equal(y, later)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_sampled_vectors_have_the_moments_of_the_posterior(estimator):
    bnn = lb.convert(table(), lb.MeanField(init_std=0.3, estimator=estimator))
    with torch.no_grad():
        bnn.posterior.rho.normal_()
        passes = torch.stack([bnn(torch.tensor([4])) for _ in range(4000)])[:, 0].double()
    mean, std = bnn.base.weight[4].detach(), F.softplus(bnn.posterior.rho[4].detach())
    assert ((passes.mean(0) - mean).abs() <= 5 * std / 4000**0.5).all()
    assert ((passes.std(0) / std - 1).abs() <= 5 / (2 * 4000) ** 0.5).all()


def test_padding_is_no_random_variable():
    net = nn.Sequential(table(padding_idx=PADDING - WORDS))
    bnn = lb.convert(net, lb.MeanField(init_std=0.5, prior_std=0.7))
    words = torch.arange(WORDS)[None]
    y = bnn(words)
    assert torch.equal(y[0, PADDING], net[0].weight[PADDING])
    assert torch.equal(lb.draw(bnn)[0].weight[PADDING], net[0].weight[PADDING])
    (y.square().sum() + lb.kl(bnn)).backward()
    for parameter in bnn.parameters():
        assert parameter.grad.isfinite().all()
        assert (parameter.grad[PADDING] == 0).all()
        assert (parameter.grad[PADDING + 1] != 0).all()
    used = [word for word in range(WORDS) if word != PADDING]
    posterior = Normal(net[0].weight[used].detach(), torch.tensor(0.5))
    torch.testing.assert_close(lb.kl(bnn), kl_divergence(posterior, Normal(0.0, 0.7)).sum())
    assert lb.summary(bnn).nodes == (WORDS - 1) * WIDTH


def test_a_draw_is_torchs_own_embedding_with_all_its_options():
    net = nn.Sequential(table(padding_idx=PADDING, scale_grad_by_freq=True, sparse=True))
    bnn = lb.convert(net, lb.MeanField(init_std=0.5))
    plain = lb.draw(bnn, seed=4)[0]
    assert type(plain) is nn.Embedding
    assert (plain.padding_idx, plain.scale_grad_by_freq, plain.sparse) == (PADDING, True, True)
    words = torch.randint(WORDS, (2, 3))
    with lb.draws(bnn, seed=4):
        torch.testing.assert_close(plain(words), bnn(words))
    torch.testing.assert_close(lb.mean(bnn)(words), net(words))


def test_gradients_are_dense_and_scaled_by_frequency_where_the_layer_asks_for_it():
    words = torch.tensor([[1, 1, 3]])
    for often in (True, False):
        net = table(scale_grad_by_freq=often, sparse=True)
        bnn = lb.convert(net, lb.MeanField())
        bnn(words).sum().backward()
        grad = bnn.base.weight.grad
        assert not grad.is_sparse
        torch.testing.assert_close(grad[1], torch.full((WIDTH,), 1.0 if often else 2.0))


def test_max_norm_is_refused_with_a_reason():
    net = Reader(max_norm=1.0)
    with pytest.warns(UserWarning, match="'embed' cannot be converted: max_norm changes its vectors in place"):
        bnn = lb.convert(net, lb.MeanField())
    assert type(bnn.embed) is nn.Embedding
    assert next(row.reason for row in lb.summary(bnn).rows if row.path == "embed").startswith("max_norm")
    with pytest.raises(ValueError, match="max_norm"):
        lb.convert(net, lb.MeanField(), where="embed")


def test_an_embedding_with_a_forward_of_its_own_is_left_alone():
    class Scaled(nn.Embedding):
        def forward(self, x):
            return 2 * super().forward(x)

    assert family_of(Scaled(3, 2)) is None
    assert (
        refusal(Scaled(3, 2))
        == "Scaled is a Embedding with a forward of its own: it returns something else than its vectors"
    )


def test_mean_field_takes_embeddings_by_default_and_variance_layers_only_where_named():
    reasons = {"rank1": "not a target of rank1", "variance": "not chosen", "mean_field": ""}
    for name, reason in reasons.items():
        rows = lb.summary(lb.convert(Reader(), all_methods()[name]())).rows
        assert [row.reason for row in rows if row.path == "embed"] == [reason]
    with pytest.raises(
        ValueError, match="chose nothing, though it can convert layer '0'; name what to convert with where="
    ):
        lb.convert(nn.Sequential(table()), lb.VarianceLayers())
    named = lb.convert(Reader(), lb.VarianceLayers(), where="embed")
    assert [path for path, _ in lb.stochastic_layers(named)] == ["embed"]


VARIANCE = [
    *(
        (kind, prior)
        for kind in ("layer", "neuron", "weight", "additive")
        for prior in ("log_uniform", "ard", "student")
    ),
    ("zero_mean", "student"),
]


@pytest.mark.filterwarnings("ignore:parameterization='zero_mean':UserWarning")
@pytest.mark.parametrize(("kind", "prior"), VARIANCE)
def test_variance_layers_on_an_embedding_count_every_vector_but_the_padding(kind, prior):
    """The divergence is that of an embedding with one word less and no padding."""
    method = lb.VarianceLayers(parameterization=kind, prior=prior, init_log_alpha=-1.0, student_nu=0.1)
    net, less = table(padding_idx=PADDING), nn.Embedding(WORDS - 1, WIDTH)
    with torch.no_grad():
        net.weight[PADDING] = 0  # as torch makes it
        less.weight.copy_(torch.cat([net.weight[:PADDING], net.weight[PADDING + 1 :]]))
    bnn, other = (lb.convert(layer, method, where=lb.layers.first(nn.Embedding)) for layer in (net, less))
    if kind == "additive":  # its start depends on the mean square of all weights
        other.posterior.log_sigma.data.fill_(bnn.posterior.log_sigma.flatten()[0].item())
    torch.testing.assert_close(lb.kl(bnn), lb.kl(other))
    words = torch.arange(WORDS)
    y = bnn(words)
    assert torch.equal(y[PADDING], net.weight[PADDING])
    assert not torch.equal(y, bnn(words))
    (y.square().sum() + lb.kl(bnn)).backward()
    assert all(parameter.grad.isfinite().all() for parameter in bnn.parameters())
    assert (bnn.base.weight.grad[PADDING] == 0).all()
    with lb.draws(bnn, seed=0):
        torch.testing.assert_close(lb.draw(bnn)(words), bnn(words))


def test_several_samples_see_several_tables():
    bnn = lb.convert(Reader(), lb.MeanField(init_std=0.5), where="embed", likelihood=lb.Categorical())
    terms = lb.elbo(bnn, torch.randint(WORDS, (2, 3)), torch.tensor([1, 4]), num_data=2, samples=3)
    draws = terms.outputs.view(3, 2, WORDS)
    assert not torch.allclose(draws[0], draws[1])
    assert not torch.allclose(draws[1], draws[2])


def test_bayesian_embeddings_go_with_rank_one_factors_in_the_health_record_network(tmp_path):
    net = EHRNet(2, (5, 3), bins=4, embedding=6, hidden=8, dropout=0.0)
    bnn = lb.convert(net, lb.MeanField(init_std=0.3), where="embedding")
    bnn = lb.convert(bnn, lb.Rank1(components=2), likelihood=lb.Categorical())
    x, y = torch.randint(4, (6, 5, 3)), torch.randint(2, (6,))
    lb.elbo(bnn, x, y, num_data=6).loss.backward()
    assert bnn.embedding.posterior.rho.grad.abs().sum() > 0
    assert (bnn.embedding.posterior.rho.grad[0] == 0).all()
    bnn.eval()
    prediction = lb.predict(bnn, x, samples=4)
    assert prediction.epistemic.min() > 0
    lb.save(bnn, tmp_path / "m.safetensors")
    torch.testing.assert_close(lb.predict(lb.load(tmp_path / "m.safetensors", net), x, samples=4).mean, prediction.mean)


def test_tied_weights_share_means_but_no_noise_and_come_untied_in_draws(tmp_path):
    net = Reader(tied=True)
    bnn = lb.convert(net, lb.MeanField(init_std=0.3), likelihood=lb.Categorical())
    assert bnn.head.base.weight is bnn.embed.base.weight
    words, y = torch.randint(WORDS, (5, 3)), torch.randint(WORDS, (5,))
    torch.optim.SGD(bnn.parameters(), 0.1).step()
    lb.elbo(bnn, words, y, num_data=5).loss.backward()
    torch.optim.SGD(bnn.parameters(), 0.1).step()
    assert bnn.head.base.weight is bnn.embed.base.weight
    plain, still = lb.draw(bnn), lb.mean(bnn)
    assert not torch.equal(plain.head.weight, plain.embed.weight)
    assert torch.equal(still.head.weight, still.embed.weight)
    assert still.head.weight is not still.embed.weight
    lb.save(bnn, tmp_path / "m.safetensors")
    loaded = lb.load(tmp_path / "m.safetensors", Reader(tied=True))
    assert loaded.head.base.weight is loaded.embed.base.weight
    assert torch.equal(lb.predict(loaded, words).mean, lb.predict(bnn, words).mean)


# transformers' Conv1D


class Transposed(nn.Module):
    """The Conv1D of transformers; the name and the module are given below."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


def named(name: str, module: str) -> type:
    return type(name, (Transposed,), {"__module__": module, "forward": lambda self, x: x @ self.weight + self.bias})


TRANSFORMERS = named("Conv1D", "transformers.pytorch_utils")


def test_conv1d_is_found_by_its_name_and_library():
    assert isinstance(TRANSFORMERS(3, 2), Conv1D)
    assert isinstance(TRANSFORMERS(3, 2), LINEAR_MAPS)
    assert family_of(TRANSFORMERS(3, 2)).kind is Conv1D
    for other in (named("Conv1D", "somebody.layers"), named("Linear1D", "transformers.pytorch_utils"), nn.Conv1d):
        assert not isinstance(other(3, 2, 1) if other is nn.Conv1d else other(3, 2), Conv1D)


def test_a_conv1d_with_a_forward_of_its_own_is_left_alone():
    class Adapted(TRANSFORMERS):
        def forward(self, x):
            return 2 * super().forward(x)

    assert family_of(Adapted(3, 2)) is None
    assert refusal(Adapted(3, 2)) == "Adapted is a Conv1D with a forward of its own: it does more than add its bias"


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """A Linear and the Conv1D of the same map."""
    plain, turned = nn.Linear(5, 3), TRANSFORMERS(3, 5)
    with torch.no_grad():
        turned.weight.copy_(plain.weight.T)
        turned.bias.copy_(plain.bias)
    return nn.Sequential(plain), nn.Sequential(turned)


BY_CHANNEL = ["rank1", "batch_ensemble", "implicit", "mc_dropout"]


@pytest.mark.parametrize("name", BY_CHANNEL)
def test_methods_by_channel_do_to_a_conv1d_what_they_do_to_a_linear(name):
    for method in all_methods()[name].examples().values():
        models = []
        for net in pair():
            torch.manual_seed(0)
            models.append(lb.convert(net, method))
        x = torch.randn(4, 2, 5)
        for index in range(3):
            linear, turned = (lb.draw(model, seed=1, index=index)[0] for model in models)
            assert type(turned) is TRANSFORMERS
            torch.testing.assert_close(turned.weight.T, linear.weight)
            torch.testing.assert_close(turned.bias, linear.bias)
        results = []
        for model in models:
            with lb.draws(model, seed=2, shared=False):
                results.append(model(x))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(lb.kl(models[0]), lb.kl(models[1]))


@pytest.mark.parametrize("method", [lb.MeanField(init_std=0.3), lb.VarianceLayers(parameterization="neuron")], ids=repr)
def test_gaussian_weights_of_a_conv1d_are_those_of_a_linear(method):
    """With noise on activations, which has the same shape for both."""
    plain, turned = (lb.convert(net, method) for net in pair())
    x, results = torch.randn(4, 2, 5), []
    for model in (plain, turned):
        with lb.draws(model, seed=2, shared=False):
            results.append(model(x))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(lb.kl(plain), lb.kl(turned))


def test_nested_dropout_on_conv1d_is_that_on_linear_with_the_transposed_weight():
    """Divergence and narrow networks are those of the same network made of Linears."""
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    turned = nn.Sequential(*(layer if isinstance(layer, nn.ReLU) else as_conv1d(layer) for layer in linear))
    method = lb.NestedDropout(groups=4)
    theirs, ours = lb.convert(linear, method), lb.convert(turned, method)
    for (_, one), (_, other) in zip(lb.stochastic_layers(theirs), lb.stochastic_layers(ours), strict=True):
        with torch.no_grad():
            one.posterior.log_alpha.uniform_(-5, 0)
            other.posterior.log_alpha.copy_(one.posterior.log_alpha.T)
    torch.testing.assert_close(lb.kl(ours), lb.kl(theirs))
    x = torch.randn(4, 5)
    for width in (0.25, 0.5, 1.0):
        narrow, expected = lb.slim.extract(ours, width), lb.slim.extract(theirs, width)
        torch.testing.assert_close(narrow(x), expected(x))
        assert narrow[2].weight.shape == expected[2].weight.T.shape


def as_conv1d(layer: nn.Linear) -> nn.Module:
    turned = TRANSFORMERS(layer.out_features, layer.in_features)
    turned.weight, turned.bias = nn.Parameter(layer.weight.detach().T.clone()), layer.bias
    return turned
