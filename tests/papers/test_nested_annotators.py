"""The suite of disagreeing annotators: evaluated by oracles, trained by its specs, and a tiny run that is kept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leanbayes.data import ambiguous_images, AnnotatedImages, describe_annotated, load_annotated, OneAnnotator
from leanbayes.generative.probabilistic_unet import opinions
from leanbayes.methods.mc_dropout import DropoutLayer
from leanbayes_papers.harness import Run, Suite, TrainingSpec
from leanbayes_papers.harness.suite import present, run_suite
from leanbayes_papers.nested import annotators
from leanbayes_papers.nested.annotators import code_use, evaluate, Opinions, SAMPLES, truth, variants
from leanbayes_papers.nested.segmenters import KINDS, Mirrored, Scale, segmenter

pytest.importorskip("matplotlib")

TINY = Scale(widths=(4, 4), epochs=1, batch_size=4, lr=1e-3, members=2, images=(10, 6))


def said(masks: torch.Tensor) -> Opinions:
    """Make opinions of masks (S, B, H, W) that are certain of every pixel."""
    return Opinions(opinions(torch.stack([1.0 - masks.float(), masks.float()], 2)), 7)


def run_in(tmp_path: Path) -> Run:
    return Run(device="cpu", out=tmp_path)


def plan(kind: str, **fields) -> TrainingSpec:
    return segmenter(Run(device="cpu"), kind, "ambiguous", replace(TINY, **fields))


def images_of(spec: TrainingSpec):
    return spec.load(spec.source)


def made(spec: TrainingSpec):
    return spec.make(images_of(spec), 0)


# ------------------------------------------------------------------------------------ evaluation


def test_the_annotators_themselves_are_perfect():
    images = ambiguous_images(train=4, val=1, test=5)
    found = evaluate(said(images.split("test").annotations.transpose(0, 1)), images)
    assert found["ged 4"] == pytest.approx(0, abs=1e-12)
    assert found["matched iou"] == pytest.approx(1)
    assert found["ece"] == pytest.approx(0, abs=1e-6)
    assert found["vote error"] == pytest.approx(0, abs=1e-6)
    assert found["marked"] == pytest.approx(truth(images)["marked"])
    assert found["parameters"] == 7


def test_samples_of_the_true_distribution_reach_the_optimum():
    images = ambiguous_images(train=4, val=1, test=400, size=16)
    test = images.split("test")
    drawn = torch.multinomial(test.probabilities, 16, replacement=True, generator=torch.Generator().manual_seed(0))
    found = evaluate(said(test.modes[torch.arange(400)[:, None], drawn].transpose(0, 1)), images)
    best = truth(images)
    for count in SAMPLES:  # single distances are between 0 and 2
        assert found[f"ged {count}"] == pytest.approx(best[f"ged {count}"], abs=4 / math.sqrt(400) / 2)
    spread = 100 * 0.5 / math.sqrt(16 * 133)
    assert all(value < 4 * spread for name, value in found.items() if name.startswith("points off"))
    assert sum(found[f"mode {k}"] for k in range(3)) == pytest.approx(1)


def test_the_optimum_is_estimated_where_probabilities_are_unknown():
    known = ambiguous_images(train=4, val=1, test=400, size=16)
    fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(AnnotatedImages)}
    found, best = truth(AnnotatedImages(**fields)), truth(known)
    assert "mode 0" not in found
    for count in SAMPLES:  # the distance of two annotators is between 0 and 1
        spread = 0.5 / math.sqrt(400) * (1 / 4 + 1 / count)
        assert found[f"ged {count}"] == pytest.approx(best[f"ged {count}"], abs=4 * spread)


def test_one_pixel_by_hand():
    """A line of one pixel shares nothing with its neighbour, two side by side share a third; two of the four agree."""
    masks = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    masks[0, :, :, 3] = 1
    masks[1, 0, :, 3:5] = 1
    masks[1, 1, :, 4] = 1
    images = AnnotatedImages(
        name="lines",
        images=torch.zeros(2, 1, 8, 8),
        annotations=masks,
        annotators=torch.tensor([2, 2]),
        classes=("no", "yes"),
        splits={"test": 2},
    )
    found = truth(images)
    assert found["apart"] == pytest.approx((0 + 1 / 2) / 2)
    assert found["one pixel"] == pytest.approx((1 + (2 / 3 + 1) / 2) / 2)
    assert found["ged 4"] == pytest.approx(found["apart"] * (1 / 2 + 1 / 4))


def test_points_off_by_hand():
    """Nothing is ever marked: every mode is off by its own probability, by the missing part of the last."""
    images = ambiguous_images(train=4, val=1, test=9)
    p = images.split("test").probabilities.double()
    found = evaluate(said(torch.zeros(16, 9, 32, 32)), images)
    assert found["mode 2"] == 1
    assert found["points off"] == pytest.approx(100 * (1 - p[:, 2].mean()).item(), rel=1e-5)
    bright = p[:, 0].argsort()[6:]
    assert found["points off, bright"] == pytest.approx(100 * (1 - p[bright, 2].mean()).item(), rel=1e-5)
    assert truth(images)["points off"] == 0


# ------------------------------------------------------------------------------------ networks


def test_mirrored_pairs_stay_together_and_repeat_by_epoch():
    pairs = OneAnnotator(ambiguous_images(train=200, val=1, test=1, size=16).split("train"), seed=3)
    rows, mirrored = Mirrored(pairs), []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        for index in range(0, 200, 7):
            x, y = pairs[index]
            turned = bool(rows.chosen[index])
            assert torch.equal(rows[index][0], x.flip(2) if turned else x)
            assert torch.equal(rows[index][1], y.flip(1) if turned else y)
        mirrored.append(rows.chosen.clone())
    assert torch.equal(mirrored[0], mirrored[2])
    assert not torch.equal(mirrored[0], mirrored[1])
    assert mirrored[0].double().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(200))


def test_networks_are_what_they_are_called():
    drop = made(plan("dropout", widths=(4, 4, 4)))
    assert sum(isinstance(layer, DropoutLayer) for layer in drop.modules()) == 3  # two of the encoder, one after
    assert len(made(plan("ensemble")).members) == 2
    assert made(plan("VND-PUNet")).ordered
    assert not made(plan("P-UNet")).ordered
    assert plan("BN3").recipe.beta == 1.0  # `fit` counts every pixel as a target
    folders = {plan(kind).folder(Path(), 0) for kind in KINDS} | {plan("BN3", epochs=2).folder(Path(), 0)}
    assert len(folders) == len(KINDS) + 1


def test_variants_of_every_kind(tmp_path):
    found, images, run = {}, images_of(plan("P-UNet")), run_in(tmp_path)
    for kind in KINDS:
        found |= dict(variants(kind, run.train(plan(kind), 0).model, images))
    assert list(found) == [
        *("deterministic", "dropout", "ensemble", "P-UNet"),
        *("VND-PUNet 1/3", "VND-PUNet full", "VND-PUNet as drawn", "BN3 0.25", "BN3 0.5", "BN3 1"),
    ]
    assert all(each.masks.shape == (16, 6, 32, 32) for each in found.values())
    same = found["deterministic"].masks
    assert (same == same[:1]).all()
    pairs = found["ensemble"].prediction.samples
    assert torch.equal(pairs[0], pairs[2])
    assert not torch.equal(pairs[0], pairs[1])
    sizes = [found[f"BN3 {width}"].parameters for width in ("0.25", "0.5", "1")]
    assert sizes[0] < sizes[1] < sizes[2] == found["deterministic"].parameters
    use = code_use(run.train(plan("VND-PUNet"), 0).model, images)
    assert len(use["nats"]) == 6
    assert use["used"][0] == 1
    assert use["used"] == sorted(use["used"], reverse=True)


def test_a_threshold_marks_as_many_pixels_as_annotators():
    """Annotators mark a tenth; a network that ranks pixels rightly, but is sure of none, marks them when balanced."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(30, 1, 16, 16, generator=generator)
    images = AnnotatedImages(
        name="made up",
        images=ranks,
        annotations=(ranks > 0.9).byte().expand(-1, 2, -1, -1).contiguous(),
        annotators=torch.full((30,), 2),
        classes=("no", "yes"),
        splits={"train": 10, "val": 10, "test": 10},
    )

    class Unsure(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.tensor(-9.0))

        def forward(self, x):
            return torch.cat([torch.zeros_like(x), x + self.bias], 1)

    (_, found), *_ = variants("deterministic", Unsure(), images)
    assert not found.masks.any()
    wanted = images.split("test").annotations[:, 0].bool()
    assert (found.balanced[0] == wanted).double().mean() > 0.99
    row = evaluate(found, images)
    assert row["ged 16"] > 0.9 > 0.1 > row["balanced ged 16"]


