"""Rows without a network, for tables: the training mean, a linear model, and gradient-boosted trees.

| name     | classes                                   | real targets                                              |
|----------|-------------------------------------------|-----------------------------------------------------------|
| mean     | the shares of the classes                 | the mean and the variance of the training targets         |
| linear   | logistic regression, penalty by folds     | ridge regression, penalty by folds, constant noise        |
| boosting | boosted trees with a temperature          | boosted trees, constant noise; an interval by quantiles   |

Noise and temperature come from predictions for rows that the model was not fitted on: from five folds, or from a tenth
of the rows if there are many. Then the model is fitted to all rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leanbayes.compare.row_training import Held, TEMPERATURE_PRIOR
from leanbayes.core.prediction import Prediction
from leanbayes.data.holdout import fold_of, held_out
from leanbayes.distributions.likelihoods import Categorical, entropy, Gaussian
from leanbayes.evaluation.figures import LEVEL
from leanbayes.metrics import best_temperature, interval_factor
from leanbayes.metrics.calibration import temper

Array = NDArray[Any]

MANY = 2000
"""From this number of rows on, one tenth is held out instead of five folds."""

LEAST_PROBABILITY = 1e-6
"""Boosted trees may give a class the probability zero, which has no logarithm."""

RARE = 20
"""Rows of the rarest class from which on boosted trees hold out rows to stop by."""

TAILS = (0.025, 0.975)
PENALTIES = tuple(10.0**power for power in range(-3, 5))


@dataclass(frozen=True)
class Fitted:
    """A fitted baseline.

    Attributes:
        predict: inputs (n, d) to a prediction, in the units of the targets it was fitted to.
        parameters: the number of fitted numbers; None for trees.
        temperature: of the classes, if one was fitted.
        quantiles: inputs to the ends of the 95 % interval, fitted by quantile loss; None for other models.
        interval: factor of the 95 % intervals of real targets, with which they hold 95 % of the targets of rows that
            the model was not fitted on; None for classes.
    """

    predict: Callable[[Tensor], Prediction]
    parameters: int | None
    temperature: float | None = None
    quantiles: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    interval: float | None = None


Values = Mapping[str, float]
"""Settings of a model by name, chosen by `--tune`; without them, linear models choose their penalty by folds."""


ANY = Held(0.1)
"""A tenth of the rows, or folds, by class or target; with groups, whole groups."""


def fit_mean(
    x: Tensor, y: Tensor, classes: int, seed: int, values: Values = MappingProxyType({}), held: Held = ANY
) -> Fitted:
    """Return the prediction that ignores the inputs; every class counts once more than it was seen."""
    if classes:
        shares = (torch.bincount(y, minlength=classes) + 1).double() / (len(y) + classes)
        return Fitted(lambda rows: of_classes(shares.expand(len(rows), -1)), classes - 1)
    mean, variance = y.double().mean(0), y.double().var(0, correction=1)
    left_out = (y.double() - mean) * (len(y) / (len(y) - 1))  # each target less the mean of the others
    interval = _interval_factor(left_out, variance)
    return Fitted(lambda rows: of_targets(mean.expand(len(rows), -1), variance), 2 * y.shape[1], interval=interval)


def fit_linear(
    x: Tensor, y: Tensor, classes: int, seed: int, values: Values = MappingProxyType({}), held: Held = ANY
) -> Fitted:
    """Return ridge or logistic regression; the penalty is chosen by five folds, unless it is given."""
    make = _linear(y, classes, seed, values, held)
    if classes:
        return _classifier(make, x, y, classes, seed, held, tempered=False)
    return _regressor(make, x, y, seed, held, parameters=(x.shape[1] + 2) * y.shape[1])


def fit_boosting(
    x: Tensor, y: Tensor, classes: int, seed: int, values: Values = MappingProxyType({}), held: Held = ANY
) -> Fitted:
    """Return gradient-boosted trees, which stop by held-out rows of their own."""
    make = _boosting(y, classes, seed, values)
    if classes:
        return _classifier(make, x, y, classes, seed, held)
    return _regressor(make, x, y, seed, held, quantile=lambda tail: make(loss="quantile", quantile=tail))


def _linear(y: Tensor, classes: int, seed: int, values: Values, held: Held = ANY) -> Callable[[], Any]:
    """Return a maker of linear models; the penalty of given `values` is that of ridge regression, or 1 / C."""
    from sklearn import linear_model as linear  # type: ignore[import-untyped]

    penalty = values.get("penalty")
    if penalty is not None:
        return lambda: linear.LogisticRegression(C=1 / penalty, max_iter=500) if classes else linear.Ridge(penalty)
    if classes:
        folds = _held_out_folds(y, seed, held)
        model = linear.LogisticRegressionCV(Cs=8, cv=folds, scoring="neg_log_loss", max_iter=500)
        return lambda: model
    return lambda: linear.RidgeCV(alphas=PENALTIES)


def _boosting(y: Tensor, classes: int, seed: int, values: Values) -> Callable[..., Any]:
    """Return a maker of boosted trees with `learning_rate` and `max_leaf_nodes` of given `values`."""
    from sklearn import ensemble

    enough = not classes or int(torch.bincount(y).min()) >= RARE  # its own split needs two rows of every class
    shared: dict[str, Any] = {"early_stopping": enough, "random_state": seed, "max_iter": 300 if enough else 100}
    kind = ensemble.HistGradientBoostingClassifier if classes else ensemble.HistGradientBoostingRegressor
    return partial(kind, **shared, **values)


def default_values(name: str, x: Tensor, y: Tensor, classes: int, seed: int, held: Held = ANY) -> dict[str, float]:
    """Return the settings of a model that is not tuned: the penalty that folds choose, or scikit-learn's defaults."""
    if name == "boosting":
        model = _boosting(y, classes, seed, {})()
        return {"learning_rate": model.learning_rate, "max_leaf_nodes": model.max_leaf_nodes}
    make = _linear(y, classes, seed, {}, held)
    if classes:
        return {"penalty": 1 / float(np.median(_fit(make(), x, y).C_))}
    return {"penalty": float(np.median([_fit(make(), x, y[:, target]).alpha_ for target in range(y.shape[1])]))}


