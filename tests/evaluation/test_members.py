"""The figures of the members of an ensemble are those of each network alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.evaluation.members import alone


def networks(outputs):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs)) for _ in range(3)]


def test_members_at_their_temperatures_have_the_figures_of_their_networks():
    nets, x, y = networks(7), torch.randn(60, 4), torch.randint(7, (60,))
    held = [lb.recalibrate.Temperature("mean").fit(lb.predict(net, x[:30]), y[:30]) for net in nets]
    images = lb.shift.Shift(
        images=torch.rand(6, 1, 2, 2), y=y[:6], inputs=lambda rows: rows.flatten(1), corruptions=("gaussian_noise",)
    )
    data = {"ood": {"far": (x * 5, None)}, "shift": images, "shift_data": {"later": (x[:20] + 1, y[:20])}}
    whole = lb.evaluate(lb.Ensemble(nets), (x[30:], y[30:]), members=held, temperature=held[0], **data)
    members = whole.metrics["members"]
    assert len(members) == 3
    for net, temperature, member in zip(nets, held, members, strict=True):
        own = lb.evaluate(net, (x[30:], y[30:]), temperature=temperature, **data).metrics["tempered"]
        assert member["temperature"] == own["temperature"] != 1
        for name in ("nll", "accuracy", "ece"):
            assert member["test"][name] == pytest.approx(own["test"][name], rel=1e-5)
            assert member["shift_data"]["later"][name] == pytest.approx(own["shift_data"]["later"][name], rel=1e-5)
            assert [row[name] for row in member["shift"]] == pytest.approx(
                [row[name] for row in own["shift"]], rel=1e-5
            )
        assert member["ood"]["far"]["auroc"] == pytest.approx(own["ood"]["far"]["auroc"])
    without = lb.evaluate(lb.Ensemble(nets), (x[30:], y[30:]), temperature=held[0], **data).metrics
    assert {name: found for name, found in whole.metrics.items() if name != "members"} == without


def test_members_with_real_targets_have_the_densities_of_their_networks():
    nets, x = networks(1), torch.randn(40, 4)
    y, likelihood = x.sum(1, keepdim=True), lb.Gaussian(std=0.5)
    factors = (0.5, 1.0, 3.0)
    temperatures = [lb.recalibrate.Temperature.of(factor, likelihood) for factor in factors]
    found = lb.evaluate(lb.Ensemble(nets), (x, y), likelihood=likelihood, members=temperatures).metrics["members"]
    for net, factor, member in zip(nets, factors, found, strict=True):
        with torch.no_grad():
            expected = torch.distributions.Normal(net(x), 0.5 * factor).log_prob(y).mean()
        assert member["test"]["lpd"] == pytest.approx(float(expected), rel=1e-5)


def test_the_prediction_of_one_draw_has_no_epistemic_uncertainty():
    p = lb.predict(lb.Ensemble(networks(7)), torch.randn(5, 4))
    one = alone(p, 1)
    assert torch.equal(one.mean, p.samples[1])
    assert torch.equal(one.total, one.aleatoric)
    assert not one.epistemic.any()
    assert one.total == pytest.approx(torch.distributions.Categorical(one.mean).entropy(), abs=1e-6)
    with pytest.raises(ValueError, match="keep_samples=True"):
        alone(lb.predict(lb.Ensemble(networks(7)), torch.randn(5, 4), keep_samples=False), 0)
