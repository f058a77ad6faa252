"""Every price in the README and in docs/results/cost.md is that of docs/results/cost-h200.json or cost-cpu.json."""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn

import leanbayes as lb
from tests.docs.pages import file_of, lacking, ROOT, span, unsaid
from tests.docs.test_comparison_pages import runs as runs_of

DRAWS = 16
COST = "docs/results/cost.md"
METHODS = {
    "rank1": lb.Rank1(),
    "batch_ensemble": lb.BatchEnsemble(),
    "implicit": lb.ImplicitNodes(),
    "patch": lb.ModelPatch(),
    "variance": lb.VarianceLayers(),
    "nested": lb.NestedDropout(),
    "mc_dropout": lb.MCDropout(),
    "mean_field": lb.MeanField(),
}
COLUMNS = (
    "rank1",
    "batch_ensemble",
    "implicit",
    "patch",
    "patch_crossed",
    "variance",
    "nested",
    "mc_dropout",
    "mean_field",
)
FOUR = ("rank1", "batch_ensemble", "implicit", "patch")

GPU, CPU = file_of("cost-h200.json"), file_of("cost-cpu.json")


def cell(record: Mapping[str, Any], name: str, digits: int = 2) -> str:
    """Write a ratio; nothing where it was not measured, a star where another training used the GPU."""
    if name not in record["ratio"]:
        return ""
    return f"{record['ratio'][name]:.{digits}f}" + star(record, name)


def star(record: Mapping[str, Any], name: str) -> str:
    return "\\*" if name in record["indication"] else ""


def steps(mode: str) -> list[Mapping[str, Any]]:
    return [record for name, record in GPU["train_step"].items() if name.endswith(mode)]


def answers(*, one: bool) -> list[Mapping[str, Any]]:
    return [record for name, record in GPU["answer"].items() if name.endswith(", 1") == one]


def passes(record: Mapping[str, Any], name: str) -> float:
    """Return the price of an answer in plain passes."""
    return record.get("passes", {}).get(name, DRAWS * record["ratio"][name])


def paid(records: Iterable[Mapping[str, Any]], *names: str) -> list[float]:
    return [passes(record, name) for record in records for name in names if name in record["ratio"]]


def over(found: Iterable[tuple[float, str]], digits: int) -> str:
    """Write a range over networks, with a star where one of its ends is an indication."""
    ordered = sorted(found)
    if not ordered:
        return ""
    ends = dict.fromkeys(f"{value:.{digits}f}" for value, _ in (ordered[0], ordered[-1]))
    return " to ".join(ends) + max(ordered[0][1], ordered[-1][1])


def ratios_of(records: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, str]]:
    return [(record["ratio"][name], star(record, name)) for record in records if name in record["ratio"]]


def prices_of(records: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, str]]:
    return [(passes(record, name), star(record, name)) for record in records if name in record["ratio"]]


@cache
def extra(name: str) -> float:
    """Return the parameters that a method adds to a WRN-28-10, in percent."""
    return lb.summary(lb.convert(wide_net(), METHODS[name])).extra_percent


@cache
def wide_net() -> nn.Module:
    return lb.models.build("wrn-28-10", num_outputs=10, input_shape=(3, 32, 32))


# ------------------------------------------------------------------------------------ cost.md


def test_training_steps_are_those_of_the_file():
    rows = [["network, batch, mode", "plain, ms", *COLUMNS]]
    for name, record in GPU["train_step"].items():
        digits = 2 if name.endswith("compiled") else 1
        rows.append([name, f"{record['plain_ms']:.1f}", *(cell(record, method, digits) for method in COLUMNS)])
    assert lacking(COST, rows) == []


