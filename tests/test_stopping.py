"""Early stopping, row by row: the stated rule, computed again from all draws; no row depends on another."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.core import batched
from leanbayes.core.prediction import decompose
from leanbayes.core.stopping import padded, SMALLEST_PROBABILITY, stages

S = 16


def network(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.01, 3, 40)[:, None]
NOISY = lb.Rank1(init_std=0.4)


def draws_of(samples: torch.Tensor, own: torch.Tensor, likelihood: lb.Likelihood, tolerance: float, unit: int) -> list:
    """Return the draws that each row takes, row by row from all its draws."""
    found = []
    for row in range(samples.shape[1]):
        for s in (4, 8, 16):
            mine = samples[:s, row].double()
            v = unit * mine.view(s // unit, unit, *mine.shape[1:]).mean(1).var(0)
            mean, share = mine.mean(0), 0.5 * (1 / s - 1 / S)
            if isinstance(likelihood, lb.Gaussian):
                change = share * (v / (own[:s, row].double().mean(0) + mine.var(0, correction=0))).sum()
            elif isinstance(likelihood, lb.Bernoulli):
                change = share * (v / (mean + SMALLEST_PROBABILITY) + v / (1 - mean + SMALLEST_PROBABILITY)).mean()
            else:
                change = share * (v / (mean + SMALLEST_PROBABILITY)).sum(0).mean()
            if s == S or change <= tolerance:
                found.append(s)
                break
    return found


@pytest.mark.parametrize("small", [0, batched.SMALL["cpu"]], ids=["draw by draw", "together"])
@pytest.mark.parametrize("design", ["independent", "paired"])
@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(lb.Categorical(), 4), (lb.Gaussian(0.3), 2), (lb.Gaussian(heteroscedastic=True), 2), (lb.Bernoulli(), 1)],
    ids=["classes", "targets", "noise of the network", "yes or no"],
)
def test_rows_stop_by_the_rule_with_the_answer_of_their_draws(likelihood, outputs, design, small, monkeypatch):
    monkeypatch.setitem(batched.SMALL, "cpu", small)
    model = lb.convert(network(outputs), NOISY)
    whole = lb.predict(model, X, likelihood, samples=S, design=design)
    _, own = likelihood.predictive(torch.zeros(1, outputs))
    own = whole.variances if isinstance(likelihood, lb.Gaussian) else own
    tolerance = 0.02 if isinstance(likelihood, lb.Gaussian) else 0.003
    p = lb.predict(model, X, likelihood, samples=S, design=design, tolerance=tolerance)
    assert p.samples is None
    assert p.draws.tolist() == draws_of(whole.samples, own, likelihood, tolerance, 2 if design == "paired" else 1)
    assert len(set(p.draws.tolist())) >= 2
    for row in (0, 17, 39):
        first = lb.predict(model, X, likelihood, samples=int(p.draws[row]), design=design)
        for name in ("mean", "total", "aleatoric", "epistemic"):
            torch.testing.assert_close(getattr(p, name)[row], getattr(first, name)[row], atol=1e-5, rtol=1e-5)


def test_a_row_takes_its_draws_alone_and_in_any_company():
    model = lb.convert(network(), NOISY)
    predictor = lb.Predictor(model, samples=S, tolerance=0.003)
    whole, order = predictor(X), torch.randperm(40)
    assert torch.equal(predictor(X[order]).draws, whole.draws[order])
    assert torch.cat([predictor(row[None]).draws for row in X]).tolist() == whole.draws.tolist()
    loader = DataLoader(TensorDataset(X, torch.zeros(40)), batch_size=7)
    loaded = predictor(loader)
    assert torch.equal(loaded.draws, whole.draws)
    torch.testing.assert_close(loaded.mean, whole.mean, atol=1e-5, rtol=0)
    assert "draws an example" in repr(whole)


def test_the_ends_of_the_tolerance():
    model = lb.convert(network(), NOISY)
    exact, loose = lb.predict(model, X, tolerance=0), lb.predict(model, X, tolerance=100)
    assert set(exact.draws.tolist()) == {16}
    torch.testing.assert_close(exact.mean, lb.predict(model, X).mean)
    assert set(loose.draws.tolist()) == {4}
    few = lb.predict(model, X, samples=3, tolerance=100)
    assert set(few.draws.tolist()) == {3}


def test_pixels_of_one_image_stop_together():
    torch.manual_seed(0)
    model = lb.convert(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)), NOISY)
    x = torch.randn(6, 1, 5, 5) * torch.linspace(0.1, 8, 6)[:, None, None, None]
    samples = lb.predict(model, x, samples=S).samples
    p = lb.predict(model, x, samples=S, tolerance=0.01)
    assert p.draws.tolist() == draws_of(samples, samples, lb.Categorical(), 0.01, 1)


class Backbone(nn.Module):
    """Plain layers first, whose outputs are kept while the rows are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


