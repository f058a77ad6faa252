"""The columns of the comparison: name, direction and format of each figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from leanbayes.evaluation.statistics import Estimate
from leanbayes.report.load import cut

Key = tuple[str, ...]
MOST_DECIMALS = 5
TINY = 1e-4  # columns of smaller values have as many decimals as they need
SCORES = {"entropy": "total uncertainty", "mutual_information": "epistemic uncertainty", "confidence": "confidence"}


TERMS = {  # words of the page, in addition to the columns
    "Seed": "Number that starts the random numbers of a training; several seeds show how much chance decides.",
    "Draw": "One sample of the network's weights; an answer is the mean over several draws or members.",
    "Total uncertainty": "Entropy of the predicted classes, in nats, or variance of the predicted target.",
    "Aleatoric uncertainty": "The part of the total uncertainty that no further data would remove.",
    "Epistemic uncertainty": "The part of the total uncertainty in which the draws disagree; more data reduce it.",
    "Confidence": "Probability of the predicted class.",
    "Coverage": "Share of answers that are kept, or share of targets inside their interval.",
    "Out-of-distribution": "Inputs unlike the training data; a good network is less sure of them.",
    "KL": "Divergence of the posterior from the prior, the price of information in the weights, in nats.",
    "Temperature": "Number that divides the logits; it makes probabilities softer or sharper without other answers.",
    "Standard error": "Uncertainty of a mean over seeds: standard deviation over the root of their number.",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of merit or cost.

    Attributes:
        key: its key in the facts of a run.
        title: its name in the head of the table.
        group: name of its group of columns.
        better: the better direction.
        help: its meaning, in a sentence.
        unit: written after the title.
        scale: factor from the file's number to the written one (100 for percent).
        style: "number" has equal decimals down the column; "short" has three digits each; "count"; "time" in seconds.
        digits: significant digits of a typical value.
        alone: the title in tables without names of groups.
        marked: whether the best is marked; costs are not, because the plain network would always win.
        place: "brief" is in all tables, "main" in all but the terminal's, "text" in Markdown and below the main table,
            "rest" only below the main table.
    """

    key: Key
    title: str
    group: str
    better: Literal["higher", "lower"]
    help: str
    unit: str = ""
    scale: float = 1.0
    style: Literal["number", "short", "count", "time"] = "number"
    digits: int = 3
    alone: str = ""
    marked: bool = True
    place: Literal["brief", "main", "text", "rest"] = "main"

    @property
    def sign(self) -> int:
        """1 if higher is better, else -1."""
        return 1 if self.better == "higher" else -1

    @property
    def head(self) -> str:
        """Title and unit, for tables without names of groups."""
        return f"{self.alone or self.title} {self.unit}".rstrip()

    def decimals(self, estimates: Iterable[Estimate]) -> int:
        """Return the decimals of the column: enough for typical values and typical standard errors."""
        known = list(estimates)
        middle = _middle([abs(e.mean * self.scale) for e in known])
        error = _middle([e.sem * self.scale for e in known if e.sem]) if self.marked else 0.0
        wanted = self.digits - 1 - math.floor(math.log10(middle)) if middle else 1
        needed = max(wanted, -math.floor(math.log10(error)) if error else 0, 0)
        return wanted if 0 < middle < TINY else min(needed, MOST_DECIMALS)

    def write(self, estimate: Estimate, decimals: int) -> tuple[str, str]:
        """Return the mean and its standard error as text; a constant cost has no error."""
        mean = estimate.mean * self.scale
        if self.style != "number":
            return _WRITERS[self.style](mean), ""
        written = f"{estimate.bound}{mean:z.{decimals}f}"  # z: no minus before zero
        if estimate.sem is None or (estimate.sem == 0 and not self.marked):
            return written, ""
        sem, smallest = estimate.sem * self.scale, 10.0**-decimals
        return written, f"<{smallest:.{decimals}f}" if 0 < sem < smallest / 2 else f"{sem:.{decimals}f}"


def _middle(sizes: list[float]) -> float:
    return statistics.median([size for size in sizes if size] or [0.0])


def duration(seconds: float) -> str:
    """Write a time in s, min or h."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def short_number(value: float) -> str:
    """Write a number to three digits, large ones without an exponent."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


_WRITERS: dict[str, Callable[[float], str]] = {"short": short_number, "count": "{:,.0f}".format, "time": duration}


def _column(section: str, group: str, name: str, title: str, better: Any, help: str, **options: Any) -> Column:
    """Return a column; `percent=True` writes a share in percent."""
    if options.pop("percent", False):
        options |= {"unit": "%", "scale": 100}
    return Column(key=(section, name), title=title, group=group, better=better, help=help, **options)


