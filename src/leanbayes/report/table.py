"""The comparison as data: a row for each contender, a column for each figure, the best marked.

`facts` computes the figures of one run, `estimates_of` their means over seeds, `comparison` the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from leanbayes import shift
from leanbayes.evaluation.statistics import difference_error, Estimate, estimate, number
from leanbayes.metrics import ensemble_equivalent
from leanbayes.report.columns import Column, CORRUPTED, COST, Key, ood_columns, shift_columns, test_columns
from leanbayes.report.load import BASELINES, Contender, Group, REFERENCE, Run, TEMPERED

Rows = Sequence[dict[str, Any]]
MEASURES = ("accuracy", "nll", "ece", "epistemic", "aleatoric")  # of corrupted images
ENSEMBLES = ("deep_ensemble", "seed_ensemble")  # whole copies of the network, the unit of `ensemble_equivalents`
SIGNS = {"at least": "≥ ", "at most": "≤ ", "": ""}
EPISTEMIC = "mutual_information"
CERTAIN = (REFERENCE, TEMPERED, *BASELINES)  # rows without epistemic uncertainty: theirs is a rounding error
MEMBERS = ("batch_ensemble", *ENSEMBLES)  # each member answers once, for any number of draws
CHANCE = 0.5  # an AUROC below it: the order is reversed
MORE = 2  # extra decimals at most; a smaller difference does not matter to a reader
Mark = Literal["best", "near", ""]


@dataclass(frozen=True)
class Cell:
    """One figure of one contender: the estimate, its text, its mark, and whether it is an AUROC below chance."""

    estimate: Estimate
    mean: str
    sem: str
    mark: Mark
    reversed: bool = False

    @property
    def text(self) -> str:
        text = f"{self.mean} ± {self.sem}" if self.sem else self.mean
        return f"{text} (reversed)" if self.reversed else text


@dataclass(frozen=True)
class Row:
    """One contender; a missing figure is None."""

    contender: Contender
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Comparison:
    """A table of contenders and figures."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def has_errors(self) -> bool:
        """Whether any cell has a standard error; with one seed, none has."""
        return any(cell.sem for row in self.rows for cell in row.cells if cell)

    def only(self, *places: str) -> Comparison:
        kept = [i for i, column in enumerate(self.columns) if column.place in places]
        rows = (Row(row.contender, tuple(row.cells[i] for i in kept)) for row in self.rows)
        return Comparison(tuple(self.columns[i] for i in kept), tuple(rows))

    def groups(self) -> list[tuple[str, int]]:
        """Return the groups of neighbouring columns, each with its number of columns."""
        return [(name, len(list(columns))) for name, columns in groupby(self.columns, lambda column: column.group)]


def comparison(group: Group) -> Comparison:
    """Compare the contenders of a group on each figure that at least one of them has."""
    estimates = estimates_of(group)
    columns = [c for c in _columns(group) if any(c.key in found for found in estimates)]
    cells = [_cells(column, [found.get(column.key) for found in estimates]) for column in columns]
    rows = (Row(contender, tuple(column[i] for column in cells)) for i, contender in enumerate(group.contenders))
    return Comparison(tuple(columns), tuple(rows))


def estimates_of(group: Group) -> list[dict[Key, Estimate]]:
    """Return the mean over seeds of each figure, for each contender."""
    plain = mean_rows(group.plain.runs) if group.plain else []
    found = []
    for contender in group.contenders:
        seeds = [facts(run, plain) for run in contender.runs]
        keys = {key for seed in seeds for key in seed}
        estimates = {key: estimate(seed.get(key) for seed in seeds) for key in keys}
        found.append({key: value for key, value in estimates.items() if value is not None})
    for mine, worth in zip(found, ensemble_equivalents(group, found), strict=True):
        if worth is not None:
            mine["test", "ensemble_equivalent"] = worth
    return found


def facts(run: Run, plain: Rows) -> dict[Key, float | None]:
    """Return the figures of one run by keys such as ("test", "nll") or ("ood", "svhn", "entropy", "auroc").

    `plain` has the rows of the plain network under corruption, the reference of an mCE.
    """
    found: dict[Key, float | None] = {("shift", key): value for key, value in corrupted_facts(run, plain).items()}
    for section, content in (("test", run.part("metrics", "test")), ("cost", run.part("cost"))):
        found |= {(section, key): value for key, value in _numbers(content)}
    for name, content in _items(run.part("metrics", "shift_data")):
        found |= {("shift_data", name, key): value for key, value in _numbers(content)}
    found["cost", "training_ratio"] = training_ratio(run)
    found["cost", "passes"] = passes_of(run) if run.part("cost") else None
    found["cost", "answer_passes"] = answer_passes(run)
    for name, content in _items(run.part("metrics", "ood")):
        found |= {("ood", name, key): value for key, value in _numbers(content)}
        for score, content_by_score in _items(content.get("scores")):
            if score != EPISTEMIC or run.name not in CERTAIN:
                found |= {("ood", name, score, key): value for key, value in _numbers(content_by_score)}
    return found


