"""Every example runs, writes its picture and its figures, and (slow) shows what its docstring claims."""

from __future__ import annotations

import json
import math

import pytest
import torch
from scipy.special import exp1

from examples import downhill, fine_tune, function_prior, user_loop, weight_priors, x_cubed

STAGES = ("plain", "converted", "tuned")


def written(folder, name):
    """Return the figures an example wrote, after a look at its picture."""
    assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return json.loads((folder / f"{name}.json").read_text())


def numbers(figures):
    """Yield every number in nested figures."""
    if isinstance(figures, dict):
        figures = list(figures.values())
    if isinstance(figures, list):
        for item in figures:
            yield from numbers(item)
    elif not isinstance(figures, str):
        yield figures


def all_finite(figures):
    return all(math.isfinite(number) for number in numbers(figures))


# ---------------------------------------------------------------------------------- small


def test_x_cubed_runs(tmp_path, capsys):
    figures = x_cubed.main(depths=(1, 2), steps=30, folder=tmp_path)
    assert [row["depth"] for row in figures] == [1, 2]
    assert all_finite(figures)
    assert all(0 < row["spread_inside"] < row["spread_outside"] for row in figures)
    assert written(tmp_path, "x_cubed")["depths"] == figures
    assert "depth 2" in capsys.readouterr().out


def test_fine_tune_runs(tmp_path, capsys):
    rows = fine_tune.main(epochs=1, images=64, folder=tmp_path)
    assert [row["network"] for row in rows] == ["plain", "rank1", "batch_ensemble", "implicit"]
    assert all_finite(rows)
    assert rows[0]["plain"] == rows[0]["converted"]  # the plain network is not converted
    assert all(0 <= row[stage]["accuracy"] <= 1 for row in rows for stage in STAGES)
    assert written(tmp_path, "fine_tune") == rows
    assert "mean change of accuracy" in capsys.readouterr().out


def test_user_loop_shows_its_claims(tmp_path, capsys):
    figures = user_loop.main(epochs=3, samples=8, folder=tmp_path)
    assert all_finite(figures)
    assert figures["accuracy"] > 0.9
    assert figures["epistemic_when_wrong"] > figures["epistemic_when_right"]
    assert figures["draw_is_off_by"] < 1e-5
    assert figures["loaded_is_off_by"] == 0
    assert written(tmp_path, "user_loop") == figures
    assert "exported a DigitNet" in capsys.readouterr().out


def test_weight_priors_order(tmp_path):
    figures = weight_priors.main(points=100, folder=tmp_path)
    assert all_finite(figures)
    near = {name: row["density_at_0.05"] for name, row in figures.items()}
    far = {name: row["beyond_5"] for name, row in figures.items()}
    assert near["r normal"] > near["r cauchy"] > near["w alone"] > near["r² inverse-gamma"]
    assert far["r cauchy"] > far["r² inverse-gamma"] > far["r normal"] > far["w alone"]
    assert written(tmp_path, "weight_priors") == figures


def test_function_prior_has_a_quarter_of_the_steps_under_dropout(tmp_path, capsys):
    figures = function_prior.main(folder=tmp_path)
    dropped, patched = figures.values()
    # A step is left if both weights of its unit are: 1000 functions of 100 units, each with probability 1 / 4.
    assert abs(dropped["steps"] - 25) < 4 * math.sqrt(100 * 0.25 * 0.75 / 1000)
    assert (dropped["places"], patched["steps"], patched["places"]) == (100, 100, 500)
    assert written(tmp_path, "function_prior") == figures
    assert "100.0 steps a function" in capsys.readouterr().out


def test_downhill_masks_soften_with_temperature(tmp_path, capsys):
    figures = downhill.main(folder=tmp_path)
    cold, warm, hot = figures["largest step down"].values()
    assert cold > warm > hot
    assert figures["best log alpha"] == pytest.approx(1.0, abs=0.1)
    assert figures["error of the sparse fit"] < 0.0095 < figures["error of the nested fit"] < 0.15
    assert written(tmp_path, "downhill") == figures


# ---------------------------------------------------------------------------------- oracles of functions


def sampled_functions(seed=0, count=20):
    generator = torch.Generator().manual_seed(seed)
    yield function_prior.dropped(count, 7, 0.5, generator)
    yield function_prior.patched(count, 7, 3, generator)