_test = partial(_column, "test", "Test set")
_corrupted = partial(_column, "shift", "Corrupted")
_cost = partial(_column, "cost", "Cost", better="lower", marked=False)

CLASSIFICATION = (
    _test("accuracy", "Accuracy", "higher", "Share of test inputs whose most probable class is right.", percent=True,
          digits=4, place="brief"),
    _test("nll", "NLL", "lower", "Mean of -log p(true class), in nats: right and unsure costs little, wrong and sure "
          "costs much.", place="brief"),
    _test("cnll", "Calibrated NLL", "lower", "NLL after the best temperature, found by two-fold cross-validation: the "
          "loss that remains once sharpness is free."),
    _test("ensemble_equivalent", "Ensemble equivalent", "higher", "Networks that a deep ensemble needs for the same "
          "calibrated NLL, along the line between those measured.", digits=2, marked=False, place="text"),
    _test("ece", "ECE", "lower", "Expected calibration error: mean gap between confidence and accuracy over bins.",
          percent=True, place="brief"),
    _test("brier", "Brier", "lower", "Mean squared distance between the probabilities and the truth."),
    _test("aurc", "AURC", "lower", "Area under the risk-coverage curve: the error rate when the least certain inputs "
          "are handed on."),
    _test("top5", "Top-5 accuracy", "higher", "Share of test inputs whose class is among the five most probable.",
          percent=True, digits=4, place="rest"),
    _test("mce", "Largest calibration gap", "lower", "The largest gap between confidence and accuracy of any bin.",
          percent=True, place="rest"),
    _test("ece20", "ECE, 20 bins", "lower", "Expected calibration error with 20 bins.", percent=True, place="rest"),
    _test("adaptive_ece", "Adaptive ECE", "lower", "Calibration error over bins that hold equally many inputs.",
          percent=True, place="rest"),
    _test("classwise_ece", "Classwise ECE", "lower", "Calibration error of every class's probability, averaged over "
          "classes.", percent=True, place="rest"),
    _test("temperature", "Temperature", "lower", "The temperature that calibrates best: above 1 the network was too "
          "sure.", marked=False, place="rest"),
    _test("disagreement", "Disagreement", "higher", "How often two draws name different classes, over the mean error "
          "of the draws: diversity.", marked=False, place="rest"),
)  # fmt: skip

REGRESSION = (
    _test("rmse", "RMSE", "lower", "Root of the mean squared error, in the target's units.", place="brief"),
    _test("lpd", "LPD", "higher", "Mean log predictive density of the true targets.", place="brief"),
    _test("crps", "CRPS", "lower", "Continuous ranked probability score, in the target's units: the error of the whole "
          "distribution.", place="brief"),
    _test("coverage", "Coverage of 95\u00a0% interval", "higher", "Share of targets inside the central 95 % interval: "
          "95 would be right.", percent=True, marked=False, place="brief"),
    _test("interval_width", "Width of 95\u00a0% interval", "lower", "Mean width of the central 95 % interval, in the "
          "target's units.", marked=False),
    _test("interval_width_validated", "Width at 95\u00a0% validation coverage", "lower", "Mean width of the intervals "
          "after one factor scaled them to hold 95 % of the held-out training rows, in the target's units."),
    _test("coverage_validated", "Coverage of these intervals", "higher", "Share of test targets inside the intervals "
          "that hold 95 % of the held-out training rows.", percent=True, marked=False, place="text"),
)  # fmt: skip

CORRUPTED = (
    _corrupted("accuracy", "Accuracy", "higher", "Accuracy on corrupted test images, mean over corruptions and "
               "severities.", alone="Corrupted accuracy", percent=True, digits=4),
    _corrupted("nll", "NLL", "lower", "NLL on corrupted test images, mean over corruptions and severities.",
               alone="Corrupted NLL"),
    _corrupted("ece", "ECE", "lower", "Calibration error on corrupted test images, mean over corruptions and "
               "severities.", alone="Corrupted ECE", percent=True),
    _corrupted("mce", "mCE", "lower", "Mean corruption error: errors under corruption in percent of the plain "
               "network's.", percent=True, digits=4, place="brief"),
    _corrupted("relative_mce", "Relative mCE", "lower", "Errors added by corruption, in percent of those added to the "
               "plain network.", percent=True, digits=4, place="rest"),
)  # fmt: skip

