"""How a row of a comparison is trained: splits, folds, conversion where the plain network is best, noise levels."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.compare import row_training
from leanbayes.compare.baselines import BASELINES
from leanbayes.compare.row_training import best_noise, Held, Row, train_row
from leanbayes.core.conversion import own_likelihood
from leanbayes.training import Recipe
from leanbayes.training.early_stopping import best_file


def table(rows=80, noise=0.5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return x, x[:, :1] + noise * torch.randn(rows, 1, generator=generator)


def row_of(folder, method=None, data=None, classes=0, plain=None, **fields):
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, classes or 1))
        likelihood = lb.Categorical() if classes else lb.Gaussian(std=0.5, learn=True)
        model = net if method is None else lb.convert(net, method, likelihood=likelihood)
        return model, own_likelihood(model) or likelihood

    defaults = {"epochs": 40, "schedule": "constant", "optimizer": "adam", "lr": 0.01, "batch_size": 16, "patience": 5}
    recipe = Recipe(**(defaults | {"accelerator": "cpu"} | fields))
    key = {"method": "plain" if method is None else method.name, "recipe": recipe.fields()}
    return Row(make, recipe, data or table(), Held(0.2), folder, 4, json.loads(json.dumps(key)), plain)


def test_folds_give_the_epochs_and_the_final_network_trains_on_all_rows(tmp_path):
    trained = train_row(row_of(tmp_path))
    found = trained.validation
    assert (found.how, found.rows, found.convert_at_epoch) == ("folds", 80, 0)
    assert len(trained.history) == found.epochs < 40
    assert "valid_nll" not in trained.history[0]
    best = []
    for fold in range(5):
        header = json.loads((tmp_path / "validation.json").read_text())
        assert header["epochs"] == found.epochs
        best.append(best_file(tmp_path / f"fold{fold}"))
    assert all(best)


def test_the_noise_of_real_targets_comes_from_rows_that_were_not_trained_on(tmp_path):
    x, y = table(60, noise=1.0)
    overfitted = train_row(row_of(tmp_path / "a", data=(x, y), patience=0, schedule="cosine", epochs=300, lr=0.02))
    assert overfitted.validation.how == "split"
    assert overfitted.validation.noise > 1.5
    learned = train_row(row_of(tmp_path / "b", data=(x, y), patience=0, schedule="cosine", epochs=300, lr=0.02))
    assert torch.equal(learned.likelihood.log_std, overfitted.likelihood.log_std)


def test_the_best_noise_maximises_the_density():
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(500, 1, generator=generator)
    mean = torch.zeros(3, 500, 1) + 0.2 * torch.randn(3, 1, 1, generator=generator)
    p = lb.Prediction(mean.mean(0), mean[0], mean[0], mean[0], mean, torch.full((3, 500, 1), 0.04), lb.Gaussian())
    factor = best_noise(p, y)

    def density(f):
        each = torch.distributions.Normal(mean, 0.2 * f).log_prob(y).squeeze(-1)
        return float((each.logsumexp(0) - math.log(3)).mean())

    assert density(factor) >= max(density(factor * 1.02), density(factor / 1.02))


def test_a_method_is_converted_where_the_plain_network_is_best(tmp_path):
    plain = row_of(tmp_path / "rank1" / "plain")
    row = row_of(tmp_path / "rank1", lb.Rank1(components=2), plain=plain, convert_at_epoch=28)
    found = train_row(row).validation
    own = train_row(row_of(tmp_path / "plain"))
    assert found.convert_at_epoch == own.validation.epochs
    assert found.epochs > found.convert_at_epoch


def test_the_outcome_does_not_depend_on_the_run_of_the_plain_network(tmp_path, monkeypatch):
    train_row(row_of(tmp_path / "plain"))
    alone = train_row(row_of(tmp_path / "a", lb.Rank1(components=2), plain=row_of(tmp_path / "a" / "plain"),
                             convert_at_epoch=28))  # fmt: skip
    known = replace(row_of(tmp_path / "b" / "plain"), known=tmp_path / "plain" / "validation.json")
    monkeypatch.setattr(row_training, "train_on_split", None)
    after = train_row(row_of(tmp_path / "b", lb.Rank1(components=2), plain=known, convert_at_epoch=28))
    assert not (tmp_path / "b" / "plain").exists()
    first, second = alone.model.state_dict(), after.model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_many_rows_use_one_split(tmp_path, monkeypatch):
    monkeypatch.setattr(row_training, "FEW", 50)
    trained = train_row(row_of(tmp_path))
    assert trained.validation.how == "split"
    assert trained.validation.rows == 16
    assert trained.validation.epochs + 5 == len(trained.history)


def test_classes_get_a_temperature(tmp_path):
    x, y = table()
    labels = (y[:, 0] > 0).long()
    trained = train_row(row_of(tmp_path, data=(x, labels), classes=2))
    assert trained.validation.noise == 1.0
    assert trained.validation.temperature != 1.0


def test_an_ensemble_averages_the_best_epochs_of_its_members(tmp_path):
    def make():
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2)]
        return lb.Ensemble(nets), lb.Gaussian(std=0.5, learn=True)

    trained = train_row(replace(row_of(tmp_path), make=make))
    assert len(trained.history) == 2 * trained.validation.epochs


@pytest.mark.parametrize("method", [None, lb.ImplicitNodes(components=2)])
def test_permuted_targets_do_not_beat_the_mean(tmp_path, method):
    x, y = table(200)
    y = y[torch.randperm(200, generator=torch.Generator().manual_seed(3))]
    trained = train_row(row_of(tmp_path, method, data=(x, (y - y.mean()) / y.std())))
    fresh_x, fresh_y = table(200)
    target = (fresh_y[torch.randperm(200, generator=torch.Generator().manual_seed(4))] - y.mean()) / y.std()
    p = lb.predict(trained.model, fresh_x, trained.likelihood)
    constant = torch.distributions.Normal(0.0, 1.0).log_prob(target).mean()
    assert float(p.log_prob(target).mean()) < float(constant) + 0.03  # no skill is found where there is none
    assert float(p.log_prob(target).mean()) > float(constant) - 0.2  # and little is lost


@pytest.mark.parametrize("method", [None, lb.Rank1(components=2), "linear"])
def test_with_40_validation_rows_permuted_targets_do_not_beat_the_mean(tmp_path, monkeypatch, method):
    """A row may gain no more than the smallest gain that counts, 0.01 nats, on 2,000 fresh rows."""
    monkeypatch.setattr(row_training, "FEW", 50)  # one split
    x, y = table(200)
    y = y[torch.randperm(200, generator=torch.Generator().manual_seed(3))]
    y = (y - y.mean()) / y.std()
    generator = torch.Generator().manual_seed(4)
    fresh_x, fresh_y = torch.randn(2000, 4, generator=generator), torch.randn(2000, 1, generator=generator)
    if method == "linear":
        p = BASELINES["linear"](x, y, 0, 0).predict(fresh_x)
    else:
        plain = row_of(tmp_path / "plain", data=(x, y)) if method else None
        trained = train_row(row_of(tmp_path, method, (x, y), plain=plain, convert_at_epoch=5 if method else 0))
        assert (trained.validation.how, trained.validation.rows) == ("split", 40)
        p = lb.predict(trained.model, fresh_x, trained.likelihood)
    gain = (p.log_prob(fresh_y) - BASELINES["mean"](x, y, 0, 0).predict(fresh_x).log_prob(fresh_y)).flatten()
    assert float(gain.mean()) < 0.01 + 4 * float(gain.std()) / math.sqrt(len(gain))
    assert float(gain.mean()) > -0.2


def test_few_large_images_get_a_rate_that_a_network_without_norms_bears():
    """At 0.1 LeNet ended at chance on one of three seeds of 2,000 images."""
    from leanbayes.compare.job import recipe

    assert recipe("quick", kind="image", rows=2000, side=28).lr == 0.01
    assert recipe("quick", kind="image", rows=1000, side=8).lr == 0.1


def test_targets_with_little_noise_get_less_initial_noise():
    entropy = 0.5 * math.log(2 * math.pi * math.e)  # of a standard Normal
    assert row_training.noise_scale(math.log(0.05) + entropy) == pytest.approx(0.04)
    assert row_training.noise_scale(2 * (math.log(0.05) + entropy), targets=2) == pytest.approx(0.04)
    assert row_training.noise_scale(math.log(0.25) + entropy + 1e-9) == 1.0
    assert row_training.noise_scale(None) == 1.0


@pytest.mark.parametrize(("noise", "less"), [(0.0, True), (1.0, False)])
def test_a_method_begins_with_the_noise_that_the_targets_bear(tmp_path, noise, less):
    """Factors with a noise of 10 % describe no target that the plain network predicts to a few percent."""
    x, y = table(60, noise)
    data = (x, y / y.std())
    asked = []

    def scaled(share):
        asked.append(share)
        method = lb.Rank1(components=2, init_std=0.1 * share)
        return row_of(tmp_path, method, data).make

    plain = row_of(tmp_path / "plain", data=data)
    late = {"convert_at_epoch": 28, "epochs": 40}
    row = replace(row_of(tmp_path / "a", lb.Rank1(components=2), data, plain=plain, **late), scaled=scaled)
    trained = train_row(row)
    assert (trained.validation.scale < 0.5) == less
    assert set(asked) == ({trained.validation.scale} if less else set())
    stored = json.loads((tmp_path / "a" / "validation.json").read_text())
    assert stored["scale"] == trained.validation.scale
    fixed = train_row(row_of(tmp_path / "b", lb.Rank1(components=2), data, plain=plain, **late))
    assert fixed.validation.scale is None
    assert "scale" not in json.loads((tmp_path / "b" / "validation.json").read_text())
    stds = [float(law.stddev.detach().mean()) for law in map(input_law, (trained.model, fixed.model))]
    assert (stds[0] < 0.8 * stds[1]) if less else stds[0] == stds[1]


def input_law(model):
    return model[0].posterior.input.distribution()


def test_each_member_of_an_ensemble_has_its_own_noise(tmp_path):
    """The first member is the plain network, so its noise is, too."""
    alike = {"patience": 0, "schedule": "cosine", "epochs": 60, "lr": 0.02}
    plain = train_row(row_of(tmp_path / "a", **alike))
    ensemble = train_row(row_of(tmp_path / "b", lb.DeepEnsemble(components=2), **alike))
    assert plain.validation.members is None
    found = ensemble.validation
    first = ensemble.likelihood.log_std[0].exp() / found.noise * found.members[0]
    assert first.item() == pytest.approx(plain.likelihood.log_std.exp().item(), rel=1e-3)
    again = train_row(row_of(tmp_path / "b", lb.DeepEnsemble(components=2), **alike))
    assert tuple(again.validation.members) == tuple(found.members)


def test_methods_with_members_that_are_not_plain_networks_have_none(tmp_path):
    alike = {"patience": 0, "schedule": "cosine", "epochs": 3}
    assert train_row(row_of(tmp_path / "a", lb.SWAG(components=2), **alike)).validation.members is None
    assert train_row(row_of(tmp_path / "b", lb.Rank1(), **alike)).validation.members is None
