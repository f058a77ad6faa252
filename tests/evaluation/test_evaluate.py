"""`evaluate` against the metrics computed by hand, for classes and for real targets."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.evaluation.cost import measure_cost
from leanbayes.evaluation.evaluate import in_units, numbers


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 7))
    x, y = torch.randn(60, 4), torch.randint(7, (60,))
    return net, lb.convert(net, lb.Rank1(prior_std=0.3, init_std=0.2)), x, y


def test_figures_are_those_of_the_prediction(classifier):
    _, bnn, x, y = classifier
    result = lb.evaluate(bnn, (x, y), ood={"far": (x * 5, None)}, samples=8, seed=3)
    p = lb.predict(bnn, x, samples=8, seed=3)
    test = result.metrics["test"]
    assert test["accuracy"] == pytest.approx((p.mean.argmax(1) == y).double().mean().item())
    assert test["nll"] == pytest.approx(-p.log_prob(y).mean().item(), rel=1e-6)
    assert test["top5"] == pytest.approx(lb.metrics.top_k_accuracy(p.mean, y, 5).item())
    assert test["disagreement"] == pytest.approx(lb.metrics.disagreement(p.samples, y, "members").item())
    far = lb.predict(bnn, x * 5, samples=8, seed=3)
    found = result.metrics["ood"]["far"]
    assert found["auroc"] == pytest.approx(lb.metrics.auroc(p.total, far.total).item())
    assert found["scores"]["mutual_information"]["auroc"] == pytest.approx(
        lb.metrics.auroc(p.epistemic, far.epistemic).item()
    )
    assert sum(b["count"] for b in result.figures["reliability"]["bins"]) == 60
    for shares in result.figures["histograms"]["total"]["counts"].values():
        assert sum(shares) == pytest.approx(1, abs=1e-4)
    json.dumps({"metrics": result.metrics, "figures": result.figures}, allow_nan=False)


def test_figures_at_a_temperature_are_those_of_the_changed_prediction(classifier):
    _, bnn, x, y = classifier
    held = lb.recalibrate.Temperature("mean").fit(lb.predict(bnn, x[:30], samples=8), y[:30])
    images = lb.shift.Shift(
        images=torch.rand(6, 1, 2, 2), y=y[:6], inputs=lambda rows: rows.flatten(1), corruptions=("gaussian_noise",)
    )
    result = lb.evaluate(bnn, (x[30:], y[30:]), ood={"far": (x * 5, None)}, samples=8, temperature=held, shift=images)
    changed, far = (held(lb.predict(bnn, rows, samples=8)) for rows in (x[30:], x * 5))
    tempered = result.metrics["tempered"]
    assert tempered["temperature"] == held.temperature != 1
    assert tempered["test"]["nll"] == pytest.approx(lb.metrics.nll(changed.mean, y[30:]).item(), rel=1e-6)
    assert tempered["test"]["accuracy"] == result.metrics["test"]["accuracy"]
    assert tempered["ood"]["far"]["auroc"] == pytest.approx(lb.metrics.auroc(changed.total, far.total).item())
    assert [row["corruption"] for row in tempered["shift"]] == [row["corruption"] for row in result.metrics["shift"]]
    assert tempered["shift"][-1]["nll"] != result.metrics["shift"][-1]["nll"]
    assert tempered["shift"][-1]["accuracy"] == result.metrics["shift"][-1]["accuracy"]


def test_own_metrics_take_the_place_of_the_usual_ones(classifier):
    _, bnn, x, y = classifier
    own = {"sharpness": lambda p, _: p.mean.max(1).values.mean(), "wrong": lambda p, y: (p.mean.argmax(1) != y).sum()}
    result = lb.evaluate(
        bnn, (x, y), ood={"far": (x * 5, None)}, samples=4, metrics=own | {"none": lambda *_: math.nan}
    )
    p = lb.predict(bnn, x, samples=4)
    assert result.metrics["test"] == {
        "sharpness": pytest.approx(p.mean.max(1).values.mean().item()),
        "wrong": (p.mean.argmax(1) != y).sum().item(),
        "none": None,
    }
    assert result.figures == {}
    assert (
        result.metrics["ood"]["far"]
        == lb.evaluate(bnn, (x, y), ood={"far": (x * 5, None)}, samples=4).metrics["ood"]["far"]
    )


def test_loaders_shuffled_or_not_give_the_same_figures(classifier):
    _, bnn, x, y = classifier
    whole = lb.evaluate(bnn, (x, y), samples=4).metrics["test"]
    data = TensorDataset(x, y)
    torch.manual_seed(5)
    for source in (data, DataLoader(data, batch_size=13, shuffle=True)):
        again = lb.evaluate(bnn, source, samples=4).metrics["test"]
        for name in ("accuracy", "nll", "ece", "aurc", "disagreement"):
            assert again[name] == pytest.approx(whole[name], rel=1e-5)


def test_an_ensemble_is_judged_by_its_members_not_by_repeats_of_them(classifier):
    net, _, x, y = classifier
    ensemble = lb.convert(net, lb.DeepEnsemble(components=3))
    result = lb.evaluate(ensemble, (x, y), samples=16, plain=net)
    assert len(result.prediction.samples) == 3
    assert result.cost.passes == 3
    assert result.cost.extra_percent == pytest.approx(200)


def test_plain_network_costs_what_it_costs(classifier):
    net, bnn, x, y = classifier
    cost = measure_cost(net, net, x, y)
    assert (cost.train_step_ratio, cost.predict_ratio, cost.passes, cost.extra_parameters) == (1.0, 1.0, 1, 0)
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    cost = measure_cost(bnn, net, x, y, turns=2)
    assert cost.train_step_ratio > 0
    assert cost.passes == 16
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())


def test_regression_is_judged_in_the_targets_own_units():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    bnn = lb.convert(net, lb.ImplicitNodes(), likelihood=lb.Gaussian(std=0.5))
    x = torch.randn(40, 3)
    raw = 100 + 20 * x.sum(1, keepdim=True)
    mean, std = raw.mean(0), raw.std(0)
    result = lb.evaluate(bnn, (x, raw), samples=6, units=(mean, std))
    p = lb.predict(bnn, x, samples=6)
    y = (raw - mean) / std
    test = result.metrics["test"]
    assert test["rmse"] == pytest.approx((p.mean - y).square().mean().sqrt().item() * std.item(), rel=1e-5)
    assert test["lpd"] == pytest.approx(p.log_prob(y).mean().item() - math.log(std.item()), rel=1e-4)
    assert test["crps"] == pytest.approx(lb.metrics.crps(p.samples, p.variances, y).item() * std.item(), rel=1e-4)
    levels = result.figures["reliability"]["levels"]
    assert [row["level"] for row in levels][:2] == [0.05, 0.1]
    assert all(a["coverage"] <= b["coverage"] for a, b in pairwise(levels))
    there = in_units(p, mean, std)
    torch.testing.assert_close(there.total, there.aleatoric + there.epistemic)


def yes_or_no(labels):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, labels))
    bnn = lb.convert(net, lb.Rank1(init_std=0.3), likelihood=lb.Bernoulli())
    x = torch.randn(50, 4)
    return net, bnn, x, (torch.rand(50, labels) < (2 * x[:, :1]).sigmoid()).float()


def binned(probability, happened):
    """Compare probabilities with frequencies in 15 bins, row by row."""
    bins = [min(max(math.ceil(15 * p) - 1, 0), 14) for p in probability]
    gaps = [sum(h - p for p, h, b in zip(probability, happened, bins, strict=True) if b == k) for k in range(15)]
    return sum(map(abs, gaps)) / len(probability)


@pytest.mark.parametrize("labels", [1, 5])
def test_yes_or_no_is_judged_label_by_label(labels):
    """Oracles: scikit-learn, and calibration errors added up by hand."""
    from sklearn import metrics

    _, bnn, x, y = yes_or_no(labels)
    test = lb.evaluate(bnn, (x, y), samples=8, seed=3).metrics["test"]
    p, truth = lb.predict(bnn, x, samples=8, seed=3).mean.double().flatten().numpy(), y.flatten().numpy()
    right = (p > 0.5) == truth
    assert test["accuracy"] == pytest.approx(metrics.accuracy_score(truth, p > 0.5))
    assert test["nll"] == pytest.approx(metrics.log_loss(truth, p), rel=1e-6)
    assert test["brier"] == pytest.approx(2 * metrics.brier_score_loss(truth, p), rel=1e-6)
    assert test["ece"] == pytest.approx(binned(abs(p - 0.5) + 0.5, right), rel=1e-5)
    assert test["classwise_ece"] == pytest.approx(binned(p, truth), rel=1e-5)
    order = abs(p - 0.5).argsort()[::-1]
    risks = (~right[order]).cumsum() / range(1, len(p) + 1)
    assert test["aurc"] == pytest.approx(risks.mean(), rel=1e-6)


@pytest.mark.parametrize("labels", [1, 5])
def test_yes_or_no_scores_as_two_classes_do(labels):
    net, bnn, x, y = yes_or_no(labels)
    two = nn.Sequential(net, nn.Unflatten(1, (1, labels)), nn.ZeroPad2d((0, 0, 1, 0)))  # logits 0 and z of no and yes
    one, other = (
        lb.evaluate(model, (x, targets), likelihood=likelihood, ood={"far": (5 * x, None)})
        for model, targets, likelihood in ((net, y, lb.Bernoulli()), (two, y.long(), lb.Categorical()))
    )
    assert one.metrics["test"] == pytest.approx(other.metrics["test"], rel=1e-5)
    assert one.metrics["ood"]["far"]["scores"] == other.metrics["ood"]["far"]["scores"]
    assert one.prediction.mean.shape == (50, labels)
    json.dumps({"metrics": one.metrics, "figures": one.figures}, allow_nan=False)
    if labels == 1:  # the last axis may be missing, and targets may be of any type
        for same in (y[:, 0], y[:, 0].long(), y.bool(), y.to(torch.uint8)):
            assert lb.evaluate(bnn, (x, same)).metrics == lb.evaluate(bnn, (x, y)).metrics


def test_yes_or_no_needs_answers():
    _, bnn, x, y = yes_or_no(2)
    with pytest.raises(ValueError, match="expected Bernoulli targets to be 0 or 1"):
        lb.evaluate(bnn, (x, 0.9 * y))


def test_yes_or_no_under_corruption():
    net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 2))
    images, y = torch.rand(6, 1, 28, 28), torch.tensor([[0, 1]] * 6)
    shift = lb.shift.Shift(images, y, inputs=lambda raw: raw, corruptions=("contrast",), severities=(2,))
    result = lb.evaluate(net, (images, y), likelihood=lb.Bernoulli(), shift=shift)
    (clean, _), test = result.metrics["shift"], result.metrics["test"]
    assert {name: clean[name] for name in ("accuracy", "nll", "ece")} == pytest.approx(
        {name: test[name] for name in ("accuracy", "nll", "ece")}
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_classes_of_any_whole_type_with_some_ignored(classifier, dtype):
    _, bnn, x, y = classifier
    some = torch.where(torch.arange(60) < 20, 99, y).to(dtype)
    found = lb.evaluate(bnn, (x, some), likelihood=lb.Categorical(ignore_index=99)).metrics["test"]
    p = lb.predict(bnn, x)
    assert found["nll"] == pytest.approx(F.nll_loss(p.mean[20:].log(), y[20:]).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx(lb.metrics.accuracy(p.mean[20:], y[20:]).item())


def test_what_is_not_finite_becomes_null():
    assert numbers({"a": torch.tensor(float("nan")), "b": 2}) == {"a": None, "b": 2.0}


def test_wrong_arguments_are_told_in_our_words(classifier):
    _, bnn, x, y = classifier
    for wrong, said in (
        ({"test": x}, "expected test to be a pair"),
        ({"test": (x, y), "ood": (x, None)}, "expected ood to be data by name"),
        ({"test": (x, y), "ood": {"far": x}}, "expected far to be a pair"),
        ({"test": (x, y), "shift": "fog"}, "expected shift to be"),
    ):
        with pytest.raises(TypeError, match=said):
            lb.evaluate(bnn, **wrong)
    with pytest.raises(TypeError, match="got a list of 3; nest several inputs"):
        lb.evaluate(bnn, TensorDataset(x, x, y))


def test_rows_of_another_origin_have_figures_of_their_own():
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 4), torch.randn(50, 3), torch.randint(4, (50,))
    moved = (x[:20] + 1, y[:20])
    found = lb.evaluate(net, (x, y), shift_data={"later": moved}).metrics
    alone = lb.evaluate(net, moved).metrics["test"]
    assert found["shift_data"]["later"]["rows"] == 20
    for name in ("accuracy", "nll", "ece"):
        assert found["shift_data"]["later"][name] == pytest.approx(alone[name])
    assert "shift_data" not in lb.evaluate(net, (x, y)).metrics
    with pytest.raises(TypeError, match="expected shift_data to be data by name"):
        lb.evaluate(net, (x, y), shift_data=moved)
