"""Markdown and terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from leanbayes.report import load_results, markdown, terminal
from leanbayes.report.load import LONGEST
from leanbayes.report.page import render
from leanbayes.report.table import comparison
from tests.report import make

TWO = {name: make.METHODS[name] for name in ("plain", "rank1")}
DOCS = Path(__file__).parents[2] / "docs" / "results"


def test_markdown_depends_on_the_results_alone(tmp_path):
    first = make.tree(tmp_path / "here", TWO)
    second = make.tree(tmp_path / "elsewhere" / "deep", TWO)
    text = markdown(load_results(first))
    assert text == markdown(load_results(second))
    assert str(tmp_path) not in text


def test_markdown_tells_commit_device_and_command(tmp_path):
    text = markdown(load_results(make.tree(tmp_path, TWO)))
    assert "* Commit: 4f1c2d7a9b3e" in text
    assert "* Device: cpu (x86\\_64), 1 thread" in text
    assert "* rank1: 3 of 12 layers converted" in text
    assert "```text\nleanbayes compare --data digits" in text


def test_markdown_table_has_equal_rows_and_marks_the_best(tmp_path):
    text = markdown(load_results(make.tree(tmp_path)))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(make.METHODS)
    assert len({line.count("|") for line in lines}) == 1
    (best,) = [line for line in lines if line.startswith("| deep")]
    assert best.startswith("| deep\\_ensemble | **9")


def test_seeds_that_fail_alike_share_a_line(tmp_path):
    make.write(tmp_path, make.classification("plain", 0, make.METHODS["plain"]))
    for seed, error in enumerate(("ValueError: no", "ValueError: no", "OSError: full")):
        make.write(tmp_path, make.failed("rank1", seed, error))
    lines = [line for line in markdown(load_results(tmp_path)).splitlines() if "Failed" in line]
    assert [line.split(" (")[0] for line in lines] == [
        "* Failed: rank1, seeds 0, 1: ValueError: no",
        "* Failed: rank1, seed 2: OSError: full",
    ]


def test_markdown_escapes_names_and_lists_what_failed(tmp_path):
    record = make.classification("plain", 0, make.METHODS["plain"], data="a|b*c")
    record["command"] = "run ``` twice"
    make.write(tmp_path, record)
    failure = make.failed("rank1", 0, "Traceback:\n  somewhere\nValueError: `x` | y")
    failure["data"]["name"] = "a|b*c"
    make.write(tmp_path, failure)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    text = markdown(load_results(tmp_path))
    assert "## a\\|b\\*c, lenet" in text
    assert "* Failed: rank1, seed 0: ValueError: \\`x\\` \\| y" in text
    assert text.count("```") == 2
    assert "Not read: broken/result.json is not readable JSON" in text


def printed(results, **kwargs):
    out = io.StringIO()
    terminal(results, Console(file=out, **kwargs))
    return out.getvalue()


def test_the_terminal_table_fits_a_hundred_columns(tmp_path):
    text = printed(load_results(make.tree(tmp_path)), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert all(name in text for name in make.METHODS)
    assert "take rank1: NLL" in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100])
def test_a_narrow_terminal_cuts_no_number_and_names_what_it_leaves_out(tmp_path, width):
    results = load_results(make.tree(tmp_path))
    text = printed(results, width=width)
    assert max(map(len, text.splitlines())) <= width
    table = comparison(results.groups[0]).only("brief")
    line = next(line.split() for line in text.splitlines() if line.lstrip().startswith("plain "))
    means = [cell.mean for cell in table.rows[0].cells]
    assert line[1:] == means[: len(line) - 1]
    assert len(line) > 2
    left = ", ".join(column.head for column in table.columns[len(line) - 1 :])
    assert (f"Left out, for the terminal is narrow: {left}" in " ".join(text.split())) == (left != "")
    assert (left == "") == (width >= 80)


def test_long_names_are_folded_for_the_sake_of_numbers(tmp_path):
    make.tree(tmp_path)
    record = make.classification("patch", 0, make.METHODS["patch"])
    record["method"]["label"] = "patch[crossed=true,components=3,more=4]"
    make.write(tmp_path, record, "patch2")
    text = printed(load_results(tmp_path), width=100)
    assert "Left out" not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("letter", ["1", "a", "ab "])
def test_very_long_names_are_cut_and_cost_no_time(tmp_path, letter):
    """A label, a set and a class of 200,000 characters: ten times as long took a hundred times as long."""
    make.tree(tmp_path, TWO, seeds=1)
    record = make.classification("rank1", 0, make.METHODS["rank1"])
    whole = letter * (200_000 // len(letter))
    record["method"]["label"] = whole
    record["metrics"]["ood"] = {whole: record["metrics"]["ood"]["noise"]}
    make.write(tmp_path, record)
    start = time.process_time()
    results = load_results(tmp_path)
    texts = [markdown(results), printed(results, width=100)]
    page = render(results)
    assert time.process_time() - start < 5
    label = results.groups[0].contenders[1].label
    assert len(label) == LONGEST
    assert label.startswith(whole[:50])
    assert label.endswith(whole[-20:])
    assert results.groups[0].contenders[1].whole == whole
    assert all(whole not in text for text in texts)
    assert f'title="{whole}"' in page, "the rest shows on hover"
    assert f">{whole}" not in page


def test_long_names_that_differ_are_told_apart(tmp_path):
    make.tree(tmp_path, {"plain": make.METHODS["plain"]}, seeds=1)
    for middle in "ab":
        record = make.classification("rank1", 0, make.METHODS["rank1"])
        record["method"]["label"] = "x" * 100 + middle + "x" * 100
        make.write(tmp_path, record, middle)
    labels = [contender.label for contender in load_results(tmp_path).groups[0].contenders]
    assert len(set(labels)) == 3
    assert labels[2] == f"{labels[1]} (2)"


def test_the_terminal_shows_failures_and_takes_names_literally(tmp_path):
    make.tree(tmp_path, {"plain": make.METHODS["plain"]}, seeds=1)
    make.write(tmp_path, make.failed("rank1", 0, "KeyError: '[/red] [bold]'"))
    (tmp_path / "result.json").write_text("[")
    text = printed(load_results(tmp_path))
    assert "Failed: rank1, seed 0: KeyError: '[/red] [bold]'" in text
    assert "Not read: result.json is not readable JSON" in text


def test_the_terminal_prints_to_standard_output_by_default(tmp_path, capsys):
    terminal(load_results(make.regression_tree(tmp_path)))
    text = capsys.readouterr().out
    assert "concrete, mlp" in text
    assert max(map(len, text.splitlines())) <= 100


def test_committed_tables_are_what_their_result_files_say():
    """docs/results/NAME.md holds the Markdown of docs/results/NAME/**/result.json."""
    folders = sorted({file.relative_to(DOCS).parts[0] for file in DOCS.rglob("result.json")})
    for name in folders:
        page = (DOCS / f"{name}.md").read_text()
        assert markdown(load_results(DOCS / name)) in page, f"docs/results/{name}.md: render it again"