def test_functions_are_sums_of_signs():
    x = torch.linspace(-5, 5, 11, dtype=torch.float64)
    for networks in sampled_functions():
        output_bias, output_weight, hidden_bias, hidden_weight = (part.tolist() for part in networks)
        for n, values in enumerate(networks(x).tolist()):
            units = list(zip(output_weight[n], hidden_bias[n], hidden_weight[n], strict=True))
            for point, value in zip(x.tolist(), values, strict=True):
                expected = output_bias[n][0] + sum(W * math.copysign(1, b + w * point) for W, b, w in units)
                assert value == pytest.approx(expected, abs=1e-9)


def test_functions_step_where_their_places_say():
    """Between neighbouring places of all units a function changes if, and only if, the place is one of its own."""
    for networks in sampled_functions():
        ends = networks.places()[~networks.places().isnan()].unique()
        middles = torch.cat((ends[:1] - 1, (ends[1:] + ends[:-1]) / 2, ends[-1:] + 1))
        changed = networks(middles).diff().abs() > 1e-9
        for own, places in zip(changed, networks.places(), strict=True):
            assert torch.equal(ends[own], places[~places.isnan()].unique())


def test_places_of_steps_are_cauchy():
    places = function_prior.normal_networks(1, 20_000, torch.Generator().manual_seed(0)).places()
    share = 2 / math.pi * math.atan(function_prior.EDGE / 2)
    inside = (places.abs() < function_prior.EDGE).double().mean().item()
    assert abs(inside - share) < 4 * math.sqrt(share * (1 - share) / 20_000)


def test_patched_layers_are_whole_components():
    networks = function_prior.patched(200, 6, 3, torch.Generator().manual_seed(0))
    hidden = torch.cat((networks.hidden_bias, networks.hidden_weight), 1).unique(dim=0)
    output = torch.cat((networks.output_bias, networks.output_weight), 1).unique(dim=0)
    assert len(hidden) == len(output) == 3
    assert len(torch.cat(tuple(networks), 1).unique(dim=0)) == 9  # the layers choose each for itself


# ---------------------------------------------------------------------------------- oracles of the induced densities


def test_student_density_is_exact(tmp_path):
    figures = weight_priors.main(points=100, folder=tmp_path)
    assert figures["r² inverse-gamma"]["largest_error"] < 1e-12


def test_horseshoe_density_is_exact():
    """The horseshoe: (2 pi^3)^(-1/2) exp(w^2 / 2) E_1(w^2 / 2)."""
    w = torch.tensor([0.01, 0.1, 1.0, 3.0, 10.0], dtype=torch.float64)
    half = w.square() / 2
    expected = half.exp() * torch.from_numpy(exp1(half.numpy())) / math.sqrt(2 * math.pi**3)
    density = weight_priors.density(weight_priors.laws_of_r(1.0, 3.0)["r half_cauchy"], w)
    torch.testing.assert_close(density, expected, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("std", [0.1, 0.3, 1.0])
def test_densities_of_factors_integrate_to_one(std):
    for log_density in weight_priors.laws_of_r(std, 3.0).values():
        total = weight_priors.expect(log_density, torch.ones_like)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-6, atol=0.0)


# ---------------------------------------------------------------------------------- the claims, in full


@pytest.mark.slow
def test_x_cubed_in_full(tmp_path):
    figures = x_cubed.main(folder=tmp_path)
    assert [row["depth"] for row in figures] == [1, 2, 3, 4, 5]
    for row in figures:
        assert row["rmse_data"] < 1.2 * x_cubed.NOISE  # fits to the noise, where x^3 has a standard deviation of 24
        assert row["rmse_curve"] < 1.2 * x_cubed.NOISE
        assert row["data_in_band"] >= 0.85
        assert row["spread_outside"] > 2.5 * row["spread_inside"]
    shallow, *_, deep = figures
    assert deep["spread_inside"] > 0.5 * shallow["spread_inside"]  # no collapse with depth
    assert deep["spread_outside"] > 0.5 * shallow["spread_outside"]


@pytest.mark.slow
def test_fine_tune_in_full(tmp_path):
    rows = fine_tune.main(seeds=(0, 1, 2), folder=tmp_path)
    assert all(row["plain"]["accuracy"] > 0.97 for row in rows)
    # One test image is 0.2 %. By chance a run wins or loses up to three, the plain network's extra epoch does so, too:
    # the means below have standard errors of about 0.1 % (nine runs) and 0.2 % (three).
    converted = [row for row in rows if row["network"] != "plain"]
    assert sum(row["change"] for row in converted) / len(converted) > -0.003
    for name in ("rank1", "batch_ensemble", "implicit"):
        changes = [row["change"] for row in converted if row["network"] == name]
        assert sum(changes) / len(changes) > -0.005, name
        nll = {stage: sum(row[stage]["nll"] for row in converted if row["network"] == name) for stage in STAGES}
        assert nll["tuned"] < nll["converted"], name