# ------------------------------------------------------------------------------------ pictures


def test_masks_survive_json_and_are_shown(tmp_path):
    images = ambiguous_images(train=3, val=1, test=7)
    masks = torch.randint(2, (16, 7, 32, 32), generator=torch.Generator().manual_seed(0))
    records = json.loads(json.dumps(annotators.pack_masks(images, {"model": masks})))
    row = next(r for r in records if r["image"] == 1 and r.get("model") == "model")  # of test images 0, 2 and 4
    assert torch.equal(annotators.unpack_mask(row["masks"][2], 32, 32), masks[2, 2].float())
    pixels = next(r for r in records if r["image"] == 1)["pixels"]
    assert bytes.fromhex(pixels) == images.split("test").images[2].numpy().tobytes()
    annotators.plot_masks(records, tmp_path / "masks.svg")
    assert "<svg" in (tmp_path / "masks.svg").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------ runs


def test_a_tiny_run_is_kept(tmp_path):
    run = run_in(tmp_path)
    small = Suite(paper="", studies=annotators.studies("ambiguous", TINY))
    first = run_suite("nested-annotators", small, run)
    assert not first.remarks
    path = tmp_path / "studies" / "annotators-ambiguous.json"
    records = json.loads(path.read_text(encoding="utf-8"))["records"]
    for row in (record for record in records if "model" in record):
        assert all(math.isfinite(value) for name, value in row.items() if name != "model")
        assert all(0 <= row[f"ged {count}"] <= 2 for count in SAMPLES)
    assert [table.lines(records)[0][0] for table in small.studies[0].tables] == ["optimum", "optimum", "P-UNet"]
    states = sorted((tmp_path / "trained").rglob("*.safetensors"))
    before = [(state, state.stat().st_mtime_ns) for state in states]
    assert len(states) == len(KINDS) + 1  # the ensemble has two members
    path.unlink()
    again = run_suite("nested-annotators", small, run)
    assert again.records == first.records
    assert [(state, state.stat().st_mtime_ns) for state in states] == before