def _numbers(content: Any) -> Iterator[tuple[str, float]]:
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if (found := number(value)) is not None:
            yield key, found


def _items(content: Any) -> list[tuple[str, Mapping[str, Any]]]:
    items = content.items() if isinstance(content, Mapping) else ()
    return [(key, value) for key, value in items if isinstance(value, Mapping)]


def _columns(group: Group) -> list[Column]:
    scores: dict[str, dict[str, None]] = {}
    for run in group.runs:
        for name, content in _items(run.part("metrics", "ood")):
            others = [score for score, _ in _items(content.get("scores")) if score != content.get("by")]
            scores.setdefault(name, {}).update(dict.fromkeys(others))
    ood = [c for i, name in enumerate(sorted(scores)) for c in ood_columns(name, scores[name], brief=i < 2)]
    names = sorted({name for run in group.runs for name, _ in _items(run.part("metrics", "shift_data"))})
    moved = [c for i, name in enumerate(names) for c in shift_columns(name, group.task, brief=i < 1)]
    return [*test_columns(group.task), *CORRUPTED, *moved, *ood, *COST]


def _cells(column: Column, estimates: list[Estimate | None]) -> list[Cell | None]:
    known = [found for found in estimates if found is not None]
    decimals = decimals_of(column, known)
    marks = iter(marks_of(column, known, decimals))
    area = column.key[0] == "ood" and column.key[-1] == "auroc"
    return [
        None
        if found is None
        else Cell(found, *column.write(found, decimals), next(marks), area and found.mean < CHANCE)
        for found in estimates
    ]


def decimals_of(column: Column, estimates: Sequence[Estimate]) -> int:
    """Return the decimals of a column, enough to distinguish the best from worse values."""
    usual = column.decimals(estimates)
    if not column.marked or not estimates:
        return usual
    best = _best(column, estimates)
    worse = [found for found in estimates if not _may_equal(found, best)]
    for decimals in range(usual, usual + MORE + 1):
        if _text(column, best, decimals) not in {_text(column, found, decimals) for found in worse}:
            return decimals
    return usual


def marks_of(column: Column, estimates: Sequence[Estimate], decimals: int) -> list[Mark]:
    """Mark the best mean and equal texts as "best", and means within one standard error of it as "near".

    The standard error is that of the difference. If all texts are equal, there is no best.
    """
    read = [_text(column, found, decimals) for found in estimates]
    if not column.marked or len(set(read)) < 2:
        return [""] * len(estimates)
    best = _best(column, estimates)
    top = _text(column, best, decimals)
    near: list[Mark] = ["near" if _may_equal(found, best) else "" for found in estimates]
    return ["best" if text == top else mark for text, mark in zip(read, near, strict=True)]


def _best(column: Column, estimates: Sequence[Estimate]) -> Estimate:
    return max(estimates, key=lambda found: column.sign * found.mean)


def _may_equal(found: Estimate, best: Estimate) -> bool:
    return abs(found.mean - best.mean) <= difference_error(found, best)


