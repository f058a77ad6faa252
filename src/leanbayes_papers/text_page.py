"""What came of the text encoders: lines, tables and figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from leanbayes.evaluation.statistics import Estimate, estimate
from leanbayes_papers.overview import Overview
from leanbayes_papers.rank1_ehr import verdict
from leanbayes_papers.study import new_figure, Numbers, save_figure
from leanbayes_papers.text_networks import DETERMINISTIC

TFIDF = "TF-IDF, logistic regression"
LEGEND = (
    "Mean ± standard error over seeds. Networks of one seed begin with the same weights and see the same sentences."
)


class Measure(NamedTuple):
    """How a measure is written.

    Attributes:
        head: of its column.
        scale: what its values are multiplied by.
        digits: decimals.
        sign: 1 where more is better, -1 where less is.
    """

    head: str
    scale: float
    digits: int
    sign: int


MEASURES = {
    "accuracy": Measure("accuracy, %", 100, 1, 1),
    "nll": Measure("NLL", 1, 4, -1),
    "brier": Measure("Brier", 1, 4, -1),
    "ece": Measure("ECE", 1, 4, -1),
    "tempered": Measure("NLL, best temperature", 1, 4, -1),
    "errors": Measure("AUROC of errors", 1, 3, 1),
    "surest 80 %": Measure("accuracy of the surest 80 %", 100, 1, 1),
    "surest 50 %": Measure("of the surest 50 %", 100, 1, 1),
}
FOREIGN = {"random words": "random words", "shuffled": "shuffled words"}
SCORES = {"entropy": "entropy", "mutual_information": "mutual information"}


def value(numbers: Numbers, run: Mapping[str, Any], measure: str) -> float:
    """Return a measure of a run in the units in which it is written."""
    kind = MEASURES[measure]
    if measure.startswith("surest"):
        share = float(measure.removeprefix("surest ").removesuffix(" %")) / 100
        places = [abs(coverage - share) for coverage in numbers["coverages"]]
        return kind.scale * float(run["curve"][places.index(min(places))])
    return kind.scale * float(run[measure])


def over_seeds(numbers: Numbers, name: str, measure: str) -> Estimate:
    """Return the mean of a measure over the seeds of a row, with its standard error."""
    return _mean(value(numbers, run, measure) for run in numbers["rows"][name]["seeds"])


def gain(numbers: Numbers, name: str, measure: str) -> Estimate:
    """Return how much better a row is than the deterministic one, seed by seed: both began with the same weights."""
    pairs = zip(numbers["rows"][name]["seeds"], numbers["rows"][DETERMINISTIC]["seeds"], strict=True)
    sign = MEASURES[measure].sign
    return _mean(sign * (value(numbers, one, measure) - value(numbers, other, measure)) for one, other in pairs)


def written(found: Estimate, digits: int, plus: str = "") -> str:
    """Write a mean with its standard error."""
    return f"{found.mean:{plus}.{digits}f}" + ("" if found.sem is None else f" ± {found.sem:.{digits}f}")


def overview(numbers: Numbers) -> Overview:
    """Put all rows below each other, the logistic regression last."""
    plain = numbers["rows"][DETERMINISTIC]["parameters"]
    rows = []
    for name, row in numbers["rows"].items():
        cells = (written(over_seeds(numbers, name, m), kind.digits) for m, kind in MEASURES.items())
        rows.append([name, *cells, f"{row['parameters'] / plain:.3f}"])
    baseline = (f"{value(numbers, numbers['tfidf'], m):.{kind.digits}f}" for m, kind in MEASURES.items())
    rows.append([TFIDF, *baseline, "-"])
    count = numbers["sentences"]
    return Overview(
        title="Movie-review sentences",
        heads=["", *(kind.head for kind in MEASURES.values()), "parameters, ratio"],
        rows=rows,
        says=[
            f"{count['train']:,} sentences to learn from, {count['test']:,} to be judged on; {numbers['samples']} "
            f"draws, {numbers['members']} members in an ensemble, mean ± standard error over "
            f"{len(numbers['rows'][DETERMINISTIC]['seeds'])} seeds. Brier is the squared error, summed over classes."
        ],
    )


def foreign(numbers: Numbers) -> list[list[str]]:
    """Return the lines of the table of foreign sentences: mutual information at home, then AUROC by either score."""
    lines = []
    for name, row in numbers["rows"].items():
        cells = [written(_mean(run["epistemic"] for run in row["seeds"]), 4)]
        for where in FOREIGN:
            for score in SCORES:
                found = _mean(run["foreign"][where][score] for run in row["seeds"])
                told = name != DETERMINISTIC or score == "entropy"  # a single network has no mutual information
                cells.append(written(found, 3) if told else "-")
        lines.append([name, *cells])
    return lines


def gains(numbers: Numbers) -> list[str]:
    """Tell for every row and measure whether it is better than the deterministic encoder."""
    lines = []
    for name in numbers["rows"]:
        if name == DETERMINISTIC:
            continue
        told = []
        for measure, kind in MEASURES.items():
            found = gain(numbers, name, measure)
            told.append(f"{kind.head} {verdict(found)} ({written(found, kind.digits, '+')})")
        lines.append(f"{name} against deterministic, gains: {'; '.join(told)}")
    return lines


def say(numbers: Numbers) -> list[str]:
    """Tell the gains of every row, and what its doubts say of foreign sentences."""
    heads = [f"{where} by {score}" for where in FOREIGN.values() for score in SCORES.values()]
    told = [
        f"{name}: mutual information {own} nats; AUROC of {', '.join(map(' '.join, zip(heads, cells, strict=True)))}"
        for name, own, *cells in foreign(numbers)
    ]
    return [*gains(numbers), *told]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw accuracy, NLL and ECE of every row with standard errors, and the accuracy of the surest sentences."""
    figure = new_figure(12, 4)
    *axes, curves = figure.subplots(1, 4)
    names = list(numbers["rows"])
    for axis, measure in zip(axes, ("accuracy", "nll", "ece"), strict=True):
        found = [over_seeds(numbers, name, measure) for name in names]
        axis.errorbar([f.mean for f in found], range(len(names)), xerr=[f.sem or 0 for f in found], fmt="o", capsize=3)
        axis.axvline(value(numbers, numbers["tfidf"], measure), color="black", lw=1, ls=":")
        better = "more" if MEASURES[measure].sign > 0 else "less"
        axis.set_title(f"{MEASURES[measure].head} ({better} is better)", size=9)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names), fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.invert_yaxis()
    _draw_curves(curves, numbers)
    save_figure(figure, path)


def _draw_curves(axis: Any, numbers: Numbers) -> None:
    """Draw the accuracy of the surest sentences: the first row, the last and the regression stand out of the rest."""
    shares = [100 * share for share in numbers["coverages"]]
    first, *others, last = numbers["rows"]
    for name in (*others, first, last):
        seeds = zip(*(run["curve"] for run in numbers["rows"][name]["seeds"]), strict=True)
        means = [100 * sum(values) / len(values) for values in seeds]
        style = {first: "#d62728", last: "#1f5f9f"}.get(name, "#bbbbbb")
        axis.plot(shares, means, color=style, lw=1, label=name if name in (first, last) else None)
    axis.plot([], [], color="#bbbbbb", lw=1, label="other rows")
    axis.plot(shares, [100 * accuracy for accuracy in numbers["tfidf"]["curve"]], "k:", lw=1, label=TFIDF)
    axis.set_title("accuracy of the surest sentences, %", size=9)
    axis.set_xlabel("share that is answered, %", fontsize=8)
    axis.legend(fontsize=7)


def _mean(values: Iterable[float]) -> Estimate:
    found = estimate(values)
    assert found is not None
    return found
