"""Wrong inputs get a sentence; common omissions get a warning; readable inputs are read."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.core import public

from .networks import Tokens

X = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(9) % 3


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


class Plain(nn.Linear):
    """A class without a warning so far."""


@pytest.fixture
def forgetful(monkeypatch):
    """Forget the earlier warnings of the process."""
    monkeypatch.setattr(public, "warned", set())


MESSAGE = r"this network has no stochastic layer; did you mean lb\.convert\(net, lb\.Rank1\(\)\)\?"
CALLS = {
    "predict": lambda net: lb.predict(net, X),
    "elbo": lambda net: lb.elbo(net, X, Y, num_data=9),
    "kl": lambda net: lb.kl(model=net),
}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("name", CALLS)
def test_a_network_that_was_not_converted_is_mentioned_once(name):
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        CALLS[name](Plain(8, 3))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[name](Plain(8, 3))


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("name", CALLS)
def test_converted_networks_and_ensembles_are_not_mentioned(name):
    models = [lb.convert(network(), lb.Rank1()), lb.Ensemble([network(), network()])]
    models.append(nn.Sequential(nn.Identity(), lb.convert(network(), lb.Rank1())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in models:
            CALLS[name](model)


@pytest.mark.usefixtures("forgetful")
def test_the_library_itself_uses_plain_networks_in_silence():
    late = lb.convert(network(), lb.Rank1())
    recipe = lb.Recipe(epochs=2, batch_size=9, convert_at_epoch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lb.fit(late, (X, Y), recipe, progress=False, validation=(X, Y))
        lb.fit(network(), (X, Y), lb.Recipe(epochs=1, batch_size=9), progress=False, validation=(X, Y))
        lb.evaluate(network(), (X, Y))
        lb.predict(lb.convert(network(), lb.DeepEnsemble(components=2)), X)
        lb.phase.infer(late, X, "deterministic")
    assert public.warned == set()


def test_the_library_never_calls_the_functions_that_warn():
    root = Path(lb.__file__).parent
    callers = [file.name for file in root.rglob("*.py") if "leanbayes.core.public" in file.read_text()]
    assert callers == ["__init__.py"]


@pytest.mark.parametrize("function", [lb.predict, lb.elbo, lb.kl], ids=lambda function: function.__name__)
def test_public_functions_can_be_pickled(function):
    assert pickle.loads(pickle.dumps(function)) is function  # written by this test


@pytest.mark.parametrize(
    "method", [None, lb.Rank1(components=2), lb.MeanField(), lb.ModelPatch(patch=("*",))], ids=repr
)
@pytest.mark.parametrize("way", ["predict", "elbo"])
def test_a_wrong_width_names_layer_and_width(method, way):
    model = network() if method is None else lb.convert(network(), method)
    with pytest.raises(
        ValueError, match=r"layer '0' expected an input with 8 features on axis 1, got one of shape \(9, 7\)"
    ):
        CALLS_WITH[way](model, X[:, :7])


CALLS_WITH = {
    "predict": lambda model, x: lb.predict(model, x),
    "elbo": lambda model, x: lb.elbo(model, x, Y, num_data=9),
}


def test_a_wrong_number_of_channels_names_layer_and_channels():
    model = lb.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)), lb.Rank1())
    with pytest.raises(
        ValueError, match=r"layer '0' expected an input with 3 features on axis 1, got .*\(9, 1, 4, 4\)"
    ):
        lb.predict(model, torch.randn(9, 1, 4, 4))
    with pytest.raises(ValueError, match=r"layer '2' expected an input with 16 features on axis 1, got .*\(9, 36\)"):
        lb.predict(model, torch.randn(9, 3, 5, 5))


def test_other_errors_of_a_network_stay_what_they_are():
    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match=r"^out of order$"):
        lb.predict(Broken(8, 3), X)


@pytest.mark.parametrize("label", [7, -1])
def test_labels_out_of_range_name_the_number_of_classes(label):
    y = Y.clone()
    y[4] = label
    bnn = lb.convert(network(), lb.Rank1())
    message = f"expected targets from 0 to 2, since the network has 3 outputs, got {label}"
    for likelihood in (lb.Categorical(), lb.Categorical(class_weight=[1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match=message):
            lb.elbo(bnn, X, y, likelihood, num_data=9)
    with pytest.raises(ValueError, match=message):
        lb.elbo(bnn, X, y, num_data=9, samples=2, aggregate="mixture")
    with pytest.raises(ValueError, match=message):
        lb.predict(bnn, X, samples=2).log_prob(y)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="expected a batch of at least one example, got an empty one"):
        lb.elbo(lb.convert(network(), lb.Rank1()), X[:0], Y[:0], num_data=9)


def test_a_draw_has_a_whole_seed():
    bnn = lb.convert(network(), lb.Rank1())
    with pytest.raises(ValueError, match=r"expected seed to be a whole number, got 1\.5"):
        lb.draw(bnn, seed=1.5)
    assert torch.equal(lb.draw(bnn, seed=np.int64(1))(X), lb.draw(bnn, seed=1)(X))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ">f4"])
def test_predict_takes_arrays(dtype):
    bnn = lb.convert(network(), lb.Rank1())
    array = X.numpy().astype(dtype)
    array.setflags(write=False)
    expected = lb.predict(bnn, torch.from_numpy(array.astype(np.float32)), samples=3)
    loader = DataLoader(TensorDataset(X), batch_size=4, collate_fn=lambda rows: np.stack([x.numpy() for (x,) in rows]))
    for x in (array, (array,), iter([array[:4], array[4:]]), array[::-1][::-1]):
        assert torch.allclose(lb.predict(bnn, x, samples=3).mean, expected.mean, atol=1e-6)
    assert torch.allclose(lb.predict(bnn, loader, samples=3).mean, lb.predict(bnn, X, samples=3).mean, atol=1e-6)


def test_arrays_of_whole_numbers_stay_whole():
    bnn, tokens = lb.convert(Tokens(), lb.Rank1()), torch.randint(11, (5, 3))
    assert torch.equal(lb.predict(bnn, {"tokens": tokens.numpy()}).mean, lb.predict(bnn, {"tokens": tokens}).mean)


def test_arrays_of_anything_else_are_refused():
    with pytest.raises(TypeError, match="expected an array of numbers, got one of object; convert it before"):
        lb.predict(lb.convert(network(), lb.Rank1()), np.array([[None] * 8]))


class Pairs(nn.Module):
    """As CLIP: the logits of every text for every image."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(6, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) @ self.b(y).T


