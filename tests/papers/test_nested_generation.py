"""Codes of every length: trainings and evaluations, the paper's numbers, pictures, and a tiny run on the digits."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from leanbayes.generative import JointVAE, VNDAutoencoder
from leanbayes_papers import SUITES
from leanbayes_papers.harness import printed, Run
from leanbayes_papers.harness.charts import grid
from leanbayes_papers.harness.suite import run_suite
from leanbayes_papers.nested import coders
from leanbayes_papers.nested.coders import coder, dimensions, lengths, MODELS, pixels, samples
from leanbayes_papers.nested.generation import doubled, enough, packed, rise, rows_of, TABLE, trainings, tree, unpacked
from tests.papers.pages import few_rows

pytest.importorskip("matplotlib")


PRINTED = printed("nested", "tables4-6")


def quick(tmp_path) -> Run:
    return Run(device="cpu", root=str(tmp_path), data=("digits",), out=tmp_path)


def short_plan(tmp_path, model: str, length: int = 4, epochs: int = 1):
    plan = coder(quick(tmp_path), "digits", model, length)
    return replace(plan, options={**plan.options, "widths": (8, 16)}, recipe=replace(plan.recipe, epochs=epochs))


def make(plan, seed: int = 0):
    return plan.make(plan.load(plan.source), seed)


# ------------------------------------------------------------------------------------ trainings


def test_one_ordered_code_and_a_vae_for_each_length():
    assert list(trainings(128)) == [
        ("VND-AE", 128),
        *(("VAE", length) for length in (32, 64, 96, 128)),
        *((name, 128) for name in ("BetaVAE", "JointVAE", "SWAE")),
    ]
    found = [row for name, length in trainings(128) for row in rows_of(name, length, 128)]
    assert {f"{name} {percent}" for name, percent, _ in found} - set(PRINTED) == {
        f"VAE, cut {percent}" for percent in (25, 50, 75)
    }
    assert len(found) == len(set(found)) == len(PRINTED) + 3
    assert all(length == 128 * percent // 100 for _, percent, length in found)


@pytest.mark.parametrize("model", MODELS)
def test_models_of_a_length_share_encoder_and_decoder(tmp_path, model):
    plan = coder(quick(tmp_path), "digits", model, 4)
    made, other = make(plan), make(plan)
    assert made.dimensions == 4
    assert made.decoder.first.in_features == 4 + (made.categories if isinstance(made, JointVAE) else 0)
    assert made.decode(made.prior_codes(3, seed=0)).shape == (3, 1, 8, 8)
    for a, b in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_full_budget_has_the_papers_code_and_the_prior_is_long(tmp_path):
    full = Run(budget="full", root=str(tmp_path))
    plan = coder(full, "cifar10", "VND-AE", dimensions(full, "cifar10"))
    assert (plan.options["dimensions"], plan.options["widths"]) == (128, (32, 64, 128, 256, 512))
    assert plan.options["fields"] == {"prior_keep": 0.98}
    assert coder(full, "cifar10", "BetaVAE", 128).options["fields"] == {"beta": 4.0}
    assert lengths(128) == {25: 32, 50: 64, 75: 96, 100: 128}


def test_a_finished_training_is_read_and_another_setting_has_another_folder(tmp_path):
    plan, run = short_plan(tmp_path, "VND-AE"), quick(tmp_path)
    first = run.train(plan, 0).model
    states = {path: path.stat().st_mtime_ns for path in plan.folder(tmp_path, 0).rglob("*.safetensors")}
    assert states
    second = run.train(plan, 0).model
    assert {path: path.stat().st_mtime_ns for path in states} == states
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for change in ({"fields": {"prior_keep": 0.5}}, {"dimensions": 5}):
        assert replace(plan, options={**plan.options, **change}).folder(tmp_path, 0) != plan.folder(tmp_path, 0)
    moved = replace(plan, source=replace(plan.source, root="elsewhere"))
    assert moved.folder(tmp_path, 0) == plan.folder(tmp_path, 0)


def test_samples_share_their_noise_between_lengths_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(coders, "BATCH", 4)
    model = make(short_plan(tmp_path, "VND-AE"))
    assert isinstance(model, VNDAutoencoder)
    found = samples(model, 10, 3)
    assert found.shape == (10, 1, 8, 8)
    torch.testing.assert_close(found[4:8], model.sample(4, length=3, seed=1))
    assert not torch.equal(found[:4], found[4:8])


def test_pixels_are_shares_of_white(tmp_path):
    data = coders.classifier(quick(tmp_path), "digits")
    data = data.load(data.source)
    x = pixels(data.train)
    assert (x.min(), x.max()) == (0, 1)
    torch.testing.assert_close(data.inputs(x), data.inputs(data.train.x))  # what the classifier sees


# ------------------------------------------------------------------------------------ pictures


def test_pictures_are_put_together_and_survive_json():
    images = torch.rand(2, 3, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    picture = grid([list(row) for row in images])
    assert picture.shape == (2 * 6, 3 * 7, 3)  # every image has a white frame
    torch.testing.assert_close(picture[7:11, 15:20], images[1, 2].movedim(0, 2))
    assert (picture[6] == 1).all()
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
    assert [number.value for number in PRINTED["VND-AE 100"].values()] == [114.12, 3.36, 0.805]
    assert [number.value for number in PRINTED["VAE 25"].values()] == [175.17, 2.71, 0.947]
    errors = {name: row["reconstruction"].value for name, row in PRINTED.items()}
    ratios = [errors[f"VND-AE {p}"] / errors[f"VAE {p}"] for p in (25, 50, 75, 100)]
    assert 1.08 < min(ratios) < max(ratios) < 1.16  # as the claim says


def test_seeds_are_averaged_and_the_papers_numbers_are_below_cifar():
    run = {"method": "VAE", "code, %": 25, "frechet": 1.0, "inception": 2.0, "reconstruction": 0.5, "diversity": 4.0}
    runs = [run, {**run, "frechet": 3.0}]
    lines = TABLE.lines([{"data": data, **row} for data in ("cifar10", "mnist") for row in runs])
    ours = ["2.000 ± 1.414", "2.000 ± 0.000", "0.5000 ± 0.0000", "4.000 ± 0.000"]
    assert lines == [
        ["cifar10", "VAE", "25", "ours", *ours],
        ["", "", "", "paper", "175.17", "2.71", "0.947", "-"],
        ["mnist", "VAE", "25", "ours", *ours],
    ]


@pytest.mark.parametrize(
    ("errors", "rises", "dimensions"),
    [
        ([1.0, 0.5, 0.2, 0.199], "none", "3"),
        ([1.0, 1.0], "none", "1"),  # a code that holds nothing
        ([1.0, 0.0, 1e-9], "none", "2"),  # rounding
        ([1.0, 0.0, 0.1, 0.0], "10 %", "2"),
    ],
)
def test_an_order_that_is_broken_is_told(errors, rises, dimensions):
    assert (rise([{"errors": errors}]), enough([{"errors": errors}])) == (rises, dimensions)


# ------------------------------------------------------------------------------------ tiny runs


def test_generation_runs_on_the_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "recipe", lambda self, recipe: replace(recipe, epochs=1, accelerator="cpu"))
    monkeypatch.setattr(Run, "source", few_rows)
    monkeypatch.setattr(coders, "MOST_ROWS", 200)
    run = quick(tmp_path)
    outcome = run_suite("nested-generation", SUITES["nested-generation"](run), run)
    assert outcome.remarks == []
    records = outcome.records["generation-digits"]
    rows = [record for record in records if "method" in record]
    assert list(dict.fromkeys(row["method"] for row in rows)) == [
        *("VND-AE", "VAE", "VAE, cut", "BetaVAE", "JointVAE", "SWAE")
    ]
    (real,) = (record for record in records if "network" in record)
    for row in rows:
        assert 0 < row["reconstruction"] < 0.25
        assert real["frechet"] < row["frechet"] < math.inf
        assert 1 - 1e-9 <= row["inception"] <= 10
        assert row["diversity"] > 0
    assert [len(record["errors"]) for record in records if "order" in record] == [8, 8]
    assert len(list((tmp_path / "trained").iterdir())) == 9, "eight autoencoders, one classifier"
    assert {path.name for path in (tmp_path / "studies").glob("*.svg")} == {
        "generation-digits.svg",
        "pictures-digits.svg",
    }
    assert "small, trained here on digits" in real["network"]
    outcome.write()
    assert "| digits | VND-AE | 25 |" in (tmp_path / "reproduce.md").read_text()


@pytest.mark.slow
def test_dimensions_of_a_trained_code_are_ordered(tmp_path):
    """With the quick budget: every dimension lowers the error, the first half has nearly all of it, no cut is bad."""
    run = quick(tmp_path)
    spec = coder(run, "digits", "VND-AE", 8)
    model, data, _ = run.train(spec, 0)
    x = pixels(data.test)
    errors = [float((model.reconstruct(x, length=k) - x).square().mean()) for k in range(1, 9)]
    blind = float((x - pixels(data.train).mean(0)).square().mean())
    gain = errors[0] - errors[-1]
    assert all(later <= earlier + 0.01 * gain for earlier, later in itertools.pairwise(errors))
    assert errors[3] <= errors[-1] + 0.15 * gain
    assert max(errors) < 1.02 * blind
