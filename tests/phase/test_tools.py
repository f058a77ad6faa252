"""Procedures, sparse ensembles, diagnostics and the callback, on a network that keeps its knowledge in variances."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.phase.transition import histogram

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0].abs() > 0.7).long()


def knower() -> nn.Module:
    """Return a network that tells |x_0| by the size of its noise: every mean is zero, one deviation is not.

    The hidden units are N(0, x_0^2); the output compares their squares with a threshold, so draws vote by |x_0|.
    """
    net = nn.Sequential(nn.Linear(4, 32, bias=False), lb.layers.Abs(), nn.Linear(32, 2))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].weight[:, 0] = 1e-3
        net[2].weight.copy_(torch.stack([-torch.ones(32), torch.ones(32)]))
        expected = 0.7 * math.sqrt(2 / math.pi) * 32  # the mean of the sum of |N(0, 0.7^2)|
        net[2].bias.copy_(torch.tensor([expected, -expected]))
    bnn = lb.convert(net, lb.VarianceLayers(init_log_alpha=2 * math.log(1e3)), where="0")
    return bnn.eval()


def test_the_ensemble_knows_what_the_means_do_not():
    found = lb.phase.accuracies(knower(), (X, Y), samples=50)
    assert found["ensemble"] > 0.85
    assert found["deterministic"] == pytest.approx((Y == 0).float().mean().item())
    assert found["deterministic"] < found["stochastic"] <= found["ensemble"] + 0.02


def test_procedures_are_the_library_s_own_predictions():
    bnn = knower()
    one = lb.phase.infer(bnn, X, "stochastic", seed=3).mean
    torch.testing.assert_close(one, lb.predict(bnn, X, samples=1, seed=3).mean)
    torch.testing.assert_close(lb.phase.infer(bnn, X, "deterministic").mean, lb.mean(bnn)(X).softmax(1))
    fresh = lb.phase.infer(bnn, X, "ensemble", samples=4, noise="activation").mean
    torch.testing.assert_close(fresh, lb.predict(bnn, X, samples=4, noise="activation").mean)
    with pytest.raises(ValueError, match="procedure to be one of deterministic, stochastic, ensemble, got 'mean'"):
        lb.phase.infer(bnn, X, "mean")


def test_weights_below_the_threshold_are_dropped_and_the_others_drawn_as_before():
    bnn = knower()
    scores = {"0": bnn[0].scales.detach().square()}
    sparse = lb.phase.sparsify(bnn, scores, 0.5)
    assert (sparse.kept, sparse.total, sparse.share, sparse.compression) == (32, 128, 0.75, 4.0)
    torch.testing.assert_close(lb.predict(sparse.model, X, samples=5).mean, lb.predict(bnn, X, samples=5).mean)
    nothing = lb.phase.sparsify(bnn, scores, 2.0, instead="mean")
    assert nothing.kept == 0
    torch.testing.assert_close(lb.draw(nothing.model)(X), lb.mean(bnn)(X))
    zero = lb.phase.sparsify(bnn, scores, 2.0, instead="zero")
    assert lb.draw(zero.model)[0].weight.abs().max() == 0
    assert bnn[0].method.parameterization == "layer"


def test_sparse_ensembles_can_be_saved(tmp_path):
    bnn = knower()
    sparse = lb.phase.sparsify(bnn, {"0": bnn[0].scales.detach().square()}, 0.5).model
    lb.save(sparse, tmp_path / "sparse.safetensors")
    plain = nn.Sequential(nn.Linear(4, 32, bias=False), lb.layers.Abs(), nn.Linear(32, 2))
    again = lb.load(tmp_path / "sparse.safetensors", plain)
    torch.testing.assert_close(lb.predict(again, X, samples=3).mean, lb.predict(sparse, X, samples=3).mean)
    assert lb.kl(sparse).isfinite()


def test_wrong_scores_are_refused():
    with pytest.raises(ValueError, match="expected scores of variance layers among 0, got head"):
        lb.phase.sparsify(knower(), {"head": torch.zeros(2)}, 1.0)
    with pytest.raises(ValueError, match="instead to be one of mean, zero"):
        lb.phase.sparsify(knower(), {"0": torch.zeros(32, 4)}, 1.0, instead="median")
    for scores in (torch.tensor(1.0), torch.zeros(4), torch.full((32, 4), torch.nan)):
        with pytest.raises(ValueError, match="expected a score for each weight of layer '0', "):
            lb.phase.sparsify(knower(), {"0": scores}, 0.5)
    with pytest.raises(ValueError, match="expected a model with variance layers"):
        lb.phase.prune(nn.Linear(4, 3))
    alone = lb.convert(nn.Linear(4, 3), lb.VarianceLayers())
    with pytest.raises(ValueError, match="the model is itself a variance layer; put it into"):
        lb.phase.zero_means(alone)


def test_sparse_variational_dropout_prunes_by_log_alpha():
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(4, 3)), lb.VarianceLayers(parameterization="weight"))
    with torch.no_grad():
        bnn[0].posterior.log_alpha.copy_(torch.linspace(-5, 6, 12).view(3, 4))
    found = lb.phase.prune(bnn)
    assert found.kept == int((torch.linspace(-5, 6, 12) <= 3).sum())
    assert (lb.mean(found.model)[0].weight == 0).sum() == 12 - found.kept


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Linear(5, 3), nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 2, 3)])
def test_pruning_neurons_zeroes_the_weights_of_noisy_outputs(layer):
    bnn = lb.convert(nn.Sequential(layer), lb.VarianceLayers(parameterization="neuron"))
    outputs = bnn[0].posterior.log_alpha.numel()
    with torch.no_grad():
        bnn[0].posterior.log_alpha.copy_(torch.linspace(-5, 6, outputs))
    weight = lb.mean(lb.phase.prune(bnn).model)[0].weight
    by_output = weight.movedim(1 if isinstance(layer, nn.ConvTranspose2d) else 0, 0).flatten(1)
    assert ((by_output != 0).all(1) == (torch.linspace(-5, 6, outputs) <= 3)).all()
    assert ((by_output == 0).all(1) == (torch.linspace(-5, 6, outputs) > 3)).all()


def test_the_means_may_go_but_the_deviations_may_not_be_shuffled():
    bnn = knower()
    whole = lb.phase.accuracies(bnn, (X, Y), samples=50)["ensemble"]
    without = lb.phase.accuracies(lb.phase.zero_means(bnn), (X, Y), samples=50)["ensemble"]
    shuffled = lb.phase.accuracies(lb.phase.permute_scales(bnn), (X, Y), samples=50)["ensemble"]
    assert without == pytest.approx(whole, abs=0.03)
    assert shuffled < whole - 0.1
    with pytest.raises(ValueError, match="expected a model with variance layers"):
        lb.phase.zero_means(nn.Linear(2, 2))


def test_the_callback_records_every_epoch_and_plots(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 2))
    bnn = lb.convert(net, lb.VarianceLayers(), where="0")
    watch = lb.phase.Transition((X, Y), curvature=(X[:50], Y[:50]), samples=3)
    lb.fit(bnn, (X, Y), lb.Recipe(epochs=3, batch_size=50, lr=0.05), callbacks=[watch], progress=False)
    assert [row["epoch"] for row in watch.rows] == [1, 2, 3]
    last = watch.rows[-1]
    assert last["log_alpha"] == {"0": pytest.approx(bnn[0].log_alpha.item())}
    assert last["ensemble"] == lb.phase.accuracies(bnn, (X, Y), samples=3)["ensemble"]
    assert sum(last["kappa"]["0"]["counts"]) == 64
    assert last["sampled"] == {"0": int((lb.phase.kappa(bnn, (X[:50], Y[:50]))["0"] > 10**1.5).sum())}
    json.dumps(watch.rows, allow_nan=False)
    watch.plot(tmp_path / "transition.svg")
    assert "<svg" in (tmp_path / "transition.svg").read_text()


def test_the_callback_waits_for_the_conversion_and_skips_epochs():
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(4, 2)), lb.VarianceLayers())
    watch = lb.phase.Transition((X, Y), every=2)
    recipe = lb.Recipe(epochs=5, batch_size=100, convert_at_epoch=2)
    lb.fit(bnn, (X, Y), recipe, callbacks=[watch], progress=False)
    assert [row["epoch"] for row in watch.rows] == [4]
    with pytest.raises(ValueError, match="expected at least one epoch to plot"):
        lb.phase.Transition((X, Y)).plot("nowhere.svg")


def test_the_callback_records_after_a_whole_number_of_epochs():
    with pytest.raises(ValueError, match="expected every to be a whole number of at least 1, got 0"):
        lb.phase.Transition((X, X), every=0)


def test_histograms_count_every_weight():
    found = histogram(torch.tensor([0.0, 1e-3, 1.0, 1.0, 50.0]))
    assert sum(found["counts"]) == 5
    assert found["edges"][0] == -25
    assert found["edges"][-1] == 2
