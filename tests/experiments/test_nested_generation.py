"""Codes of every length: what is trained and judged, the paper's numbers, pictures, and a tiny run on the digits."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from leanbayes.generative import JointVAE, VNDAutoencoder
from leanbayes_papers import nested_coders, nested_generation_page, SUITES
from leanbayes_papers.nested_coders import coder, dimensions, lengths, MODELS, pixels, samples, taught
from leanbayes_papers.nested_generation import judged, trainings
from leanbayes_papers.nested_generation_page import overview, PRINTED, say, told
from leanbayes_papers.nested_pictures import doubled, packed, rows, tree, unpacked
from leanbayes_papers.runner import run
from leanbayes_papers.study import Case
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import loaded

pytest.importorskip("matplotlib")


def quick(tmp_path) -> Setting:
    return Setting(device="cpu", root=str(tmp_path), data=("digits",))


def short_plan(tmp_path, model: str, length: int = 4, epochs: int = 1):
    plan = coder(quick(tmp_path), "digits", model, length)
    return replace(plan, widths=(8, 16), recipe=replace(plan.recipe, epochs=epochs))


# ------------------------------------------------------------------------------------ what is trained


def test_one_ordered_code_and_a_vae_for_each_length():
    assert list(trainings(128)) == [
        ("VND-AE", 128),
        *(("VAE", length) for length in (32, 64, 96, 128)),
        *((name, 128) for name in ("BetaVAE", "JointVAE", "SWAE")),
    ]
    rows_of = [row for name, length in trainings(128) for row in judged(name, length, 128)]
    assert {(name, percent) for name, percent, _ in rows_of} - set(PRINTED) == {
        ("VAE, cut", percent) for percent in ("25", "50", "75")
    }
    assert len(rows_of) == len(set(rows_of)) == len(PRINTED) + 3
    assert all(length == 128 * int(percent) // 100 for _, percent, length in rows_of)


@pytest.mark.parametrize("model", MODELS)
def test_models_of_a_length_share_encoder_and_decoder(tmp_path, model):
    plan = coder(quick(tmp_path), "digits", model, 4)
    made, other = plan.make((1, 8, 8), 0), plan.make((1, 8, 8), 0)
    assert made.dimensions == 4
    assert made.decoder.first.in_features == 4 + (made.categories if isinstance(made, JointVAE) else 0)
    assert made.decode(made.prior_codes(3, seed=0)).shape == (3, 1, 8, 8)
    for a, b in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_full_budget_has_the_papers_code_and_the_prior_is_long(tmp_path):
    full = Setting(budget="full", root=str(tmp_path))
    plan = coder(full, "cifar10", "VND-AE", dimensions(full, "cifar10"))
    assert (plan.dimensions, plan.widths) == (128, (32, 64, 128, 256, 512))
    assert dict(plan.options) == {"prior_keep": 0.98}
    assert dict(coder(full, "cifar10", "BetaVAE", 128).options) == {"beta": 4.0}
    assert lengths(128) == {"25": 32, "50": 64, "75": 96, "100": 128}


def test_a_finished_training_is_read_and_another_setting_has_another_folder(tmp_path):
    plan, case = short_plan(tmp_path, "VND-AE"), Case((), tmp_path, (0,), "quick", "cpu")
    first = taught(plan, case, 0)
    states = {path: path.stat().st_mtime_ns for path in plan.folder(tmp_path, 0).rglob("*") if path.is_file()}
    assert states
    second = taught(plan, case, 0)
    assert {path: path.stat().st_mtime_ns for path in states} == states
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for other in (replace(plan, options=(("prior_keep", 0.5),)), replace(plan, dimensions=5)):
        assert other.folder(tmp_path, 0) != plan.folder(tmp_path, 0)
    moved = replace(plan, source=replace(plan.source, root="elsewhere"))
    assert moved.folder(tmp_path, 0) == plan.folder(tmp_path, 0)


def test_samples_share_their_noise_between_lengths_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(nested_coders, "BATCH", 4)
    model = short_plan(tmp_path, "VND-AE").make((1, 8, 8), 0)
    assert isinstance(model, VNDAutoencoder)
    found = samples(model, 10, 3)
    assert found.shape == (10, 1, 8, 8)
    torch.testing.assert_close(found[4:8], model.sample(4, length=3, seed=1))
    assert not torch.equal(found[:4], found[4:8])


def test_pixels_are_shares_of_white(tmp_path):
    data = loaded(quick(tmp_path).source("digits", quick_rows=1000))
    x = pixels(data.train)
    assert (x.min(), x.max()) == (0, 1)
    torch.testing.assert_close(data.inputs(x), data.inputs(data.train.x))  # what the classifier sees


# ------------------------------------------------------------------------------------ pictures


def test_pictures_are_put_together_and_survive_json():
    images = torch.rand(2, 3, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    picture = rows(list(images))
    assert picture.shape == (2 * 4, 3 * 5, 3)
    torch.testing.assert_close(picture[4:8, 10:15], images[1, 2].movedim(0, 2))
    again = unpacked(json.loads(json.dumps(packed(picture))))
    assert again.dtype == torch.uint8
    assert (again / 255 - picture).abs().max() <= 0.5 / 255 + 1e-6


def test_a_tree_has_every_image_above_its_successors():
    levels = [torch.full((2**k, 1, 2, 2), 0.1 * k) for k in range(3)]
    picture = tree(levels)[..., 0]
    assert picture.shape == (6, 8)
    white = torch.ones(2, 3)
    torch.testing.assert_close(picture[:2], torch.cat([white, levels[0][0, 0], white], 1))
    assert [round(value, 1) for value in picture[2].tolist()] == [1, 0.1, 0.1, 1, 1, 0.1, 0.1, 1]
    torch.testing.assert_close(picture[4:], torch.full((2, 8), 0.2))


def test_lengths_double():
    assert doubled(8) == [1, 2, 4, 8]
    assert doubled(96) == [1, 2, 4, 8, 16, 32, 64, 96]


# ------------------------------------------------------------------------------------ the page


def test_the_papers_numbers_are_those_of_cifar():
    assert PRINTED["VND-AE", "100"] == (114.12, 3.36, 0.805)
    assert PRINTED["VAE", "25"] == (175.17, 2.71, 0.947)
    ratios = [PRINTED["VND-AE", str(p)][2] / PRINTED["VAE", str(p)][2] for p in (25, 50, 75, 100)]
    assert 1.08 < min(ratios) < max(ratios) < 1.16  # as the claim says


def test_seeds_are_averaged_and_the_papers_numbers_stand_beside_cifar():
    runs = [{"frechet": 1.0, "inception": 2.0, "reconstruction": 0.5, "diversity": 4.0}] * 2
    runs = [runs[0], {**runs[1], "frechet": 3.0}]
    assert told(runs, "frechet") == "2.000 ± 1.414"
    assert told(runs[:1], "frechet") == "1.000"
    studies = {name: {"data": name, "methods": {"VAE": {"25": runs}}} for name in ("cifar10", "mnist")}
    page = overview({**studies, "pictures": {}})
    ours = ["2.000 ± 1.414", "2.000 ± 0.000", "0.5000 ± 0.0000", "4.000 ± 0.000"]
    assert page.rows[0][:3] == ["cifar10", "VAE", "25"]
    assert page.rows[0][3:] == [ours[0], "175.17", ours[1], "2.71", ours[2], "0.947", ours[3]]
    assert page.rows[1][3:6] == [ours[0], "", ours[1]]
    assert "Seeds: 2." in page.says[0]
    alone = overview({"mnist": studies["mnist"]})
    assert alone.heads == ["", "model", "code, %", "Fréchet", "inception", "error", "diversity"]
    assert alone.rows == [["mnist", "VAE", "25", *ours]]


def test_an_order_that_is_broken_is_told():
    ordered = nested_generation_page._ordered([1.0, 0.5, 0.2, 0.199])
    assert "never rises, and 3 dimensions" in ordered
    assert "never rises" in nested_generation_page._ordered([1.0, 1.0])  # a code that holds nothing
    assert "never rises" in nested_generation_page._ordered([1.0, 0.0, 1e-9])  # rounding
    assert "rises by 10 % of the fall at most" in nested_generation_page._ordered([1.0, 0.0, 0.1, 0.0])


# ------------------------------------------------------------------------------------ tiny runs


def test_generation_runs_on_the_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(Setting, "recipe", lambda self, recipe: replace(recipe, epochs=2, accelerator="cpu"))
    setting = quick(tmp_path)
    outcome = run("nested-generation", SUITES["nested-generation"](setting), setting, tmp_path)
    assert outcome.remarks == []
    numbers = json.loads((tmp_path / "studies" / "generation-digits.json").read_text())["numbers"]
    assert list(numbers["methods"]) == ["VND-AE", "VAE", "VAE, cut", "BetaVAE", "JointVAE", "SWAE"]
    for row in numbers["methods"].values():
        for (found,) in row.values():
            assert 0 < found["reconstruction"] < 0.25
            assert numbers["real"]["frechet"] < found["frechet"] < math.inf
            assert 1 - 1e-9 <= found["inception"] <= 10
            assert found["diversity"] > 0
    assert [len(errors) for errors in numbers["order"].values()] == [8, 8]
    assert len(list((tmp_path / "trained").iterdir())) == 9, "eight autoencoders, one classifier"
    assert {path.name for path in (tmp_path / "studies").glob("*.svg")} == {
        "generation-digits.svg",
        "pictures-digits.svg",
    }
    assert outcome.says["generation-digits"] == say(numbers)
    assert "small, trained here on digits" in say(numbers)[0]
    outcome.write(tmp_path)
    assert "| digits | VND-AE | 25 |" in (tmp_path / "reproduce.md").read_text()


@pytest.mark.slow
def test_dimensions_of_a_trained_code_are_ordered(tmp_path):
    """With the quick budget: every dimension lowers the error, the first half has nearly all of it, no cut is bad."""
    plan, case = coder(quick(tmp_path), "digits", "VND-AE", 8), Case((), tmp_path, (0,), "quick", "cpu")
    model = taught(plan, case, 0)
    x = pixels(loaded(plan.source).test)
    errors = [float((model.reconstruct(x, length=k) - x).square().mean()) for k in range(1, 9)]
    blind = float((x - pixels(loaded(plan.source).train).mean(0)).square().mean())
    gain = errors[0] - errors[-1]
    assert all(later <= earlier + 0.01 * gain for earlier, later in itertools.pairwise(errors))
    assert errors[3] <= errors[-1] + 0.15 * gain
    assert max(errors) < 1.02 * blind
