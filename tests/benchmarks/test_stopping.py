"""The comparison of stopping rules: its simulation is what `predict` does, and thresholds come from held-out rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb
from benchmarks.stopping import after_checks, apply, Case, cases, choose, CLASS_RULES, LIMIT, TARGET_RULES


@pytest.mark.parametrize("design", ["independent", "paired"])
@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Gaussian(0.3)], ids=["classes", "targets"])
def test_the_simulated_rule_is_that_of_predict(likelihood, design):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model, x = lb.convert(net, lb.Rank1(init_std=0.4), likelihood=likelihood), torch.randn(60, 6)
    y = torch.zeros(60, dtype=torch.long) if isinstance(likelihood, lb.Categorical) else torch.zeros(60, 3)
    rules = CLASS_RULES if isinstance(likelihood, lb.Categorical) else TARGET_RULES
    p = lb.predict(model, x, samples=LIMIT, seed=1, design=design)
    one = Case("all", *after_checks(p, y, unit=2 if design == "paired" else 1))
    tolerance = 0.003 if isinstance(likelihood, lb.Categorical) else 0.03
    found = apply([one], [[rules["divergence"](stage) for stage in one.stages]], tolerance)["all"]
    draws = lb.predict(model, x, samples=LIMIT, seed=1, design=design, tolerance=tolerance).draws
    assert 4 < found["draws"] < 16
    assert found["draws"] == pytest.approx(draws.double().mean().item())
    assert found["nll"] == pytest.approx(-p.log_prob(y).double().mean().item(), rel=1e-5)


def test_thresholds_come_from_held_out_rows_alone():
    torch.manual_seed(0)
    model = lb.convert(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), lb.Rank1(init_std=0.4))
    one, other = (list(cases("a", model, torch.randn(80, 6), torch.randint(3, (80,)))) for _ in range(2))
    first, second = (choose(one, test, CLASS_RULES, (1.0, 1e-9)) for test in (one, other))
    for mine, theirs in zip(first, second, strict=True):
        assert mine["best"] == theirs["best"]
        assert all(mine["rules"][name]["threshold"] == theirs["rules"][name]["threshold"] for name in CLASS_RULES)
    assert "fixed" in first[0]["best"]  # a bound that everything fits
    for own in first[1]["rules"].values():
        assert all(row["loss"] <= 1e-9 for row in own["held out"].values())