@pytest.mark.parametrize(("rows", "chunk", "shapes"), [
    (70, 64, r"64 and of 6 examples have shapes \(64, 64\) and \(6, 6\)"),
    (128, 64, r"64 and of 63 examples have shapes \(64, 64\) and \(63, 63\)"),
    (4, 1, r"1 and of 2 examples have shapes \(1, 1\) and \(2, 2\)"),
])  # fmt: skip
def test_outputs_that_depend_on_other_examples_are_refused_in_chunks(rows, chunk, shapes):
    bnn, x = lb.convert(Pairs(), lb.Rank1()), (torch.randn(rows, 8), torch.randn(rows, 6))
    likelihood = lb.Gaussian()
    with pytest.raises(ValueError, match=rf"of {shapes}.*pass chunk_size={rows}, or output= for features"):
        lb.predict(bnn, x, likelihood, samples=2, chunk_size=chunk)
    assert lb.predict(bnn, x, likelihood, samples=2, chunk_size=rows).mean.shape == (rows, rows)
    features = lb.predict(bnn, x, likelihood, samples=2, chunk_size=chunk, output=lambda y: y.mean(1, keepdim=True))
    assert features.mean.shape == (rows, 1)


def test_blocks_whose_outputs_depend_on_other_examples_are_refused():
    bnn = lb.convert(Pairs(), lb.Rank1())
    blocks = ((torch.randn(rows, 8), torch.randn(rows, 6)) for rows in (5, 4))
    with pytest.raises(ValueError, match=r"\(5, 5\) and \(4, 4\).*give all of them at once, or output="):
        lb.predict(bnn, blocks, samples=2)


def test_as_many_outputs_as_rows_in_a_chunk_are_no_reason_to_refuse():
    bnn = lb.convert(nn.Linear(8, 3), lb.Rank1())
    whole, cut = lb.predict(bnn, X), lb.predict(bnn, X, chunk_size=3)
    torch.testing.assert_close(cut.samples, whole.samples)


@dataclass(frozen=True)
class Frozen:
    """An output that cannot be changed."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    name: str


class Records(nn.Module):
    """Returns any kind of record."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 3), kind

    def forward(self, x: Tensor) -> object:
        return self.kind(logits=self.layer(x), hidden=(x,), name="records")


