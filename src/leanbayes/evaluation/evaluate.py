"""`evaluate`: metrics of a model on test, out-of-distribution and corrupted inputs, as one `Result`.

The names in `Result.metrics` and `Result.figures` are those of result.json (docs/design/0009).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset

from leanbayes import metrics as scores
from leanbayes.core.conversion import own_likelihood
from leanbayes.core.prediction import my_share, of_all_processes, over_classes, Prediction
from leanbayes.core.predictor import distinct_draws, predict
from leanbayes.distributions.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, match_shape
from leanbayes.evaluation.cost import Cost, measure_cost
from leanbayes.evaluation.figures import figures_of, per_row
from leanbayes.evaluation.members import Member
from leanbayes.evaluation.statistics import numbers
from leanbayes.recalibrate import Temperature
from leanbayes.runtime.batches import device_of, Inputs, leading_rows, Output, slice_rows
from leanbayes.runtime.display import counted, html_table
from leanbayes.runtime.noise import Design
from leanbayes.shift.sweep import Shift

Data = tuple[Inputs, Tensor] | Dataset[Any] | DataLoader[Any]
Units = tuple[Tensor, Tensor]
Metric = Callable[[Prediction, Tensor], Any]
Progress = Callable[[str, str], object]
Change = Callable[[Prediction], Prediction]

PREDICTED_ROWS, PREDICTED_ROWS_ON_CPU = 4096, 512
"""Fewest rows for timing a prediction; fewer rows would measure kernel launches."""


@dataclass(frozen=True)
class Result:
    """Outcome of an evaluation.

    Attributes:
        metrics: {"test": {...}, "ood": {name: {...}}, "shift": [{...}]}; with shifted rows also
            {"shift_data": {name: {...}}}.
        figures: {"reliability": ..., "histograms": ...}: numbers to plot.
        cost: parameters and time ratios, if the plain network was given.
        prediction: the prediction for the test data, on the CPU.
        targets: the test targets.
    """

    metrics: dict[str, Any]
    figures: dict[str, Any]
    cost: Cost | None
    prediction: Prediction = field(repr=False)
    targets: Tensor = field(repr=False)

    def __repr__(self) -> str:
        lines = list(_lines(self.metrics, self.cost))
        wide = max(len(name) for name, _ in lines)
        return "\n".join([self._title(), *(f"{name:<{wide}}  {text}" for name, text in lines)])

    def _repr_html_(self) -> str:
        return html_table(self._title(), (), list(_lines(self.metrics, self.cost)))

    def _title(self) -> str:
        return f"Result({counted(len(self.prediction.mean), 'example')})"


def _lines(found: Mapping[str, Any], cost: Cost | None) -> Iterator[tuple[str, str]]:
    yield "test", _listed(found["test"])
    for name, figures in found["ood"].items():
        yield f"ood {name}", _listed(figures)
    for name, figures in found.get("shift_data", {}).items():
        yield f"shift {name}", _listed(figures)
    rows = [row for row in found["shift"] if row["severity"]]
    if rows:
        names = [name for name, value in rows[0].items() if isinstance(value, float)]
        means = {name: statistics.fmean(row[name] for row in rows if row[name] is not None) for name in names}
        yield "shift", f"{counted(len(rows), 'corrupted set')}, on average {_listed(means)}"
    if cost is not None:
        answer = f"an answer {cost.passes * cost.predict_ratio:.3g} plain passes"
        step = f"training step {cost.train_step_ratio:.3g} times the plain network's"
        yield "cost", f"{step}, {answer}, {cost.extra_percent:.3g} % more parameters"


def _listed(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float))


def evaluate(
    model: nn.Module,
    test: Data,
    *,
    likelihood: Likelihood | None = None,
    ood: Mapping[str, Data] | None = None,
    shift: Shift | None = None,
    samples: int = 16,
    seed: int = 0,
    batch_size: int = 256,
    plain: nn.Module | None = None,
    output: Output | None = None,
    units: Units | None = None,
    compile: bool = False,
    metrics: Mapping[str, Metric] | None = None,
    temperature: Temperature | None = None,
    design: Design = "independent",
    progress: Progress | None = None,
    shift_data: Mapping[str, Data] | None = None,
    members: Sequence[Temperature] = (),
) -> Result:
    """Evaluate a model: accuracy, likelihood, calibration, selective risk, out-of-distribution detection, cost.

    With `lb.Bernoulli`, each label of each row counts as one answer between two classes. All figures equal those of a
    network with two outputs per label. `ece` uses the confidence max(p, 1 - p), `classwise_ece` the probability of yes.
    `brier` is 2 (p - y)^2, between 0 and 2 as for classes.

    If several processes call it, each predicts its share of the rows, and all return the same result.

    Args:
        model: converted or plain.
        test: a pair of tensors, a Dataset or a DataLoader of `(inputs, target)`.
        likelihood: how to read outputs; default the model's own, else `Categorical`.
        ood: out-of-distribution data by name; their targets are ignored.
        shift: corrupted versions of test images.
        samples: draws per prediction.
        seed: of the draws.
        batch_size: rows per batch of a Dataset, and of the timed training step.
        plain: the plain network; with it, cost ratios are measured.
        output: picks the tensor from the model's return value.
        units: mean and standard deviation that standardised the regression targets. `test` then has targets in their
            own units, and so have the figures.
        compile: measure the cost of compiled training steps.
        metrics: functions of (prediction, targets) by name. They replace the usual figures of the test set.
        temperature: fitted on held-out rows. The figures at this temperature are added as `metrics["tempered"]`.
        design: of the draws, as in `predict`.
        progress: called before each step with its kind ("test", "corrupt", "shift" or "cost") and the name of its data.
        shift_data: rows of another origin with their targets, by name, such as those of another year.
        members: of an ensemble of plain networks, a temperature for each member. The figures of each member alone, at
            its temperature, are added as `metrics["members"]`.

    Example:
        >>> result = lb.evaluate(bnn, (x, y), ood={"letters": (letters, None)})
        >>> result.metrics["test"]["nll"], result.metrics["ood"]["letters"]["auroc"]
    """
    _check(test, ood, shift, shift_data)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    samples = min(samples, distinct_draws(model) or samples)
    tell: Progress = progress or (lambda kind, name: None)
    evaluator = _Evaluator(model, likelihood, samples, seed, batch_size, output, units, design)
    tell("test", "test set")
    prediction, targets = evaluator.predict(test)
    others = {name: p for name, (p, _) in evaluator.predict_sets(ood, tell).items()}
    moved = evaluator.predict_sets(shift_data, tell)
    if metrics is None:
        found, figures = _usual_metrics(prediction, targets, others)
    else:
        found, figures = {name: metric(prediction, targets) for name, metric in metrics.items()}, {}
    singles = [Member(number, each) for number, each in enumerate(members[:samples])]
    changes: list[Change] = [*([] if temperature is None else [temperature]), *singles]
    corrupted = [] if shift is None else list(evaluator.corrupted(shift, changes, tell))
    all_figures = {
        "test": numbers(found),
        "ood": _all_detections(prediction, others),
        "shift": [rows[0] for rows in corrupted],
        **_all_shifted(moved),
    }
    changed = [_changed(change, prediction, targets, others, moved) for change in changes]
    for number, figures_there in enumerate(changed, 1):
        figures_there["shift"] = [rows[number] for rows in corrupted]
    if temperature is not None:
        all_figures["tempered"] = {"temperature": temperature.temperature, **changed[0]}
    if singles:
        own = zip(singles, changed[-len(singles) :], strict=True)
        all_figures["members"] = [{"temperature": one.calibrator.temperature, **figures} for one, figures in own]
    if plain is not None:
        tell("cost", "cost")
    return Result(
        metrics=all_figures,
        figures=figures,
        cost=None if plain is None else evaluator.cost(plain, test, compile),
        prediction=prediction,
        targets=targets,
    )


def price(
    model: nn.Module,
    plain: nn.Module,
    test: Data,
    *,
    likelihood: Likelihood,
    samples: int = 16,
    batch_size: int = 256,
    compile: bool = False,
) -> Cost:
    """Return the cost of a model as `evaluate` measures it, without the evaluation."""
    samples = min(samples, distinct_draws(model) or samples)
    evaluator = _Evaluator(model, likelihood, samples, 0, batch_size, None, None, "independent")
    return evaluator.cost(plain, test, compile)


@dataclass(frozen=True)
class _Evaluator:
    """One model with the arguments of its predictions."""

    model: nn.Module
    likelihood: Likelihood
    samples: int
    seed: int
    batch_size: int
    output: Output | None
    units: Units | None
    design: Design

    def predict(self, data: Data, *, keep_samples: bool = True) -> tuple[Prediction, Tensor]:
        """Predict all rows of a data set, on all processes; return prediction and targets on the CPU."""
        if isinstance(data, tuple):
            x, y = data
            rows = leading_rows(x) or 0
            whole = of_all_processes(self._run(my_share(x, rows), keep_samples), rows)
            return whole, torch.empty(0) if y is None else y.cpu()
        targets: list[Tensor] = []
        prediction = self._run(_recording_targets(self._loader(data), targets), keep_samples)
        return prediction, torch.cat(targets).cpu()

    def predict_sets(self, sets: Mapping[str, Data] | None, tell: Progress) -> dict[str, tuple[Prediction, Tensor]]:
        """Return predictions and targets of further data sets, by name."""
        found = {}
        for name, data in (sets or {}).items():
            tell("test", name)
            found[name] = self.predict(data)
        return found

    def corrupted(self, shift: Shift, changes: Sequence[Change], tell: Progress) -> Iterator[list[dict[str, Any]]]:
        """Yield the figures of each corruption, as predicted and after each change."""
        tell("corrupt", "corrupted images")  # each step of the loop makes the next ones
        single = any(isinstance(change, Member) for change in changes)
        for corruption, severity, x in shift:
            tell("shift", f"{corruption} {severity}" if severity else "clean images")
            found, y = self.predict((x, shift.y), keep_samples=single)
            named = {"corruption": corruption, "severity": severity}
            each = [found, *(change(found) for change in changes)]
            yield [{**named, **numbers(_under_shift(p, y))} for p in each]
            tell("corrupt", "corrupted images")

    def cost(self, plain: nn.Module, test: Data, compiled: bool) -> Cost:
        """Measure a training step on one batch, and a prediction on more rows."""
        if isinstance(test, tuple):
            on_cpu = device_of(plain).type == "cpu"
            rows = leading_rows(test[0]) or 0
            wanted = max(self.batch_size, PREDICTED_ROWS_ON_CPU if on_cpu else PREDICTED_ROWS)
            x, y = slice_rows(test[0], rows, 0, wanted), test[1][:wanted]
        else:
            x, y = next(iter(self._loader(test)))
        options: dict[str, Any] = {"samples": self.samples, "batch_size": self.batch_size, "output": self.output}
        return measure_cost(self.model, plain, x, y, self.likelihood, compile=compiled, **options)

    def _loader(self, data: Any) -> DataLoader[Any]:
        return data if isinstance(data, DataLoader) else DataLoader(data, batch_size=self.batch_size)

    def _run(self, x: Any, keep_samples: bool) -> Prediction:
        options: dict[str, Any] = {"samples": self.samples, "seed": self.seed, "output": self.output}
        options["design"] = self.design
        prediction = predict(self.model, x, self.likelihood, keep_samples=keep_samples, **options).to("cpu")
        return prediction if self.units is None else in_units(prediction, *self.units)


def _check(test: Any, ood: Any, shift: Any, shift_data: Any) -> None:
    for argument, sets, y in (("ood", ood, None), ("shift_data", shift_data, "y")):
        if not isinstance(sets or {}, Mapping):
            kind = type(sets).__name__
            raise TypeError(f"expected {argument} to be data by name, {{'letters': (x, {y})}}, got {kind}")
    for what, data in {"test": test, **(ood or {}), **(shift_data or {})}.items():
        if not (isinstance(data, (DataLoader, Dataset)) or (isinstance(data, tuple) and len(data) == 2)):
            kind = type(data).__name__
            raise TypeError(f"expected {what} to be a pair (x, y), a Dataset or a DataLoader, got {kind}")
    if not isinstance(shift, Shift | None):
        raise TypeError(f"expected shift to be a leanbayes.shift.Shift, got {type(shift).__name__}")


def in_units(p: Prediction, mean: Tensor, std: Tensor) -> Prediction:
    """Convert a prediction of standardised targets to the targets' own units."""
    square = std.square()
    return replace(
        p,
        mean=p.mean * std + mean,
        total=p.total * square,
        aleatoric=p.aleatoric * square,
        epistemic=p.epistemic * square,
        samples=None if p.samples is None else p.samples * std + mean,
        variances=None if p.variances is None else p.variances * square,
    )


