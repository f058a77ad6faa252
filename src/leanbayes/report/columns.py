"""The columns of the comparison: what each figure is called, which way is better, how it is written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leanbayes import shift
from leanbayes.evaluation.statistics import Estimate, number
from leanbayes.report.load import Run
from leanbayes.report.looks import cut

Key = tuple[str, ...]
SCORES = {"entropy": "entropy", "mutual_information": "mutual information", "confidence": "confidence"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of merit or cost.

    Attributes:
        key: where a run's facts keep it.
        title: its name in the head of the table.
        group: the columns it stands with.
        better: which way is better.
        help: what it means, in a sentence.
        unit: written after the title.
        scale: the factor between the file's number and the written one (100 for percent).
        style: "number" gets equal decimals down the column; "short" three digits each; "count"; "time" in seconds.
        digits: significant digits of a typical value.
        alone: the title where the name of the group does not stand above it.
        marked: whether the best is marked; costs are not, the plain network would always win.
        place: "brief" shows it in the terminal too, "main" in every other table, "rest" below the main table only.
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
    place: Literal["brief", "main", "rest"] = "main"

    @property
    def head(self) -> str:
        """Title and unit, as they read without the name of the group."""
        return f"{self.alone or self.title} {self.unit}".rstrip()

    def decimals(self, estimates: Iterable[Estimate]) -> int:
        """Choose one number of decimals for the column: enough for typical values and typical standard errors."""
        known = list(estimates)
        middle = _middle([abs(e.mean * self.scale) for e in known])
        error = _middle([e.sem * self.scale for e in known if e.sem])
        wanted = self.digits - 1 - math.floor(math.log10(middle)) if middle else 1
        return min(max(wanted, -math.floor(math.log10(error)) if error else 0, 0), 5)

    def write(self, estimate: Estimate, decimals: int) -> tuple[str, str]:
        """Write the mean and its standard error; a cost that is the same in every run needs none."""
        mean = estimate.mean * self.scale
        if self.style != "number":
            return _WRITERS[self.style](mean), ""
        written = f"{estimate.bound}{mean:z.{decimals}f}"  # z: no minus before zero
        if estimate.sem is None or (estimate.sem == 0 and not self.marked):
            return written, ""
        sem, smallest = estimate.sem * self.scale, 10.0**-decimals
        return written, f"<{smallest:.{decimals}f}" if 0 < sem < smallest / 2 else f"{sem:.{decimals}f}"


def _middle(sizes: list[float]) -> float:
    """Return the median of the sizes that are not zero, or zero."""
    return statistics.median([size for size in sizes if size] or [0.0])


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


_WRITERS: dict[str, Callable[[float], str]] = {"short": "{:.3g}".format, "count": "{:,.0f}".format, "time": duration}


def test_columns(task: str) -> list[Column]:
    """List the columns on the test set."""
    return list(REGRESSION if task == "regression" else CLASSIFICATION)


def foreign_columns(name: str, scores: Iterable[str], *, brief: bool) -> list[Column]:
    """List the columns on one set of foreign inputs.

    Args:
        name: the set.
        scores: the uncertainties by which it was told apart from the test set.
        brief: whether the terminal has room for it.
    """
    group, short = "Foreign inputs", cut(name)
    what = f"test inputs against {name}"
    return [
        Column(
            key=("ood", name, "auroc"), title=f"AUROC {short}", group=group, better="higher",
            place="brief" if brief else "main",
            help=f"Area under the ROC curve, {what} by uncertainty: 1 tells them apart, 0.5 is chance.",
        ),
        Column(
            key=("ood", name, "aupr"), title=f"AUPR {short}", group=group, better="higher", place="rest",
            help=f"Area under the precision-recall curve, {what}.",
        ),
        Column(
            key=("ood", name, "fpr95"), title=f"FPR95 {short}", group=group, better="lower", place="rest",
            help=f"Share of test inputs taken for foreign where 95 % of {name} are found.",
        ),
        *(
            Column(
                key=("ood", name, score, "auroc"), title=f"AUROC {short} by {SCORES.get(score, score)}", group=group,
                better="higher", place="rest", help=f"Area under the ROC curve, {what} by {SCORES.get(score, score)}.",
            )
            for score in scores
        ),
    ]  # fmt: skip


CLASSIFICATION = (
    Column(
        key=("test", "accuracy"), title="Accuracy", unit="%", scale=100, digits=4, group="Test set", better="higher",
        place="brief", help="Share of test inputs whose most probable class is right.",
    ),
    Column(
        key=("test", "nll"), title="NLL", group="Test set", better="lower", place="brief",
        help="Mean of -log p(true class), in nats: right and unsure costs little, wrong and sure costs much.",
    ),
    Column(
        key=("test", "cnll"), title="Calibrated NLL", group="Test set", better="lower",
        help="NLL after the best temperature, found by two-fold cross-validation: what is left once sharpness is free.",
    ),
    Column(
        key=("test", "ensemble_equivalent"), title="Ensemble equivalent", digits=2, group="Test set",
        better="higher", marked=False,
        help="Networks that a deep ensemble needs for the same calibrated NLL, along the line between those measured.",
    ),
    Column(
        key=("test", "ece"), title="ECE", unit="%", scale=100, group="Test set", better="lower", place="brief",
        help="Expected calibration error: mean gap between confidence and accuracy over bins.",
    ),
    Column(
        key=("test", "brier"), title="Brier", group="Test set", better="lower",
        help="Mean squared distance between the probabilities and the truth.",
    ),
    Column(
        key=("test", "aurc"), title="AURC", group="Test set", better="lower",
        help="Area under the risk-coverage curve: the error rate when the least certain inputs are handed on.",
    ),
    Column(
        key=("test", "top5"), title="Top-5 accuracy", unit="%", scale=100, digits=4, group="Test set",
        better="higher", place="rest", help="Share of test inputs whose class is among the five most probable.",
    ),
    Column(
        key=("test", "mce"), title="Largest calibration gap", unit="%", scale=100, group="Test set", better="lower",
        place="rest", help="The largest gap between confidence and accuracy of any bin.",
    ),
    Column(
        key=("test", "ece20"), title="ECE, 20 bins", unit="%", scale=100, group="Test set", better="lower",
        place="rest", help="Expected calibration error with 20 bins.",
    ),
    Column(
        key=("test", "adaptive_ece"), title="Adaptive ECE", unit="%", scale=100, group="Test set", better="lower",
        place="rest", help="Calibration error over bins that hold equally many inputs.",
    ),
    Column(
        key=("test", "classwise_ece"), title="Classwise ECE", unit="%", scale=100, group="Test set", better="lower",
        place="rest", help="Calibration error of every class's probability, averaged over classes.",
    ),
    Column(
        key=("test", "temperature"), title="Temperature", group="Test set", better="lower", marked=False,
        place="rest", help="The temperature that calibrates best: above 1 the network was too sure.",
    ),
    Column(
        key=("test", "disagreement"), title="Disagreement", group="Test set", better="higher", marked=False,
        place="rest", help="How often two draws name different classes, over the mean error of the draws: diversity.",
    ),
)  # fmt: skip

REGRESSION = (
    Column(
        key=("test", "rmse"), title="RMSE", group="Test set", better="lower", place="brief",
        help="Root of the mean squared error, in the target's units.",
    ),
    Column(
        key=("test", "lpd"), title="LPD", group="Test set", better="higher", place="brief",
        help="Mean log predictive density of the true targets.",
    ),
    Column(
        key=("test", "crps"), title="CRPS", group="Test set", better="lower", place="brief",
        help="Continuous ranked probability score, in the target's units: the error of the whole distribution.",
    ),
    Column(
        key=("test", "coverage"), title="Coverage of 95\u00a0% interval", unit="%", scale=100, group="Test set",
        better="higher", marked=False, place="brief",
        help="Share of targets inside the central 95 % interval: 95 would be right.",
    ),
)  # fmt: skip

CORRUPTED = (
    Column(
        key=("shift", "accuracy"), title="Accuracy", alone="Corrupted accuracy", unit="%", scale=100, digits=4,
        group="Corrupted", better="higher",
        help="Accuracy on corrupted test images, mean over corruptions and severities.",
    ),
    Column(
        key=("shift", "nll"), title="NLL", alone="Corrupted NLL", group="Corrupted", better="lower",
        help="NLL on corrupted test images, mean over corruptions and severities.",
    ),
    Column(
        key=("shift", "ece"), title="ECE", alone="Corrupted ECE", unit="%", scale=100, group="Corrupted",
        better="lower",
        help="Calibration error on corrupted test images, mean over corruptions and severities.",
    ),
    Column(
        key=("shift", "mce"), title="mCE", unit="%", scale=100, digits=4, group="Corrupted", better="lower",
        place="brief", help="Mean corruption error: errors under corruption in percent of the plain network's.",
    ),
    Column(
        key=("shift", "relative_mce"), title="Relative mCE", unit="%", scale=100, digits=4, group="Corrupted",
        better="lower", place="rest",
        help="Errors added by corruption, in percent of those added to the plain network.",
    ),
)  # fmt: skip

COST = (
    Column(
        key=("cost", "extra_percent"), title="Extra params", unit="%", style="short", group="Cost", better="lower",
        marked=False, place="brief", help="Parameters beyond the plain network's.",
    ),
    Column(
        key=("cost", "training_ratio"), title="Train", unit="x", group="Cost", better="lower", marked=False,
        place="brief",
        help="A whole training, in trainings of the plain network: steps before a late conversion cost one.",
    ),
    Column(
        key=("cost", "train_step_ratio"), title="Train step", unit="x", group="Cost", better="lower", marked=False,
        place="rest", help="Time of a training step once converted, in training steps of the plain network.",
    ),
    Column(
        key=("cost", "answer_passes"), title="Answer", unit="passes", group="Cost", better="lower", marked=False,
        place="brief",
        help="Cost of one answer in passes of the plain network: the passes it takes times the cost of one.",
    ),
    Column(
        key=("cost", "passes"), title="Passes", style="count", group="Cost", better="lower", marked=False,
        help="Passes that one answer takes: a pass for every draw, or for every member of an ensemble.",
    ),
    Column(
        key=("cost", "predict_ratio"), title="One pass", unit="x", group="Cost", better="lower", marked=False,
        place="rest", help="Time of one of these passes, in passes of the plain network.",
    ),
    Column(
        key=("cost", "train_seconds"), title="Time", style="time", alone="Training time", group="Cost",
        better="lower", marked=False,
        help="Time that training took.",
    ),
    Column(
        key=("cost", "peak_memory_mb"), title="Peak memory", unit="MB", group="Cost", better="lower", marked=False,
        place="rest", help="Most memory in use.",
    ),
    Column(
        key=("cost", "extra_parameters"), title="Extra parameters", style="count", group="Cost", better="lower",
        marked=False, place="rest", help="Parameters beyond the plain network's, counted.",
    ),
)  # fmt: skip


# -------------------- corrupted
# What runs tell about corrupted images: means, errors relative to the plain network, curves over severity.


Rows = Sequence[dict[str, Any]]
MEASURES = ("accuracy", "nll", "ece", "epistemic", "aleatoric")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows {corruption, severity, accuracy, nll, ece, ...} of a run, without those that lack a number."""
    rows = [dict(row) for row in run.rows("metrics", "shift")]
    return [row for row in rows if all(number(row.get(key)) is not None for key in ("severity", *MEASURES))]


