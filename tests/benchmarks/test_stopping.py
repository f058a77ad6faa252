"""The comparison of stopping rules: its simulation is what `predict` does, and thresholds come from held-out rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import leanbayes as lb
from benchmarks.stopping import after_checks, apply, Case, cases, choose, CLASS_RULES, DESIGNS, LIMIT, TARGET_RULES


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


def test_the_page_has_the_tables_and_times_of_the_file():
    top = Path(__file__).parents[2]
    found, page = json.loads((top / "benchmarks/stopping.json").read_text()), top / "docs/design/0018-price.md"
    lines = page.read_text().splitlines()
    names = {
        "classes": ("divergence", "top class", "decided", "relative error", "fixed"),
        "targets": ("divergence", "standard error", "fixed"),
    }
    for kind, columns in names.items():
        assert f"| bound, nats | {' | '.join(columns)} |" in lines
        for bound in found[kind]["bounds"]:
            own = [bound["rules"][name] for name in columns]
            losses = [max(row["loss"] for row in rule["test"].values()) for rule in own]
            cells = [
                f"{r['draws']:.1f}, {r['test draws']:.1f}, {lost:.4f}" for r, lost in zip(own, losses, strict=True)
            ]
            assert f"| {bound['loss']:g} | {' | '.join(cells)} |" in lines
    text = " ".join(lines)
    for rows, place in ((1024, "at 1,024 rows"), (1, "at one row")):
        times = [one["time"] for one in found["classes"]["time"]["rows"] if one["rows"] == rows]
        assert f"{min(times):.2f} to {max(times):.2f} {place}" in text
    assert f"tolerance of {found['classes']['time']['tolerance']:.4f}" in text
    fixed = found["classes"]["bounds"][0]["rules"]["fixed"]["test"]
    lost = [f"{fixed[f'{name}, {design}']['loss']:.4f}" for name in ("implicit", "rank1") for design in DESIGNS]
    assert f"implicit {lost[0]} independent, {lost[1]} paired; rank-1 {lost[2]} and {lost[3]}." in text
    smaller = [bound["rules"]["divergence"]["threshold"] for bound in found["classes"]["bounds"][1:]]
    assert f"are {smaller[0]:.4f} and {smaller[1]:.4f}." in text