def held_out_nll(
    name: str, x: Tensor, y: Tensor, classes: int, seed: int, *, values: Values, parts: Sequence[Tensor]
) -> float:
    """Return the mean NLL of rows that a model was not fitted on; `parts` (n,) hold out rows in turn.

    The noise of real targets, and the temperature of trees, are those that make the held-out rows most likely.
    """
    make = (_boosting if name == "boosting" else _linear)(y, classes, seed, values)
    pairs = [((~out).nonzero().flatten().numpy(), out.nonzero().flatten().numpy()) for out in parts]
    if classes:
        found = _predictions(make, x, y, pairs, partial(_probabilities, classes=classes))
        labels, p = torch.cat([y[rows] for rows, _ in found]), torch.cat([there for _, there in found])
        p = temper(p, float(best_temperature(p, labels, TEMPERATURE_PRIOR))) if name == "boosting" else p
        return -float(of_classes(p).log_prob(labels).double().mean())
    columns = [_predictions(make, x, y[:, target], pairs, _column) for target in range(y.shape[1])]
    true = torch.cat([y[rows] for rows, _ in columns[0]])
    mean = torch.stack([torch.cat([there for _, there in found]) for found in columns], 1)
    prediction = of_targets(mean, (true.double() - mean).square().mean(0))
    return -float(prediction.log_prob(true).double().mean())


BASELINES: dict[str, Callable[..., Fitted]] = {
    "mean": fit_mean,
    "linear": fit_linear,
    "boosting": fit_boosting,
}
"""Functions of inputs (n, d), targets (classes (n,) or real (n, D)), classes (0: real), seed, settings and the
groups or times by which rows are held out."""


def of_classes(probabilities: Tensor) -> Prediction:
    """Return a prediction without epistemic uncertainty from class probabilities (n, C)."""
    p = probabilities.float()
    doubt = entropy(p)
    return Prediction(p, doubt, doubt, torch.zeros_like(doubt), p[None], None, Categorical())


def of_targets(mean: Tensor, variance: Tensor) -> Prediction:
    """Return a prediction without epistemic uncertainty from means (n, D) and constant variances (D,)."""
    mean = mean.float()
    noise = variance.float().clamp(min=1e-12).expand_as(mean)
    return Prediction(mean, noise, noise, torch.zeros_like(mean), mean[None], noise[None], Gaussian())


def _probabilities(model: Any, rows: Tensor, *, classes: int) -> Tensor:
    known = np.zeros((len(rows), classes))
    known[:, model.classes_] = model.predict_proba(rows.double().numpy())
    clipped = torch.from_numpy(known).clamp(min=LEAST_PROBABILITY)
    return clipped / clipped.sum(1, keepdim=True)


def _column(model: Any, rows: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(model.predict(rows.double().numpy()), dtype=np.float64)).flatten()


def _classifier(
    make: Callable[[], Any], x: Tensor, y: Tensor, classes: int, seed: int, held: Held, *, tempered: bool = True
) -> Fitted:
    probabilities = partial(_probabilities, classes=classes)
    temperature = None
    if tempered:
        left_out, there = zip(*_out_of_sample(make, x, y, seed, held, probabilities), strict=True)
        targets = torch.cat([y[rows] for rows in left_out])
        temperature = float(best_temperature(torch.cat(there), targets, TEMPERATURE_PRIOR))
    model = _fit(make(), x, y)
    count = model.coef_.size + model.intercept_.size if not tempered else None

    def predict(rows: Tensor) -> Prediction:
        found = probabilities(model, rows)
        return of_classes(found if temperature is None else temper(found, temperature))

    return Fitted(predict, count, temperature)