def _text(column: Column, found: Estimate, decimals: int) -> str:
    return column.write(found, decimals)[0]


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows {corruption, severity, accuracy, nll, ece, ...} of a run that lack no number."""
    rows = [dict(row) for row in run.rows("metrics", "shift")]
    return [row for row in rows if all(number(row.get(key)) is not None for key in ("severity", *MEASURES))]


def mean_rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Average rows over seeds. The rows of the plain network are the denominator of an mCE."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        for row in rows_of(run):
            found.setdefault((str(row["corruption"]), row["severity"]), []).append(row)
    return [
        {"corruption": name, "severity": severity, **{m: statistics.fmean(r[m] for r in rows) for m in MEASURES}}
        for (name, severity), rows in found.items()
    ]


def corrupted_facts(run: Run, plain: Rows) -> dict[str, float | None]:
    """Return means over corruptions and severities; with rows of the plain network, also the (relative) mCE."""
    rows = rows_of(run)
    if not any(row["severity"] for row in rows):
        return {}
    facts: dict[str, float | None] = dict(shift.corrupted_means(rows))
    if _places(rows) == _places(plain):
        facts["mce"] = number(shift.mean_corruption_error(rows, plain))
        if any(severity == 0 for _, severity in _places(rows)):
            facts["relative_mce"] = number(shift.relative_mean_corruption_error(rows, plain))
    return facts


def over_severity(run: Run, measure: str) -> dict[float, float | None]:
    """Average one measure over the corruptions of each severity; severity 0 means clean images."""
    rows = rows_of(run)
    severities = sorted({float(row["severity"]) for row in rows})
    return dict(zip(severities, shift.severity_curve(rows, measure), strict=True))


def _places(rows: Rows) -> set[tuple[str, float]]:
    return {(str(row["corruption"]), row["severity"]) for row in rows}


def ensemble_equivalents(group: Group, estimates: list[dict[Key, Estimate]]) -> list[Estimate | None]:
    """Return the size of the deep ensemble with the same calibrated NLL, for each contender.

    The curve is a + b / K between measured sizes K. It needs the plain network (K = 1) and an ensemble of the group;
    without both, all values are None.
    """
    scores = [found.get(("test", "cnll")) for found in estimates]
    known = [(c, score) for c, score in zip(group.contenders, scores, strict=True) if score is not None]
    curve: dict[int, float] = {}
    for contender, score in known:
        size = 1 if contender.is_reference else contender.runs[0].fields.get("components")
        if isinstance(size, int) and size > 0 and contender.name in (REFERENCE, *ENSEMBLES):
            curve[size] = score.mean
    if 1 not in curve or len(curve) < 2:
        return [None for _ in estimates]
    found = [None if score is None else ensemble_equivalent(score.mean, curve) for score in scores]
    return [None if e is None else Estimate(e.networks, None, 1, SIGNS[e.bound]) for e in found]


def training_ratio(run: Run, step: float | None = None) -> float | None:
    """Return the cost of a training, from a step and the recipe; None if the step was not measured.

    `step` is its ratio, default the measured median.

        plain epochs + (split epochs + K tiled epochs) * draws * step ratio
        -------------------------------------------------------------------
                                    epochs

    Epochs before the conversion train the plain network. A tiled step gives each row to all K components. A student
    costs the training of its teacher, and the time of its own in addition.
    """
    step = run.number("cost", "train_step_ratio") if step is None else step
    section = "validation" if run.number("validation", "epochs") else "recipe"  # held-out rows chose the epochs
    epochs = run.number(section, "epochs")
    if step is None or not epochs:
        return step
    plain = min(run.number(section, "convert_at_epoch") or 0.0, epochs)
    tiled = epochs if run.part("recipe", "tile") else run.number("recipe", "tile_last_epochs") or 0.0
    tiled = min(tiled, epochs - plain)
    components = run.number("method", "fields", "components") or 1
    draws = run.number("recipe", "samples") or 1
    ratio = (plain + (epochs - plain - tiled + components * tiled) * draws * step) / epochs
    return ratio * (1 + (run.number("cost", "distillation") or 0.0))


def answer_passes(run: Run) -> float | None:
    """Return the cost of one answer in passes of the plain network; None if it was not measured.

    answer = passes * predict ratio. For example, 16 draws at 1.1 plain passes each cost 17.6.
    """
    passes, ratio = passes_of(run), run.number("cost", "predict_ratio")
    return None if passes is None or ratio is None else passes * ratio


def quartile_costs(run: Run, end: int) -> dict[str, float]:
    """Return the costs of a run at the lower (0) or upper (1) quartile of its measured times, as far as recorded."""

    def quartile(name: str) -> float | None:
        ends = run.part("cost", name)
        return number(ends[end]) if isinstance(ends, list) and len(ends) == 2 else None

    step, answer, passes = quartile("train_quartiles"), quartile("predict_quartiles"), passes_of(run)
    found = {
        "training_ratio": None if step is None else training_ratio(run, step),
        "answer_passes": None if answer is None or passes is None else passes * answer,
        "answer_ms": quartile("answer_quartiles"),
    }
    return {name: value for name, value in found.items() if value is not None}


def passes_of(run: Run) -> float | None:
    """Return the passes per answer: recorded, else the number of draws or members; None if unknown, or no network."""
    if run.name in BASELINES:
        return None
    recorded = run.number("cost", "passes")
    if recorded is not None:
        return recorded
    if run.name == REFERENCE:
        return 1.0
    draws = run.number("settings", "judging", "samples")
    members = run.number("method", "fields", "components") if run.name in MEMBERS else None
    return min((count for count in (draws, members) if count), default=None)
