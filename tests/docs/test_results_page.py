"""docs/results/README.md and the results of the README are those of the committed files, and claim no more."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import pytest

from leanbayes_papers import SUITES
from tests.docs.pages import RESULTS, ROOT, text_of, unsaid
from tools import results_charts, results_page
from tools.results_page import ITEMS, PAPERS, REFERENCE, STATUSES

NAMES = re.compile(
    r"CIFAR-100?|WRN-\d+-\d+|VGG-?\d+|ResNet-\d+|iBNN-\d+|BSDS500|PhysioNet 2012|rank-1|BN3|FN3|paper \d+|4 x|1/8|1/2"
)
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def entries() -> Iterator[tuple[str, dict[str, str]]]:
    found = results_page.items()
    return ((paper, item) for paper in PAPERS for item in found[paper])


def test_the_page_is_rendered_from_the_files():
    assert results_page.main(["--check"]) == 0, "run python -m tools.results_page"


def test_a_changed_number_of_a_file_changes_the_page(tmp_path, monkeypatch):
    """The page reads its files: with another accuracy in one of them it is another page."""
    path = "nested/limited-cifar10.json"
    found = json.loads((RESULTS / path).read_text())
    found["numbers"]["SVB"]["accuracy"] += 1
    original = results_page._json
    monkeypatch.setattr(results_page, "_json", lambda name: found if name == path else original(name))
    changed = results_page.section("nested")
    assert "71.8, 85.3, 90.4, 91.2 %" in changed
    assert changed not in results_page.PAGE.read_text()


def test_numbers_of_ours_are_references_or_names():
    """A number that is typed by hand must be a key of a reference next to it, or part of a name."""
    typed = []
    for paper, item in entries():
        keys = " ".join(match[1] for match in REFERENCE.finditer(item["ours"]))
        text = NAMES.sub("", REFERENCE.sub("", item["ours"]))
        typed += [(paper, item["item"], each) for each in NUMBER.findall(text) if each not in NUMBER.findall(keys)]
    assert typed == []


def test_rows_without_a_file_say_so_and_have_no_number():
    for _, item in entries():
        assert item["status"] in STATUSES
        silent = item["ours"] == "-" or item["ours"].startswith("no file")
        if item["status"] in ("never run", "no data", "diagram"):
            assert "{" not in item["ours"], item["item"]
            assert silent or item["ours"].startswith("pictures"), item["item"]
        read = re.findall(r"\{(?!counted)", item["ours"])
        assert not (silent and read), item["item"]
        assert silent or "page" in item, item["item"]


def test_suites_that_are_named_exist():
    pattern = rf"\b(?:{'|'.join(PAPERS)})-[a-z0-9]+"
    named = {word for _, item in entries() for word in re.findall(pattern, item["source"])}
    assert named <= set(SUITES)
    told = {name for name in SUITES if name != "text-reviews"}
    assert told <= named


@pytest.mark.parametrize("form", [["count"], ["seeds"], [".1f"], ["min", ".1f"], ["max", ".1f"], ["±", ".2f"]])
def test_forms(form):
    expected = {"count": "2", "seeds": "2 seeds", ".1f": "2.0", "min": "1.0", "max": "3.0", "±": "2.00 ± 1.00"}
    assert results_page.written([1.0, 3.0], form) == expected[form[0]]


def test_paths_take_entries_all_values_and_lists():
    found = {"a": [{"name": "x", "v": 1}, {"name": "y", "v": 2}], "b": {"c": 3, "d": 4}}
    assert results_page.reached(found, ["a", "name=y", "v"]) == [2]
    assert results_page.reached(found, ["a", "*", "v"]) == [1, 2]
    assert results_page.reached(found, ["b", "*"]) == [3, 4]
    assert results_page.reached(found, ["a", "0", "v"]) == [1]
    assert results_page.reached(found, ["a", "name=y", "v=2", "v"]) == [2]
    with pytest.raises(KeyError, match="expected a value at a > name=z"):
        results_page.reached(found, ["a", "name=z"])


# ------------------------------------------------------------------------------------ charts


def described(name: str) -> Any:
    """Return the points that a chart holds in its description."""
    tree = ElementTree.parse(RESULTS / "charts" / f"{name}.svg")
    (found,) = tree.iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(found.text or "")


def test_charts_show_the_figures_of_the_files():
    assert described("worth") == results_charts.worth(), "run python -m tools.results_charts"
    assert described("price") == results_charts.price(), "run python -m tools.results_charts"
    assert {path.stem for path in (RESULTS / "charts").iterdir()} == {"worth", "price"}
    for page in ("README.md", "docs/results/README.md"):
        assert all(f"charts/{name}.svg)" in text_of(page) for name in ("worth", "price"))


def test_points_of_the_charts_by_hand():
    """One method of each network, read from the files without the functions that draw."""
    points = {(p["net"], p["method"], p.get("figure")): p for p in (*described("worth"), *described("price"))}
    narrow = json.loads((RESULTS / "ruler" / "ruler.json").read_text())
    rank1 = next(each for each in narrow["methods"] if each["method"] == "rank1")["parts"]["both"]
    point = points["wrn-16-4", "rank1", None]
    assert point["x"] == pytest.approx(rank1["networks"], abs=1e-4)
    assert point["y"] == pytest.approx(rank1["cnll"], abs=1e-6)
    assert point["count"] == 3
    point = points["wrn-28-10", "implicit", "nll"]
    wide = json.loads((RESULTS / "wrn28" / "ruler.json").read_text())
    nlls = [
        each["nll"]
        for each in next(m for m in wide["methods"] if m["method"] == "implicit")["parts"]["both"]["by_seed"].values()
    ]
    assert point["y"] == pytest.approx(sum(nlls) / 4, abs=1e-6)
    assert point["x"] == pytest.approx(1.02, abs=0.005)


# ------------------------------------------------------------------------------------ README


def test_the_table_of_the_readme_is_that_of_the_wide_network():
    assert results_page.readme() in (ROOT / "README.md").read_text(), "python -m tools.results_page --readme"


def test_the_readme_claims_no_more_than_the_table():
    wide, floor = (json.loads((RESULTS / "wrn28" / f"{name}.json").read_text()) for name in ("ruler", "floor"))
    assert all(method["parts"]["both"]["networks"] < 2 for method in wide["methods"])
    assert all(row["ece"] > row["floor"]["high"] for row in floor["rows"])
    epochs = {row["epochs"] for row in floor["rows"] if row["networks"] == 1}
    assert {row["networks"] for row in floor["rows"]} == {1, 4}
    said = [
        f"CIFAR-10, WRN-28-10, {epochs.pop()} epochs, one H200",
        "No method of one training reaches two networks here.",
        "The ECE of every single run and of the ensemble of 4 is above the range that chance alone would give "
        "(pairs were not checked).",
    ]
    assert not epochs
    assert unsaid("README.md", said) == []
    images = [item["status"] for _, item in entries() if re.search("CIFAR|ImageNet|MNIST", item["item"])]
    assert sum(status in ("small scale", "never run", "no data", "differs") for status in images) > len(images) / 2
    assert ITEMS.is_file()
