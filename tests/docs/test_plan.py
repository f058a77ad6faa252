"""docs/results/plan.md: flags exist, sizes are those of relay.json, minutes follow from measured prices."""

from __future__ import annotations

import re
import shlex
import sys
from string import Template

import pytest

from benchmarks import cost
from benchmarks.gpu import LARGE, LEAN, pairs
from leanbayes.cli.compare import comparison_options
from leanbayes.cli.main import parse
from leanbayes.compare.job import parse_methods
from leanbayes.training import Recipe
from tests.docs.pages import file_of, ROOT, unsaid
from tools import parts

PAGE = "docs/results/plan.md"
STEPS, EXTRA = 390 / 2, 1.2
"""Steps of 256 rows in an epoch, and the factor of the upper estimate."""


def lines() -> list[str]:
    """Return the lines of all commands, with the variables of the page in place."""
    blocks = re.findall(r"^```text\n(.*?)^```$", (ROOT / PAGE).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    known: dict[str, str] = {}
    found = []
    for line in "".join(blocks).splitlines():
        if given := re.fullmatch(r'([A-Z]+)="(.*)"', line):
            known[given[1]] = given[2]
        else:
            found.append(Template(line).safe_substitute(known))
    return found


def commands(start: str) -> list[list[str]]:
    return [shlex.split(line.removeprefix(start)) for line in lines() if line.startswith(start)]


def minutes() -> dict[str, tuple[float, float]]:
    """Return the estimated minutes of each training."""
    captured = file_of("cost-h200.json")["captured_step"]["steps"]["WRN-28-10, 256"]
    thin = next(row["ratio"] for row in file_of("wrn28/price.json")["rows"] if row["net"] == "wrn-28-5")
    epoch = STEPS * captured["plain_ms"] / 1000 / 60
    implicit = captured["ratio"]["implicit"]
    epochs = {
        "plain, 200 epochs": 200,
        "plain and SWA, 250 epochs": 250,
        "iBNN-16, 200 epochs": 200 * implicit,
        "two WRN-28-5, 200 epochs each": 400 * thin,
        "iBNN-16 as printed: 300 epochs, two draws": 600 * implicit,
    }
    return {name: (number * epoch, EXTRA * number * epoch) for name, number in epochs.items()}


def test_minutes_follow_from_measured_steps():
    rows = [f"| {name} | {low:.0f} to {high:.0f} |" for name, (low, high) in minutes().items()]
    captured = file_of("cost-h200.json")["captured_step"]
    step = captured["steps"]["WRN-28-10, 256"]
    rows += [f"captured ({step['plain_ms']} ms)", f"the measured {step['ratio']['implicit']:.2f} of four"]
    rows += [f"took up to {captured['first_call_seconds']['rank1'][1]:.0f} s"]
    thin = next(row["ratio"] for row in file_of("wrn28/price.json")["rows"] if row["net"] == "wrn-28-5")
    rows += [f"{4 * thin:.1f} times the price of a step"]
    assert unsaid(PAGE, rows) == []


def test_trainings_of_one_run_take_20_minutes():
    names = ("plain and SWA, 250 epochs", "iBNN-16, 200 epochs", "two WRN-28-5, 200 epochs each")
    assert all(minutes()[name][1] <= 20 for name in names)


def test_sizes_are_those_of_the_file():
    found = file_of("relay.json")
    states, pieces, predictions = found["states"], found["parts_15MiB"], found["predictions"]
    plain, wide = states["plain"], states["implicit, 16 components"]
    for name, size in states.items():
        assert -(-size // parts.bytes_of("15MiB")) == pieces[name]
    assert -(-found["compressed"] // parts.bytes_of("15MiB")) == pieces["implicit, 16 components, compressed"]
    said = [f"has {plain / 1e6:.0f} MB, one of 16 components {wide / 1e6:.0f} MB: {pieces['plain']} parts of 15 MiB"]
    said += [f"Compressed they are {pieces['implicit, 16 components, compressed']} parts."]
    said += [f"Predictions ({predictions['implicit, 16 components'] / 1e6:.1f} MB)"]
    said += [f"Predictions ({predictions['plain'] / 1e6:.1f} MB each)"]
    assert unsaid(PAGE, said) == []


@pytest.mark.parametrize("command", ["compare", "train"])
def test_the_flags_of_every_comparison_exist(command):
    found = commands(f"python -m leanbayes {command} ")
    assert len(found) >= 2
    for flags in found:
        options = parse(comparison_options(), flags, command)
        assert options.precision == "bf16-mixed"
        assert options.recipe.compile is True
        assert (options.shift, options.validation, options.ood) == (False, 0, "svhn")
        assert options.stop_after <= 20
        assert parse_methods(options.methods)
        epochs = options.recipe.epochs
        assert options.recipe.anneal_epochs == epochs * 2 // 3
        assert Recipe(epochs=epochs, schedule=options.recipe.schedule)
        if "implicit" in options.methods:
            assert (options.late, options.implicit.components, options.implicit.centre) == (0, 16, False)
            assert options.samples == 5 * options.implicit.components


def test_prices_and_tests_are_there_to_be_run():
    first, second = commands("python -m benchmarks.cost ")
    options = [cost.parse(flags) for flags in (first, second)]
    assert all(each.device == "cuda" and each.kernels and each.out == options[0].out for each in options)
    chosen = [pair for pair in pairs() if any(name in pair.file for name in options[0].only)]
    assert [(pair.net, pair.mode) for pair in chosen[:12]] == [(net, "graph") for net in LARGE for _ in LEAN]
    assert not options[1].only
    (tests,) = commands("python -m pytest ")
    paths = [ROOT / word for word in tests if word.endswith(".py")]
    assert len(paths) == 5
    assert all("pytest.mark.gpu" in path.read_text(encoding="utf-8") for path in paths)


@pytest.mark.parametrize("command", ["split", "take", "join"])
def test_parts_are_called_as_they_can_be(command, tmp_path, capsys):
    """The folders are not there: the sentence is one of the tool, no usage."""
    for flags in commands(f"python -m tools.parts {command} "):
        assert parts.main([command, *(str(tmp_path / word) if "/" in word else word for word in flags)]) == 2
        assert capsys.readouterr().err.startswith("parts: ")


if __name__ == "__main__":
    for name, (low, high) in minutes().items():
        sys.stdout.write(f"{name}: {low:.1f} to {high:.1f} minutes\n")