COST = (
    _cost("extra_percent", "Extra params", help="Parameters beyond the plain network's.", unit="%", style="short",
          place="brief"),
    _cost("training_ratio", "Train", help="A whole training, in trainings of the plain network: steps before a late "
          "conversion cost one.", unit="x", place="brief"),
    _cost("train_step_ratio", "Train step", help="Time of a training step once converted, in training steps of the "
          "plain network.", unit="x", place="rest"),
    _cost("answer_passes", "Answer", help="Cost of one answer in passes of the plain network: the passes it takes "
          "times the cost of one.", unit="passes", place="brief"),
    _cost("answer_ms", "Answer", help="Time of one answer where many rows are answered at once.", unit="ms/row",
          style="short", alone="Answer,"),
    _cost("answer_ms_one", "One row", help="Time of one answer to a single row.", unit="ms", style="short",
          alone="Answer to one row,"),
    _cost("passes", "Passes", help="Passes that one answer takes: a pass for every draw, or for every member of an "
          "ensemble.", style="count", place="text"),
    _cost("predict_ratio", "One pass", help="Time of one of these passes, in passes of the plain network.", unit="x",
          place="rest"),
    _cost("answer_madds_ratio", "Counted", help="Multiply-adds of one answer, in passes of the plain network. Layers "
          "before the first stochastic one count once.", unit="passes", alone="Answer, counted,", place="rest"),
    _cost("train_seconds", "Train time", help="Time that training took.", style="time", alone="Training time",
          place="text"),
    _cost("peak_memory_mb", "Peak memory", help="Most memory in use.", unit="MB", place="rest"),
    _cost("extra_parameters", "Extra parameters", help="Parameters beyond the plain network's, counted.",
          style="count", place="rest"),
)  # fmt: skip


def test_columns(task: str) -> list[Column]:
    """Return the columns of the test set."""
    return list(REGRESSION if task == "regression" else CLASSIFICATION)


def shift_columns(name: str, task: str, *, brief: bool) -> list[Column]:
    """Return the columns of one set of shifted rows."""
    group, short, of = "Shifted rows", cut(name), f"on the shifted rows {name}."

    def column(key: str, title: str, better: Any, help: str, place: Any, **options: Any) -> Column:
        own: dict[str, Any] = {"key": ("shift_data", name, key), "title": f"{title} {short}", "group": group}
        return Column(**own, better=better, help=f"{help} {of}", place=place, **options)

    percent: dict[str, Any] = {"unit": "%", "scale": 100}
    if task == "regression":
        return [
            column("lpd", "LPD", "higher", "Mean log predictive density", "brief" if brief else "main"),
            column("rmse", "RMSE", "lower", "Root of the mean squared error", "main"),
            column("coverage", "Coverage", "higher", "Share of targets inside the central 95 % interval", "main",
                   marked=False, **percent),
        ]  # fmt: skip
    return [
        column("nll", "NLL", "lower", "Mean of -log p(true class)", "brief" if brief else "main"),
        column("accuracy", "Accuracy", "higher", "Share of right answers", "main", digits=4, **percent),
        column("ece", "ECE", "lower", "Expected calibration error", "rest", **percent),
    ]


def ood_columns(name: str, scores: Iterable[str], *, brief: bool) -> list[Column]:
    """Return the columns of one out-of-distribution set; `scores` are further uncertainties that detect it."""
    group, short = "Out-of-distribution inputs", cut(name)
    what = f"test inputs against {name}"
    area = "Area under the ROC curve"

    def column(key: Key, title: str, better: Any, help: str, place: Any = "rest") -> Column:
        return Column(key=("ood", name, *key), title=title, group=group, better=better, help=help, place=place)

    reverse = "1 separates them, 0.5 is chance, below 0.5 the order is reversed."
    found = f"Share of test inputs taken for out-of-distribution ones where 95 % of {name} are found."
    by = {score: SCORES.get(score, score) for score in ("entropy", *scores)}
    shown = {"mutual_information": "main"}
    return [
        column(("auroc",), f"AUROC {short}", "higher", f"{area}, {what} by total uncertainty: {reverse}",
               "brief" if brief else "main"),
        *(
            column((score, "auroc"), f"AUROC {short} by {by[score].split()[0]}", "higher",
                   f"{area}, {what} by {by[score]}: {reverse}", shown.get(score, "rest"))
            for score in scores
        ),
        column(("aupr",), f"AUPR {short}", "higher", f"Area under the precision-recall curve, {what}."),
        column(("fpr95",), f"FPR95 {short}", "lower", found),
    ]  # fmt: skip