Shifted = Mapping[str, tuple[Prediction, Tensor]]
"""Predictions for rows of another origin, and their targets, by name."""


def metrics_of(
    prediction: Prediction, targets: Tensor, others: Mapping[str, Prediction], moved: Shifted
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `Result.metrics` and `Result.figures` of predictions: for test, out-of-distribution and shifted rows."""
    found, figures = _usual_metrics(prediction, targets, others)
    all_figures = {"test": numbers(found), "ood": _all_detections(prediction, others), "shift": []}
    return all_figures | _all_shifted(moved), figures


def _usual_metrics(
    prediction: Prediction, targets: Tensor, others: Mapping[str, Prediction]
) -> tuple[dict[str, Any], dict[str, Any]]:
    p, y = _over_classes(prediction), _class_numbers(prediction, targets)
    return _test_figures(prediction, targets), figures_of(prediction, p, y, others)


def _test_figures(prediction: Prediction, targets: Tensor) -> dict[str, Any]:
    p, y = _over_classes(prediction), _class_numbers(prediction, targets)
    return _regression(p, y) if isinstance(prediction.likelihood, Gaussian) else _classification(p, y)


def _changed(
    change: Change, prediction: Prediction, targets: Tensor, others: Mapping[str, Prediction], moved: Shifted
) -> dict[str, Any]:
    """Return the figures of changed predictions, for test, out-of-distribution and shifted rows."""
    changed = change(prediction)
    return {
        "test": numbers(_test_figures(changed, targets)),
        "ood": _all_detections(changed, {name: change(other) for name, other in others.items()}),
        "shift": [],
        **_all_shifted({name: (change(p), y) for name, (p, y) in moved.items()}),
    }


def _over_classes(p: Prediction) -> Prediction:
    """Put two classes, no and yes, on axis 1 of a Bernoulli prediction; other predictions stay unchanged."""
    if not isinstance(p.likelihood, Bernoulli):
        return p
    samples = None if p.samples is None else torch.stack([over_classes(draw, p) for draw in p.samples])
    return replace(p, mean=over_classes(p.mean, p), samples=samples)


def _class_numbers(p: Prediction, y: Tensor) -> Tensor:
    """Return class numbers for the metrics: 0 and 1 for no and yes, -100 for targets to ignore."""
    if isinstance(p.likelihood, Categorical) and not y.is_floating_point():
        y = y.long()
        return y.masked_fill(y == p.likelihood.ignore_index, -100)
    if not isinstance(p.likelihood, Bernoulli):
        return y
    answers = match_shape(y, p.mean, "Bernoulli").long()
    if ((answers != y.view_as(answers)) | (answers < 0) | (answers > 1)).any():
        raise ValueError("evaluate expected Bernoulli targets to be 0 or 1, got others; round soft labels first")
    return answers


def _classification(p: Prediction, y: Tensor) -> dict[str, Any]:
    probabilities, classes = scores.flatten(p.mean, y)
    figures = {
        "accuracy": scores.accuracy(probabilities, classes),
        "nll": scores.nll(probabilities, classes),
        "brier": scores.brier(probabilities, classes),
        "ece": scores.ece(probabilities, classes),
        "ece20": scores.ece(probabilities, classes, bins=20, smallest=5),
        "adaptive_ece": scores.adaptive_ece(probabilities, classes),
        "classwise_ece": scores.classwise_ece(probabilities, classes),
        "mce": scores.mce(probabilities, classes),
        "cnll": scores.calibrated_nll(p.mean, y),
        "temperature": scores.best_temperature(probabilities, classes),
        "aurc": scores.aurc(probabilities, classes),
        "disagreement": 0.0,
    }
    if p.samples is not None and len(p.samples) > 1:
        figures["disagreement"] = scores.disagreement(p.samples, y, error="members")
    if probabilities.shape[1] > 5:
        figures["top5"] = scores.top_k_accuracy(probabilities, classes, 5)
    return figures


def _regression(p: Prediction, y: Tensor) -> dict[str, Any]:
    assert p.samples is not None
    assert p.variances is not None
    low, high = p.interval(0.95)
    return {
        "rmse": scores.rmse(p.mean, y),
        "lpd": scores.lpd(p.samples, p.variances, y),
        "crps": scores.crps(p.samples, p.variances, y),
        "coverage": scores.interval_coverage(low, high, y),
        "interval_width": (high - low).mean(),
    }


def _all_shifted(moved: Shifted) -> dict[str, Any]:
    """Return {"shift_data": {name: figures}} of rows of another origin; nothing without such rows."""
    found: dict[str, Any] = {}
    for name, (prediction, targets) in moved.items():
        if isinstance(prediction.likelihood, Gaussian):
            usual = _regression(prediction, targets)
            figures = {figure: usual[figure] for figure in ("lpd", "rmse", "coverage")}
        else:
            figures = _under_shift(prediction, targets)
        found[name] = {"rows": len(targets), **numbers(figures)}
    return {"shift_data": found} if found else {}


def _under_shift(prediction: Prediction, targets: Tensor) -> dict[str, Any]:
    p, y = _over_classes(prediction), _class_numbers(prediction, targets)
    figures = {name: getattr(scores, name)(p.mean, y) for name in ("accuracy", "nll", "ece")}
    return figures | {"epistemic": p.epistemic.mean(), "aleatoric": p.aleatoric.mean()}


def _all_detections(prediction: Prediction, others: Mapping[str, Prediction]) -> dict[str, Any]:
    p = _over_classes(prediction)
    return {name: _detection(p, _over_classes(other)) for name, other in others.items()}


def _detection(known: Prediction, other: Prediction) -> dict[str, Any]:
    """Return how well each measure of uncertainty detects out-of-distribution rows."""
    pairs = {"entropy": (per_row(known.total), per_row(other.total))}
    pairs["mutual_information"] = (per_row(known.epistemic), per_row(other.epistemic))
    if known.likelihood.measure == "entropy":
        pairs["confidence"] = (per_row(scores.doubt(known.mean)), per_row(scores.doubt(other.mean)))
    found = {by: numbers(scores.detect(*pair)._asdict()) for by, pair in pairs.items()}
    return {**found["entropy"], "by": "entropy", "scores": found}


def _recording_targets(loader: DataLoader[Any], targets: list[Tensor]) -> Iterator[Inputs]:
    for batch in loader:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            several = f"{type(batch).__name__} of {len(batch)}; nest several inputs, as in ((a, b), y)"
            raise TypeError(f"expected test batches (inputs, target), got a {several}")
        targets.append(batch[1])
        yield batch[0]