def test_captured_steps_are_those_of_the_file():
    rows = []
    for name, record in GPU["captured_step"]["steps"].items():
        around = record["quartiles"] | record["range"]
        shown = {m: f"{r:.2f} ({around[m][0]:.2f}-{around[m][1]:.2f})" for m, r in record["ratio"].items()}
        rows.append([name, f"{record['plain_ms']:.1f}", *(shown.get(m, "") for m in ("rank1", "implicit", "patch"))])
    for name, record in GPU["kernels"]["steps"].items():
        rows.append([name, *(f"{time:.1f} ({number})" for time, number in record.values())])
    assert lacking(COST, rows) == []
    first = GPU["captured_step"]["first_call_seconds"]
    said = "The first call took {} to {} s for the plain networks and {} to {} s for rank1"
    between, images = (GPU["kernels"][name] for name in ("between_convolutions_ms", "gradient_of_images_ms"))
    shares = "take {plain} ms in the plain network, {rank1} ms under rank1, {implicit} ms under implicit and {patch} ms"
    gradient = f"the gradient of the images takes {images['rank1 and implicit']} ms"
    assert unsaid(COST, [said.format(*first["plain"], *first["rank1"]), shares.format(**between), gradient]) == []


def test_memory_is_that_of_the_file():
    names = ("rank1", "implicit", "patch", "variance", "nested", "mean_field")
    rows = [["network, batch, mode", *names]]
    for name, record in GPU["train_step"].items():
        peaks = record["memory"]
        rows.append(
            [
                name,
                *(f"{peaks[method]:.{2 if peaks[method] < 5 else 1}f}" if method in peaks else "" for method in names),
            ]
        )
    assert lacking(COST, rows) == []


def test_answers_are_those_of_the_file():
    names = tuple(name for name in COLUMNS if name not in ("variance", "nested"))
    rows = [["network, rows", "one plain pass, ms", *names]]
    for name, record in GPU["answer"].items():
        cells = [f"{passes(record, m):.0f}{star(record, m)}" if m in record["ratio"] else "" for m in names]
        rows.append([name, f"{record['plain_ms'] / DRAWS:.1f}", *cells])
    assert lacking(COST, rows) == []


def test_prices_on_a_cpu_are_those_of_the_file():
    rows = []
    for name, record in CPU["train_step"].items():
        quartiles = "({:.2f}-{:.2f})".format(*record["quartiles"]) if "quartiles" in record else ""
        rows.append([name, f"{record['ratio']:.2f} {quartiles}".strip(), f"{DRAWS * CPU['answer'][name]:.1f}"])
    small = {name: record for name, record in CPU["small_inputs"].items() if name != "of"}
    drawn = ("rank1", "implicit", "patch", "batch_ensemble")
    rows += [[name, *(str(record[m]) for m in drawn)] for name, record in small.items()]
    assert lacking(COST, rows) == []


def test_first_calls_of_compiled_steps_are_those_of_the_file():
    first = GPU["first_call"]
    low, high = first["warm_cache_seconds"]
    said = f"takes {low} to {high} s with a warm cache, and took {first['cold_seconds']} s cold, {first['cold']}."
    assert unsaid(COST, [said]) == []


# ------------------------------------------------------------------------------------ README


def test_the_readme_opens_with_the_prices_of_its_default():
    first = GPU["train_step"]["WRN-28-10, 256, compiled"]["ratio"]["implicit"]
    again = next(row["ratio"] for row in file_of("wrn28/price.json")["rows"] if row["method"] == "implicit")
    more = sorted(round(100 * (28 + 12 * ratio) / 40 - 100) for ratio in (first, again))
    many, single = (round(passes(GPU["answer"][f"WRN-28-10, {rows}"], "implicit")) for rows in (1024, 1))
    said = [
        f"{extra('implicit'):.2f} % more parameters and {more[0]} to {more[1]} % more training time "
        "(the last 12 of 40 epochs are converted).",
        f"An answer with 16 draws takes {many} plain passes for many rows, and {single} for one row.",
    ]
    assert unsaid("README.md", said) == []


def test_prices_below_the_table_of_the_readme_are_those_of_the_files():
    runs = runs_of("digits")
    more = [runs[name][0]["cost"]["extra_percent"] for name in FOUR]
    small = [statistics.fmean(run["cost"]["train_step_ratio"] for run in runs[name]) for name in FOUR]
    compiled = [GPU["train_step"]["WRN-16-4, 128, compiled"]["ratio"][name] for name in FOUR]
    captured = GPU["captured_step"]["steps"]["ResNet-50 (224 pixels), 128"]["ratio"]["rank1"]
    said = [
        f"The first four methods add {span(map(extra, FOUR), 1)} % parameters to a WRN-28-10, but {span(more, 0)} % to "
        f"a network of {runs['plain'][0]['cost']['parameters']:,} parameters. There a step on a CPU costs "
        f"{span(small, 1)} plain steps",
        f"`Rank1` captured on a ResNet-50 costs {captured:.2f}, compiled steps of a WRN-16-4 cost {span(compiled)}.",
    ]
    assert unsaid("README.md", said) == []