def test_kept_outputs_are_those_of_the_rows_that_are_left(monkeypatch):
    monkeypatch.setitem(batched.SMALL, "cpu", 0)
    torch.manual_seed(0)
    model = lb.convert(Backbone(), NOISY, where="head")
    p = lb.predict(model, X, samples=S, tolerance=0.002)
    assert len(set(p.draws.tolist())) > 1
    samples = lb.predict(model, X, samples=S).samples
    for row, count in enumerate(p.draws.tolist()):
        mean = decompose(samples[:count, row : row + 1], samples[:count, row : row + 1, 0], "entropy").mean[0]
        torch.testing.assert_close(p.mean[row], mean, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", [lb.BatchEnsemble(components=8, init_spread=0.5), lb.DeepEnsemble(components=2)])
def test_ensembles_stop_too(method):
    model = lb.convert(network(), method)
    p = lb.predict(model, X, samples=S, tolerance=0.003)
    assert p.draws.max() <= (8 if method.name == "batch_ensemble" else 4)
    assert torch.isfinite(p.total).all()


def test_rows_that_depend_on_each_other_take_all_draws():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    p = lb.predict(lb.convert(net, NOISY), X, samples=8, tolerance=100)
    assert set(p.draws.tolist()) == {8}


def test_few_sizes_of_batches():
    assert stages(16) == [range(4), range(4, 8), range(8, 16)]
    assert stages(3) == [range(3)]
    assert stages(24)[-1] == range(16, 24)
    sizes = {padded(count, 1000) for count in range(1, 1001)}
    assert len(sizes) <= 20
    assert all(count <= padded(count, 1000) <= 1.5 * count + 2 for count in range(1, 1001))


@pytest.mark.parametrize("change", [{"tolerance": -1.0}, {"tolerance": "x"}, {"tolerance": 0.1, "noise": "activation"}])
def test_wrong_tolerances_give_one_clear_sentence(change):
    with pytest.raises(ValueError, match=r"expected (tolerance|noise)"):
        lb.predict(lb.convert(network(), NOISY), X, **change)


def test_one_answer_for_each_row_stops_as_a_column_does():
    torch.manual_seed(0)
    column, squeezed = (lb.convert(nn.Sequential(network(1), *end), NOISY) for end in ([], [nn.Flatten(0)]))
    squeezed.load_state_dict(column.state_dict())
    found = [lb.predict(model, X, lb.Bernoulli(), samples=S, tolerance=1e-3) for model in (column, squeezed)]
    assert torch.equal(found[0].draws, found[1].draws)
    assert torch.allclose(found[0].mean[:, 0], found[1].mean)


def test_equal_draws_do_not_stop_a_row():
    """With two patches, the first four draws are one function in an eighth of the seeds."""
    model = lb.convert(network(), lb.ModelPatch(components=2, patch="output", init_spread=0.5))
    seeds = [seed for seed in range(60) if not lb.predict(model, X, samples=4, seed=seed).epistemic.any()]
    assert seeds
    for seed in seeds:
        p, whole = (lb.predict(model, X, seed=seed, tolerance=tolerance) for tolerance in (0.01, 0))
        assert (p.draws > 4).all()
        assert p.epistemic.max() > 1e-4
        assert set(whole.draws.tolist()) == {16}