@pytest.mark.parametrize("kind", [Frozen, SimpleNamespace])
def test_an_ensemble_joins_records(kind):
    ensemble = lb.convert(Records(kind), lb.DeepEnsemble(components=2))
    terms = lb.elbo(ensemble, X, Y, num_data=9)
    for row in range(9):
        each = torch.stack([member.layer(X[row]) for member in ensemble.members])
        assert torch.isclose(terms.outputs[row], each, atol=1e-6).all(1).any()
    record = ensemble(X)
    assert type(record) is kind
    assert torch.equal(record.hidden[0], X)
    assert record.name is None


def test_an_ensemble_of_transformers_records_trains():
    tokens = {"tokens": torch.randint(11, (5, 3))}
    ensemble = lb.convert(Tokens(), lb.DeepEnsemble(components=2))
    assert lb.elbo(ensemble, tokens, torch.arange(5) % 4, num_data=5).outputs.shape == (5, 4)


@pytest.mark.parametrize("training", [True, False])
def test_an_ensemble_keeps_the_mode_of_its_network(training):
    net = network().train(training)
    net[0].train(not training)
    ensemble = lb.convert(net, lb.DeepEnsemble(components=2))
    assert ensemble.training is training
    assert all(
        [m.training for m in member.modules()] == [m.training for m in net.modules()] for member in ensemble.members
    )


LIKELIHOODS = {
    "categorical": (lb.Categorical(class_weight=[1.0, 2.0, 3.0]), Y),
    "bernoulli": (lb.Bernoulli(), (X[:, :3] > 0).long()),
    "gaussian": (lb.Gaussian(std=0.5, learn=True), X[:, :3].double()),
    "one of two": (lb.Gaussian(heteroscedastic=True), X[:, :2].double()),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_double_network_gives_double_predictions_and_losses(name):
    likelihood, y = LIKELIHOODS[name]
    net = nn.Linear(8, 4 if name == "one of two" else 3)
    x = X.double()
    double = lb.convert(net.double(), lb.Rank1(components=2))
    p = lb.predict(double, x, likelihood, samples=3)
    terms = lb.elbo(double, x, y, likelihood, num_data=9)
    assert {p.mean.dtype, p.total.dtype, p.samples.dtype, terms.nll.dtype, terms.loss.dtype} == {torch.float64}
    assert p.log_prob(y).dtype == torch.float64
    terms.loss.backward()
    with lb.draws(double, seed=0, index=2):
        torch.testing.assert_close(p.samples[2], likelihood.predictive(double(x))[0].detach(), atol=1e-12, rtol=1e-12)


def test_autocast_still_gives_float32():
    bnn = lb.convert(network(), lb.Rank1())
    with torch.autocast("cpu", torch.bfloat16):
        assert lb.predict(bnn, X, samples=2).mean.dtype == torch.float32
        assert lb.elbo(bnn, X, Y, num_data=9).loss.dtype == torch.float32


def test_norms_without_running_statistics_see_all_rows():
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3))
    bnn = lb.convert(net, lb.Rank1())
    whole = lb.predict(bnn, X, samples=2)
    for size in (3, 6):
        assert torch.equal(lb.predict(bnn, X, samples=2, chunk_size=size).samples, whole.samples)
    torch.testing.assert_close(whole.samples[0], lb.draw(bnn, seed=0)(X).softmax(1))


@pytest.mark.parametrize("given", ["gaussian", 16, lb.Gaussian])
def test_predict_refuses_what_is_no_likelihood(given):
    bnn = lb.convert(network(), lb.Rank1())
    with pytest.raises(TypeError, match=r"expected a likelihood such as lb\.Gaussian\(\).*name other arguments"):
        lb.predict(bnn, X, given)


@pytest.mark.parametrize(("index", "says"), [(1.5, "index to be a whole number"), (-1, "index to be")])
def test_draw_refuses_what_is_no_index(index, says):
    with pytest.raises(ValueError, match=f"expected {says}"):
        lb.draw(lb.convert(network(), lb.Rank1()), index=index)


def test_a_laplace_approximation_is_not_left_out_in_silence():
    """The posterior of a model is computed by the method that it was converted with."""
    model, other = lb.convert(network(), lb.LastLayerLaplace()), lb.LastLayerLaplace(prior_precision=3.0)
    with pytest.raises(ValueError, match=r"was converted with LastLayerLaplace\(prior_precision=3"):
        other.after_training(model, (X, Y))
    with pytest.raises(ValueError, match="got no such layer; use the same method"):
        other.after_training(network(), (X, Y))
    lb.LastLayerLaplace().after_training(model, (X, Y))
    assert lb.predict(model, X).epistemic.any()