def test_what_is_not_here_is_left_out(tmp_path):
    run = Run(budget="short", root=str(tmp_path))
    kept, remarks = present(annotators.nested_annotators(run), run)
    assert {name for study in kept.studies for name in study.data} == {"ambiguous"}
    assert len(remarks) == 1
    assert "bsds500 is not here" in remarks[0]
    assert "load_annotated" in remarks[0]
    run = replace(run, budget="full")
    with pytest.raises(ValueError, match="nothing to run: bsds500 is not here"):
        present(annotators.nested_annotators(run), run)


@pytest.mark.skipif("LEANBAYES_DATA" not in os.environ, reason="needs LEANBAYES_DATA with BSDS500")
def test_photographs_with_different_numbers_of_annotators(tmp_path):
    if describe_annotated()[0].where == "not here":
        pytest.skip("BSDS500 is not in LEANBAYES_DATA")
    images = load_annotated("bsds500")
    test = images.split("test")
    found = evaluate(said(test.annotations[:, :4].transpose(0, 1)), images)
    assert 0 < found["ged 4"] < found["ged 1"]
    assert "points off" not in found
    assert found["balanced ged 4"] == found["ged 4"]  # these masks are certain
    records = annotators.pack_masks(images, {"model": test.annotations[:, :4].transpose(0, 1)})
    annotators.plot_masks(records, tmp_path / "masks.svg")


@pytest.mark.slow
def test_a_probabilistic_unet_is_nearer_to_annotators_than_one_mask(tmp_path):
    scale, run, found = annotators.SCALES["quick", "ambiguous"], run_in(tmp_path), {}
    for kind in ("deterministic", "P-UNet", "VND-PUNet"):
        spec = segmenter(run, kind, "ambiguous", scale)
        for name, each in variants(kind, run.train(spec, 0).model, images_of(spec)):
            found[name] = evaluate(each, images_of(spec))["ged 16"]
    best = found.pop("deterministic") / 2
    assert all(value < best for value in found.values()), found
