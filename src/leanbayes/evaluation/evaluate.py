"""`evaluate`: every metric of a model on test data, foreign inputs and corrupted inputs, as one `Result`.

The names in `Result.metrics` and `Result.figures` are those of result.json (docs/design/0009).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset

from leanbayes import metrics
from leanbayes.core.conversion import own_likelihood
from leanbayes.core.prediction import my_share, of_all_processes, over_classes, Prediction
from leanbayes.core.predictor import distinct_draws, predict
from leanbayes.distributions.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, match_shape
from leanbayes.evaluation.cost import Cost, measure_cost
from leanbayes.runtime.batches import Inputs, leading_rows, Output, slice_rows
from leanbayes.runtime.display import counted, html_table
from leanbayes.shift import Shift

Data = tuple[Inputs, Tensor] | Dataset[Any] | DataLoader[Any]
Units = tuple[Tensor, Tensor]

HISTOGRAM_BINS = 30
PREDICTED_ROWS, PREDICTED_ROWS_ON_CPU = 4096, 512
"""Rows of the prediction whose cost is measured, at least: on few rows it would be the cost of launching kernels."""

LEVELS = tuple(level / 20 for level in range(1, 20))
"""Levels of the intervals whose coverage is drawn for regression."""


@dataclass(frozen=True)
class Result:
    """What an evaluation found.

    Attributes:
        metrics: {"test": {...}, "ood": {name: {...}}, "shift": [{...}]}.
        figures: {"reliability": ..., "histograms": ...}: numbers to draw.
        cost: parameters and time ratios, if the plain network was given.
        prediction: what the model said of the test data, on the CPU.
        targets: the test targets.
    """

    metrics: dict[str, Any]
    figures: dict[str, Any]
    cost: Cost | None
    prediction: Prediction = field(repr=False)
    targets: Tensor = field(repr=False)

    def __repr__(self) -> str:
        """Return a short table: a line for the test data, each other set, the corrupted sets, the cost."""
        lines = list(_lines(self.metrics, self.cost))
        wide = max(len(name) for name, _ in lines)
        return "\n".join([self._title(), *(f"{name:<{wide}}  {text}" for name, text in lines)])

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._title(), (), list(_lines(self.metrics, self.cost)))

    def _title(self) -> str:
        return f"Result({counted(len(self.prediction.mean), 'example')})"


def _lines(found: Mapping[str, Any], cost: Cost | None) -> Iterator[tuple[str, str]]:
    """Yield what each set is called and its figures in a line, then the cost."""
    yield "test", _listed(found["test"])
    for name, figures in found["ood"].items():
        yield f"ood {name}", _listed(figures)
    rows = [row for row in found["shift"] if row["severity"]]
    if rows:
        names = [name for name, value in rows[0].items() if isinstance(value, float)]
        means = {name: statistics.fmean(row[name] for row in rows if row[name] is not None) for name in names}
        yield "shift", f"{counted(len(rows), 'corrupted set')}, on average {_listed(means)}"
    if cost is not None:
        yield (
            "cost",
            (
                f"training step {cost.train_step_ratio:.3g} times the plain network's, an answer "
                f"{cost.passes * cost.predict_ratio:.3g} plain passes, {cost.extra_percent:.3g} % more parameters"
            ),
        )


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
) -> Result:
    """Evaluate a model: accuracy, likelihood, calibration, selective risk, foreign inputs, corruptions, cost.

    Where outputs are yes or no (`lb.Bernoulli`), every label of every row counts as one answer between two classes: all
    figures are those of a network with two outputs for each. `ece` is then of the confidence max(p, 1 - p), and
    `classwise_ece` of the probability of yes; `brier` is 2 (p - y)^2, between 0 and 2 as for classes.

    Run by several processes, each predicts its share of the rows and all return the same result.

    Args:
        model: converted or plain.
        test: a pair of tensors, a Dataset or a DataLoader of `(inputs, target)`.
        likelihood: how to read outputs; default the model's own, else `Categorical`.
        ood: data from elsewhere by name; their targets are not looked at.
        shift: corrupted versions of test images.
        samples: draws of every prediction.
        seed: of the draws.
        batch_size: rows at a time, for a Dataset, and of the training step whose cost is measured.
        plain: the plain network; with it, cost ratios are measured.
        output: picks the tensor out of what the model returns.
        units: mean and standard deviation by which regression targets were standardised; figures are then in the
            targets' own units, and `test` has targets in them.
        compile: measure the cost of compiled training steps.

    Example:
        >>> result = lb.evaluate(bnn, (x, y), ood={"letters": (letters, None)})
        >>> result.metrics["test"]["nll"], result.metrics["ood"]["letters"]["auroc"]
    """
    _check(test, ood, shift)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    samples = min(samples, distinct_draws(model) or samples)
    judge = _Judge(model, likelihood, samples, seed, batch_size, output, units)
    prediction, targets = judge.predict(test)
    foreign = {name: judge.predict(data)[0] for name, data in (ood or {}).items()}
    p, y = _over_classes(prediction), _class_numbers(prediction, targets)
    regression = isinstance(likelihood, Gaussian)
    score = _regression if regression else _classification
    return Result(
        metrics={
            "test": numbers(score(p, y)),
            "ood": {name: _detection(p, _over_classes(other)) for name, other in foreign.items()},
            "shift": [] if shift is None else list(judge.corrupted(shift)),
        },
        figures={
            "reliability": _coverages(p, y) if regression else _reliability(p, y),
            "histograms": _histograms(prediction, foreign),
        },
        cost=None if plain is None else judge.cost(plain, test, compile),
        prediction=prediction,
        targets=targets,
    )


@dataclass(frozen=True)
class _Judge:
    """Predicts with one model in one way."""

    model: nn.Module
    likelihood: Likelihood
    samples: int
    seed: int
    batch_size: int
    output: Output | None
    units: Units | None

    def predict(self, data: Data, *, keep_samples: bool = True) -> tuple[Prediction, Tensor]:
        """Predict for all rows of a data set, on all processes; return it with the targets, on the CPU."""
        if isinstance(data, tuple):
            x, y = data
            rows = leading_rows(x) or 0
            mine = self._run(my_share(x, rows), keep_samples)
            whole = of_all_processes(mine, rows)
            return whole, torch.empty(0) if y is None else y.cpu()
        loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=self.batch_size)
        targets: list[Tensor] = []
        prediction = self._run(_noting_targets(loader, targets), keep_samples)
        return prediction, torch.cat(targets).cpu()

    def corrupted(self, shift: Shift) -> Iterator[dict[str, Any]]:
        """Yield one row of figures for every corruption and severity."""
        for corruption, severity, x in shift:
            found, y = self.predict((x, shift.y), keep_samples=False)
            p, y = _over_classes(found), _class_numbers(found, y)
            yield {
                "corruption": corruption,
                "severity": severity,
                **numbers(
                    {
                        "accuracy": metrics.accuracy(p.mean, y),
                        "nll": metrics.nll(p.mean, y),
                        "ece": metrics.ece(p.mean, y),
                        "epistemic": p.epistemic.mean(),
                        "aleatoric": p.aleatoric.mean(),
                    }
                ),
            }

    def cost(self, plain: nn.Module, test: Data, compiled: bool) -> Cost:
        """Measure the cost of a training step on a batch, and of a prediction on more rows."""
        if isinstance(test, tuple):
            on_cpu = next(plain.parameters()).device.type == "cpu"
            rows = leading_rows(test[0]) or 0
            wanted = max(self.batch_size, PREDICTED_ROWS_ON_CPU if on_cpu else PREDICTED_ROWS)
            x, y = slice_rows(test[0], rows, 0, wanted), test[1][:wanted]
        else:
            x, y = next(iter(test if isinstance(test, DataLoader) else DataLoader(test, batch_size=self.batch_size)))
        options: dict[str, Any] = {"samples": self.samples, "batch_size": self.batch_size, "output": self.output}
        return measure_cost(self.model, plain, x, y, self.likelihood, compile=compiled, **options)

    def _run(self, x: Any, keep_samples: bool) -> Prediction:
        prediction = predict(
            self.model,
            x,
            self.likelihood,
            samples=self.samples,
            seed=self.seed,
            keep_samples=keep_samples,
            output=self.output,
        ).to("cpu")
        return prediction if self.units is None else in_units(prediction, *self.units)


def _check(test: Any, ood: Any, shift: Any) -> None:
    """Refuse what would fail with somebody else's words."""
    if not isinstance(ood or {}, Mapping):
        raise TypeError(f"expected ood to be data by name, {{'letters': (x, None)}}, got {type(ood).__name__}")
    for what, data in {"test": test, **(ood or {})}.items():
        if not (isinstance(data, (DataLoader, Dataset)) or (isinstance(data, tuple) and len(data) == 2)):
            raise TypeError(
                f"expected {what} to be a pair (x, y), a Dataset or a DataLoader, got {type(data).__name__}"
            )
    if not isinstance(shift, Shift | None):
        raise TypeError(f"expected shift to be a leanbayes.shift.Shift, got {type(shift).__name__}")