def test_the_price_table_of_the_readme_is_that_of_the_files():
    assert lacking("README.md", price_rows()) == []


def price_rows() -> list[list[str]]:
    """Return the rows of the price table of the README."""
    wide = GPU["train_step"]["WRN-28-10, 256, compiled"]
    again = {row["method"]: f" ({row['ratio']:.2f})" for row in file_of("wrn28/price.json")["rows"]}
    captured = GPU["captured_step"]["steps"]["WRN-28-10, 256"]["ratio"]
    rows = []
    for name, method in METHODS.items():
        step, answer = CPU["train_step"][name]["ratio"], DRAWS * CPU["answer"][name]
        gpu = [cell(wide, name) + again.get(name, ""), f"{captured[name]:.2f}" if name in captured else ""]
        gpu.append(over(ratios_of(steps("eager"), name), 1))
        answer_gpu = [over(prices_of(answers(one=one), name), 0) for one in (False, True)]
        rows.append([f"`{type(method).__name__}`", f"{step:.2f}", *gpu, f"{answer:.0f}", *answer_gpu])
    return rows


def test_extra_parameters_of_the_readme_are_those_of_the_summary():
    text = (ROOT / "README.md").read_text()
    for name in FOUR:
        row = rf"^\|[^|]*\|[^|]*\|[^|]*`lb\.{type(METHODS[name]).__name__}\b[^|]*\| {extra(name):.2f} % \|$"
        assert re.search(row, text, re.MULTILINE), name
    assert f"| {extra('nested'):.2f} %; almost none without noise |" in text
    laplace = lb.summary(lb.convert(lb.models.WideResNet(28, 10), lb.LastLayerLaplace())).extra_percent
    assert re.search(rf"a Gaussian around the last layer;.* \| {laplace:.2f} % \|$", text, re.MULTILINE)


def test_the_guide_of_the_readme_calls_cheapest_what_is_cheapest():
    step = CPU["train_step"]
    assert min(step, key=lambda name: step[name]["ratio"]) in ("patch", "patch_crossed")  # both are `lb.ModelPatch`
    said = ["trained on a CPU | the cheapest step there | `lb.ModelPatch()`"]
    assert unsaid("README.md", said) == []


def test_no_first_line_claims_the_price_of_the_network():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    usage = (ROOT / "src" / "leanbayes" / "cli" / "main.py").read_text().split('USAGE = """')[1].splitlines()[0]
    assert lb.__doc__ is not None
    for line in (project, usage, lb.__doc__.splitlines()[0]):
        assert "price of the network" not in line
        assert project.rstrip(".").lower() in line.lower()


def test_the_student_of_the_readme_is_that_of_the_curve():
    priced = file_of("curve/fashion-mnist-lenet-price.json")["points"]
    prices = {f"{point['ratio']:.2f}" for point in priced if point["way"] == "student"}
    seeds = [file_of(f"curve/fashion-mnist-lenet-seed{seed}.json")["points"] for seed in range(3)]
    above = []
    for method in ("implicit", "rank1"):
        student, draws = (
            [point["raw"]["nll"] for points in seeds for point in points if (point["method"], point["way"]) == key]
            for key in ((method, "student"), (method, "16 draws"))
        )
        each = [100 * (one / other - 1) for one, other in zip(student, draws, strict=True)]
        above.append(f"{statistics.fmean(each):.1f}")
    low, high = sorted(above)
    (price,) = prices
    said = [
        f"The answer of a student costs {price} plain passes on a CPU.",
        f"its NLL is {low} to {high} % above that of sixteen draws",
    ]
    assert unsaid("README.md", said) == []