def _regressor(
    make: Callable[[], Any],
    x: Tensor,
    y: Tensor,
    seed: int,
    held: Held,
    *,
    parameters: int | None = None,
    quantile: Callable[[float], Any] | None = None,
) -> Fitted:
    means, errors, ends = [], [], []
    for target in range(y.shape[1]):
        own = y[:, target]
        found = _out_of_sample(make, x, own, seed, held, _column)
        errors.append(torch.cat([own[rows].double() - there for rows, there in found]))
        means.append(_fit(make(), x, own))
        ends.append([_fit(quantile(tail), x, own) for tail in TAILS] if quantile else [])
    left_out = torch.stack(errors, 1)
    variance = left_out.square().mean(0)

    def predict(rows: Tensor) -> Prediction:
        return of_targets(torch.stack([_column(model, rows) for model in means], 1), variance)

    def interval(rows: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (torch.stack([_column(pair[end], rows) for pair in ends], 1) for end in (0, 1))
        return torch.minimum(low, high).float(), torch.maximum(low, high).float()

    factor = _interval_factor(left_out, variance)
    return Fitted(predict, parameters, quantiles=interval if quantile else None, interval=factor)


def _interval_factor(errors: Tensor, variance: Tensor) -> float:
    """Return the factor with which the 95 % intervals hold 95 % of targets with these errors (n, D)."""
    return interval_factor(*of_targets(torch.zeros_like(errors), variance).interval(LEVEL), errors, LEVEL)


def _out_of_sample(
    make: Callable[[], Any], x: Tensor, y: Tensor, seed: int, held: Held, predict: Callable[[Any, Tensor], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of row numbers and their predictions by models that were not fitted on them."""
    pairs = _held_out_folds(y, seed, held) if len(y) < MANY else _held_out_part(y, seed, held)
    return _predictions(make, x, y, pairs, predict)


def _held_out_part(y: Tensor, seed: int, held: Held) -> list[tuple[Array, Array]]:
    """Return one split: by groups or times if there are several and the fitted rows have all classes."""
    groups, time = (_several(column) for column in (held.groups, held.time))
    pairs = list(_pairs_of(held_out(y, held.share, seed, groups=groups, time=time).long()))[1:]
    if _have_all_classes(y, pairs[0][0]):
        return pairs
    return list(_pairs_of(held_out(y, held.share, seed).long()))[1:]


def _held_out_folds(y: Tensor, seed: int, held: Held) -> list[tuple[Array, Array]]:
    """Return five folds, or fewer, of whole groups if there are several and each fold has and leaves all classes."""
    if (groups := _several(held.groups)) is not None:
        fold = fold_of(y, min(_folds(y), len(torch.unique(groups))), seed, groups=groups)
        pairs = list(_pairs_of(fold))
        if all(_have_all_classes(y, rows) for pair in pairs for rows in pair):
            return pairs
    return list(_pairs_of(fold_of(y, _folds(y), seed)))


def _several(column: Tensor | None) -> Tensor | None:
    return column if column is not None and len(torch.unique(column)) > 1 else None


def _have_all_classes(y: Tensor, rows: Array) -> bool:
    return y.is_floating_point() or len(torch.unique(y[rows])) == len(torch.unique(y))


def _predictions(
    make: Callable[[], Any],
    x: Tensor,
    y: Tensor,
    pairs: Sequence[tuple[Array, Array]],
    predict: Callable[[Any, Tensor], Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Fit a model to the first rows of each pair, and return the second ones with their predictions."""
    found = []
    for rest, held_rows in pairs:
        model = _fit(make(), x[rest], y[rest])
        found.append((torch.from_numpy(held_rows), predict(model, x[held_rows])))
    return found


def _pairs_of(fold: Tensor) -> Iterator[tuple[Array, Array]]:
    for number in range(int(fold.max()) + 1):
        yield (fold != number).nonzero().flatten().numpy(), (fold == number).nonzero().flatten().numpy()


def _folds(y: Tensor) -> int:
    """Return five, or fewer if a class has fewer rows."""
    fewest = len(y) // 2 if y.is_floating_point() else int(torch.bincount(y).clamp(min=2).min())
    return max(2, min(5, fewest))


def _fit(model: Any, x: Tensor, y: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence, and of changes in future versions
        return model.fit(x.double().numpy(), y.double().numpy() if y.is_floating_point() else y.numpy())
