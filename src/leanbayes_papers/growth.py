"""Test error as a network grows: figure 4 of the implicit-nodes paper, from the results of its runs."""

from __future__ import annotations

from pathlib import Path

from leanbayes.evaluation.result import read_result
from leanbayes.evaluation.statistics import curve
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure


def errors_by_size(case: Case) -> Numbers:
    """Return test errors by label, seed and number of parameters of the plain network."""
    found: Numbers = {}
    for job in case.jobs:
        result = read_result(job.folder(case.out))
        assert result is not None, "studies are conducted on runs that are done"
        seeds = found.setdefault(job.label, {}).setdefault(str(job.seed), {})
        seeds[str(result["network"]["parameters"])] = 1 - result["metrics"]["test"]["accuracy"]
    return found


def say_growth(numbers: Numbers) -> list[str]:
    """Tell how the error changes from the smallest network to the largest."""
    lines = []
    for label, seeds in numbers.items():
        points = curve({float(size): error for size, error in sizes.items()} for sizes in seeds.values())
        told = ", ".join(f"{100 * point.mean:.2f} % at {size / 1000:,.0f}K" for size, point in points.items())
        lines.append(f"{label}: error {told}")
    return lines


def draw_growth(numbers: Numbers, path: Path) -> None:
    """Draw the error over the number of parameters, mean over seeds with its standard error."""
    figure = new_figure(4.6, 3.2)
    axis = figure.subplots()
    for label, seeds in numbers.items():
        points = curve({float(size): 100 * error for size, error in sizes.items()} for sizes in seeds.values())
        means, sems = zip(*((point.mean, point.sem or 0.0) for point in points.values()), strict=True)
        axis.errorbar(list(points), means, sems, marker="o", capsize=3, label=label)
    axis.set(xscale="log", xlabel="parameters of the plain network", ylabel="test error, %")
    axis.legend(fontsize=7)
    save_figure(figure, path)
