"""The pages of ordered codes hold the numbers of their files."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanbayes_papers.nested import annotators, generation
from tests.docs.pages import of_one_seed
from tools.convert_studies import read_records

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SETS = {"generation": ("cifar10", "mnist", "fashion-mnist"), "annotators": ("ambiguous", "bsds500")}
BOTH = [(page, data) for page, sets in SETS.items() for data in sets]


def numbers(page: str, name: str) -> dict[str, Any]:
    return json.loads((RESULTS / page / f"{name}.json").read_text(encoding="utf-8"))["numbers"]


def text_of(page: str) -> str:
    return (RESULTS / f"{page}.md").read_text(encoding="utf-8")


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


@pytest.mark.parametrize(("page", "data"), BOTH)
def test_the_tables_of_a_page_are_those_of_its_files(page, data):
    if page == "generation":
        tables = (generation.TABLE, generation.REAL, generation.ORDER)
    else:
        tables = annotators.studies(data, annotators.SCALES["short", data])[0].tables
    records = read_records(RESULTS / page / f"{page}-{data}.json")
    several = [generation.TABLE] if data == "cifar10" else []
    shared = [generation.REAL, *(table for table in tables if table.heads[0] == "images")]
    heads = [table.heads if table in (*several, *shared) else of_one_seed(table.heads) for table in tables]
    lines = [line(cells) for head, table in zip(heads, tables, strict=True) for cells in (head, *table.lines(records))]
    assert [each for each in lines if each not in text_of(page)] == []


@pytest.mark.parametrize("page", SETS)
def test_every_figure_is_shown_and_nothing_else_lies_there(page):
    second = {"generation": "pictures", "annotators": "masks"}[page]
    drawn = {f"{name}-{data}" for data in SETS[page] for name in (page, second)}
    assert all(f"({page}/{name}.svg)" in text_of(page) for name in drawn)
    extra = {"generation": {"blur-fashion-mnist.json"}, "annotators": {"lengths.json", "earlier.json"}}[page]
    files = {f"{name}.{kind}" for name in drawn for kind in ("json", "svg")} | extra
    assert {path.name for path in (RESULTS / page).iterdir()} == files


@pytest.mark.parametrize("data", SETS["generation"])
def test_published_dimensions_are_ordered_and_no_length_is_garbage(data):
    found = numbers("generation", f"generation-{data}")
    errors = found["order"]["VND-AE"]
    assert len(errors) == found["dimensions"]
    assert all(math.isfinite(error) for error in errors)
    fall = errors[0] - errors[-1]
    assert all(later <= earlier + 1e-6 * fall for earlier, later in pairwise(errors))


def test_blurred_images_are_those_of_their_file():
    found = json.loads((RESULTS / "generation" / "blur-fashion-mnist.json").read_text(encoding="utf-8"))
    for row in found["blurred"]:
        blur = f"blurred by a Gaussian, {row['sigma']:.2f} pixels" if "sigma" in row else None
        name = blur or f"{row['components']} principal components"
        figures = [f"{row['error']:.4f}", f"{row['frechet']:.1f}", f"{row['inception']:.2f}", f"{row['diversity']:.2f}"]
        assert line([name, *figures]) in text_of("generation")


def test_lengths_are_those_of_their_file():
    found = json.loads((RESULTS / "annotators" / "lengths.json").read_text(encoding="utf-8"))
    page = text_of("annotators")
    for run in found["runs"]:
        rows = [run["at length"][length] for length in ("as drawn", "1", "2", "6")]
        cells = [f"{row['ged 16']:.3f} ({row['points off']:.1f})" for row in rows]
        assert line([run["lengths"], str(run["seed"]), *cells]) in page
    first = found["runs"][0]
    for length, row in first["drawn"].items():
        assert line([length, f"{100 * row['share']:.1f}", *(f"{share:.1f}" for share in row["modes"])]) in page


@pytest.mark.parametrize("data", SETS["annotators"])
def test_distances_are_those_of_their_file(data):
    page, found = text_of("annotators"), numbers("annotators", f"annotators-{data}")
    heads = ("ged", "balanced ged") if data == "bsds500" else ("ged",)
    keys = [*(f"{head} {count}" for head in heads for count in (1, 4, 8, 16)), "matched iou", "vote error"]
    for name, row in {"optimum": found["truth"], **found["models"]}.items():
        cells = [f"{row[key]:.3f}" if key in row else "" for key in keys]
        assert line([name, *cells, f"{100 * row['marked']:.1f}"]) in page


def test_nothing_is_said_of_bn3_while_it_marks_too_few_pixels():
    page = " ".join(text_of("annotators").split())
    for data, name in {"ambiguous": "the made-up set", "bsds500": "BSDS500"}.items():
        found = numbers("annotators", f"annotators-{data}")
        bn3, truth = (100 * row["marked"] for row in (found["models"]["BN3 1"], found["truth"]))
        assert bn3 < truth / 2
        assert f"{bn3:.1f} % of the pixels on {name} (annotators {truth:.1f} %)" in page
    assert "No statement on BN3 is possible yet" in page


def test_both_runs_of_the_same_settings_are_those_of_their_files():
    page = text_of("annotators")
    before = json.loads((RESULTS / "annotators" / "earlier.json").read_text(encoding="utf-8"))
    for data, name in {"ambiguous": "made-up", "bsds500": "BSDS500"}.items():
        runs = {"earlier": before[data]["models"], "now": numbers("annotators", f"annotators-{data}")["models"]}
        assert list(runs["earlier"]) == list(runs["now"])
        assert line(["one seed", *runs["now"]]) in page
        for when, models in runs.items():
            assert line([f"{name}, {when}", *(f"{row['ged 16']:.3f}" for row in models.values())]) in page


def test_disagreement_is_that_of_the_masks_in_the_picture():
    found, page = numbers("annotators", "masks-bsds500"), text_of("annotators")
    _, height, width = found["shape"]
    for name in ("annotators", "ensemble", "P-UNet", "VND-PUNet full", "BN3 1", "dropout"):
        groups = [[_mask(packed, height, width) for packed in group] for group in found["masks"][name]]
        pairs = [pair for group in groups for pair in combinations(group, 2)]
        assert len(pairs) == 18
        apart = np.mean([1 - (a & b).sum() / (a | b).sum() for a, b in pairs])
        beyond = np.mean([1 - ((a & _near(b)).sum() / a.sum() + (b & _near(a)).sum() / b.sum()) / 2 for a, b in pairs])
        assert line([name, f"{apart:.3f}", f"{beyond:.3f}"]) in page


def _mask(packed: str, height: int, width: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=height * width)
    return bits.reshape(height, width).astype(bool)


def _near(mask: np.ndarray) -> np.ndarray:
    """Mark every pixel with a marked one among itself and its eight neighbours."""
    wide = np.pad(mask, 1)
    height, width = mask.shape
    return np.any([wide[i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=0)