def in_units(p: Prediction, mean: Tensor, std: Tensor) -> Prediction:
    """Return a prediction of standardised targets in the targets' own units."""
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


def numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return plain floats, with None for what is not finite: JSON has no NaN."""
    floats = {name: float(value) for name, value in values.items()}
    return {name: value if math.isfinite(value) else None for name, value in floats.items()}


def _over_classes(p: Prediction) -> Prediction:
    """Return probabilities with classes on axis 1: a yes or no has two. Other predictions are as they were."""
    if not isinstance(p.likelihood, Bernoulli):
        return p
    samples = None if p.samples is None else torch.stack([over_classes(draw, p) for draw in p.samples])
    return replace(p, mean=over_classes(p.mean, p), samples=samples)


def _class_numbers(p: Prediction, y: Tensor) -> Tensor:
    """Return targets as the metrics take them: no and yes are 0 and 1, and those to be ignored -100."""
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
    probabilities, classes = metrics.flatten(p.mean, y)
    figures = {
        "accuracy": metrics.accuracy(probabilities, classes),
        "nll": metrics.nll(probabilities, classes),
        "brier": metrics.brier(probabilities, classes),
        "ece": metrics.ece(probabilities, classes),
        "ece20": metrics.ece(probabilities, classes, bins=20, smallest=5),
        "adaptive_ece": metrics.adaptive_ece(probabilities, classes),
        "classwise_ece": metrics.classwise_ece(probabilities, classes),
        "mce": metrics.mce(probabilities, classes),
        "cnll": metrics.calibrated_nll(p.mean, y),
        "temperature": metrics.best_temperature(probabilities, classes),
        "aurc": metrics.aurc(probabilities, classes),
        "disagreement": 0.0,
    }
    if p.samples is not None and len(p.samples) > 1:
        figures["disagreement"] = metrics.disagreement(p.samples, y, error="members")
    if probabilities.shape[1] > 5:
        figures["top5"] = metrics.top_k_accuracy(probabilities, classes, 5)
    return figures


def _regression(p: Prediction, y: Tensor) -> dict[str, Any]:
    assert p.samples is not None
    assert p.variances is not None
    low, high = p.interval(0.95)
    return {
        "rmse": metrics.rmse(p.mean, y),
        "lpd": metrics.lpd(p.samples, p.variances, y),
        "crps": metrics.crps(p.samples, p.variances, y),
        "coverage": metrics.interval_coverage(low, high, y),
    }


def _detection(known: Prediction, foreign: Prediction) -> dict[str, Any]:
    """Return how well foreign rows are told from known ones, by each measure of uncertainty."""
    scores = {"entropy": (_per_row(known.total), _per_row(foreign.total))}
    scores["mutual_information"] = (_per_row(known.epistemic), _per_row(foreign.epistemic))
    if known.likelihood.measure == "entropy":
        scores["confidence"] = (_per_row(metrics.doubt(known.mean)), _per_row(metrics.doubt(foreign.mean)))
    found = {by: numbers(metrics.detect(*pair)._asdict()) for by, pair in scores.items()}
    return {**found["entropy"], "by": "entropy", "scores": found}


def _per_row(uncertainty: Tensor) -> Tensor:
    return uncertainty.flatten(1).mean(1) if uncertainty.dim() > 1 else uncertainty


def _reliability(p: Prediction, y: Tensor) -> dict[str, Any]:
    return {"bins": [asdict(each) for each in metrics.reliability(p.mean, y)]}


def _coverages(p: Prediction, y: Tensor) -> dict[str, Any]:
    found = [(level, metrics.interval_coverage(*p.interval(level), y)) for level in LEVELS]
    return {"levels": [{"level": level, "coverage": float(coverage)} for level, coverage in found]}


def _histograms(p: Prediction, foreign: Mapping[str, Prediction]) -> dict[str, Any]:
    """Return shares of rows by uncertainty, on edges that hold the test rows and the foreign ones alike."""
    found = {}
    for measure in ("total", "epistemic"):
        values = {"test": _per_row(getattr(p, measure)).double()}
        values |= {name: _per_row(getattr(other, measure)).double() for name, other in foreign.items()}
        top = max(1e-9, *(float(rows.max()) for rows in values.values()))
        edges = torch.linspace(0, top, HISTOGRAM_BINS + 1, dtype=torch.float64, device="cpu")
        counts = {name: torch.histogram(rows, edges).hist / len(rows) for name, rows in values.items()}
        found[measure] = {
            "edges": [round(edge, 6) for edge in edges.tolist()],
            "counts": {name: [round(share, 6) for share in shares.tolist()] for name, shares in counts.items()},
        }
    return found


def _noting_targets(loader: DataLoader[Any], targets: list[Tensor]) -> Iterator[Inputs]:
    for batch in loader:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            several = f"{type(batch).__name__} of {len(batch)}; nest several inputs, as in ((a, b), y)"
            raise TypeError(f"expected test batches (inputs, target), got a {several}")
        targets.append(batch[1])
        yield batch[0]
