"""The page on WRN-28-10 has the tables and the sentences of its files, and its words are those of the figures."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest

from tests.docs.pages import RESULTS, unsaid
from tools.ruler_page import worth_sentences
from tools.wide_page import sentences, tables, within

FOLDER = RESULTS / "wrn28"


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def methods() -> dict[str, Any]:
    return {method["method"]: method["parts"] for method in read("ruler")["methods"]}


def test_the_page_has_the_figures_of_its_files() -> None:
    page = (RESULTS / "wrn28.md").read_text()
    assert [name for name, table in tables(FOLDER).items() if f"\n\n{table}" not in page] == []
    assert unsaid("docs/results/wrn28.md", sentences(FOLDER)) == []
    worths = [re.findall(r"(`\w+`) is worth (.*?) networks", line)[0] for line in worth_sentences(FOLDER)]
    runs = (RESULTS / "runs.md").read_text()
    assert len(worths) == 3
    assert [worth for name, worth in worths if not re.search(f"{name}[^|`]* {re.escape(worth)}", runs)] == []


def test_gains_are_as_the_page_says() -> None:
    found, curve = methods(), read("ruler")["curves"][0]
    assert curve["seeds"] == [0, 1, 2, 3]
    assert {name: len(parts["both"]["by_seed"]) for name, parts in found.items()} == {
        "batch_ensemble": 1,
        "implicit": 4,
        "rank1": 3,
    }
    for name in ("implicit", "rank1"):
        both, centre = found[name]["both"], found[name]["centre"]["by_seed"]
        assert max(both["paired"]["differences"]) < 0
        assert both["networks"] + 2 * both["se"] < 2
        assert all(figures["cnll"] < centre[seed]["cnll"] for seed, figures in both["by_seed"].items())
    implicit = found["implicit"]["both"]
    plain = curve["curve"][0]
    raw, calibrated = (
        plain[key]["mean"] - statistics.fmean(figures[key] for figures in implicit["by_seed"].values())
        for key in ("nll", "cnll")
    )
    assert 0 < calibrated < raw / 2  # the README: a temperature brings most of the gain in NLL
    assert sum(value > -0.010 for value in implicit["paired"]["differences"]) == 2
    assert implicit["networks"] < 1.5
    for seed, figures in implicit["by_seed"].items():
        assert figures["ece"] / curve["by_seed"][seed]["ece"] == pytest.approx(0.5, abs=0.1)


def test_no_ece_is_within_its_floor_and_the_files_are_of_the_same_runs() -> None:
    rows = read("floor")["rows"]
    assert not any(map(within, rows))
    assert all(row["ece"] > row["floor"]["high"] for row in rows)
    by_method = {name: parts["both"]["by_seed"] for name, parts in methods().items()}
    by_method["plain"] = read("ruler")["curves"][0]["by_seed"]
    for row in rows[:-1]:
        assert row["ece"] == pytest.approx(by_method[row["method"]][str(row["seed"])]["ece"], abs=1e-6)
    whole = read("ruler")["curves"][0]["curve"][-1]
    assert rows[-1]["networks"] == whole["networks"] == 4
    assert rows[-1]["ece"] == pytest.approx(whole["ece"]["mean"], abs=1e-6)


def test_the_price_of_implicit_is_as_the_page_says() -> None:
    ratio = next(row["ratio"] for row in read("price")["rows"] if row["method"] == "implicit")
    assert (28 + 12 * ratio) / 40 == pytest.approx(1.02, abs=0.005)