def mean_rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Average rows over seeds: the plain network's are what an mCE divides by."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        for row in rows_of(run):
            found.setdefault((str(row["corruption"]), row["severity"]), []).append(row)
    return [
        {"corruption": name, "severity": severity, **{m: statistics.fmean(r[m] for r in rows) for m in MEASURES}}
        for (name, severity), rows in found.items()
    ]


def corrupted_facts(run: Run, plain: Rows) -> dict[str, float | None]:
    """Return means over corruptions and severities and, where the plain network is known, the (relative) mCE."""
    rows = rows_of(run)
    if not any(row["severity"] for row in rows):
        return {}
    facts: dict[str, float | None] = dict(shift.corrupted_means(rows))
    if _cells(rows) == _cells(plain):
        facts["mce"] = number(shift.mean_corruption_error(rows, plain))
        if any(severity == 0 for _, severity in _cells(rows)):
            facts["relative_mce"] = number(shift.relative_mean_corruption_error(rows, plain))
    return facts


def over_severity(run: Run, measure: str) -> dict[float, float | None]:
    """Average one measure over the corruptions of each severity; severity 0 is the clean images."""
    rows = rows_of(run)
    severities = sorted({float(row["severity"]) for row in rows})
    return dict(zip(severities, shift.severity_curve(rows, measure), strict=True))


def _cells(rows: Rows) -> set[tuple[str, float]]:
    return {(str(row["corruption"]), row["severity"]) for row in rows}
