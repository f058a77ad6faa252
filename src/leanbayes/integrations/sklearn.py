"""`BayesianClassifier` and `BayesianRegressor`: any network and any method as a scikit-learn estimator."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import nn, Tensor
from typing_extensions import override

from leanbayes import models
from leanbayes.compare.job import method_of, recipe_for
from leanbayes.compare.job import recipe as shared_recipe
from leanbayes.compare.row_training import FEW, Held, Row, train_on_split
from leanbayes.core.conversion import convert
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import predict
from leanbayes.distributions.likelihoods import Categorical, Gaussian, Likelihood
from leanbayes.evaluation.evaluate import in_units
from leanbayes.methods._base import Method
from leanbayes.methods.rank1 import Rank1
from leanbayes.runtime.batches import call
from leanbayes.runtime.twins import in_eval_mode
from leanbayes.training import History, Recipe
from leanbayes.training.devices import PACKAGES
from leanbayes.training.fit import fit

Net = nn.Module | Callable[..., nn.Module] | str | None
"""A network to copy, a function of the keywords `num_outputs` and `input_shape`, a name of `lb.models`, or None."""

HIDDEN = 100  # hidden units of the default network
FEWEST_STEPS = 200  # fewest steps of a training: half a second on one core
FEWEST_EPOCHS = 20  # fewest epochs; large tables have more steps than that in each
HELD_OUT = 0.1  # share of the rows that a training with patience stops by
BATCH_SIZES = (32, 512)  # smallest and largest batch
STEPS_AN_EPOCH = 64  # batches per epoch, between the smallest and the largest batch size
FLOATS = (np.float64, np.float32)  # types of numbers that are kept; others become the first
FIRST_NOISE = 0.5  # initial noise, in standard deviations of the targets; it is learned


def default_recipe(rows: int) -> Recipe:
    """Return a recipe for a table: that of `leanbayes compare` from `FEW` rows on, which stops by held-out rows.

    Below, `compare` trains on five folds and then again, up to twelve trainings. An estimator trains once, on all rows,
    for a fixed number of steps.
    """
    if rows >= FEW:
        return shared_recipe("quick", kind="table", rows=rows, validated=True)
    smallest, largest = BATCH_SIZES
    batch_size = min(largest, max(smallest, rows // STEPS_AN_EPOCH))
    epochs = max(FEWEST_EPOCHS, round(FEWEST_STEPS * batch_size / max(rows, batch_size)))
    return Recipe(epochs=epochs, batch_size=batch_size, optimizer="adam", lr=1e-2, weight_decay=3e-3)


def chosen_method(method: Method | str | None) -> Method | None:
    """Return a method, a method by its name, or the default; None for "plain"."""
    if method is None:
        return Rank1(components=4)
    if isinstance(method, str):
        return method_of(method)
    if not isinstance(method, Method):
        raise TypeError(f"expected method to be one such as lb.Rank1(components=4), or its name, got {method!r}")
    return method


def network(net: Net, *, num_outputs: int, features: int) -> nn.Module:
    """Return a new network with `num_outputs` outputs for rows of `features` numbers.

    Raises:
        TypeError: if `net` does not make a network.
        ValueError: if the network cannot take such rows, or its outputs have another shape.
    """
    made = _made(net, num_outputs=num_outputs, input_shape=(features,))
    try:
        with torch.no_grad(), in_eval_mode(made):
            outputs = call(made, torch.zeros(2, features))  # this also gives lazy layers their sizes
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"expected net to take float32 rows of {features} features, which failed: {error}") from error
    if outputs.shape != (2, num_outputs):
        raise ValueError(
            f"expected net to return {num_outputs} outputs a row, shape (2, {num_outputs}) for two rows, got shape "
            f"{tuple(outputs.shape)}; give its last layer {num_outputs} outputs"
        )
    return made


def _made(net: Any, *, num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    if net is None:
        return models.MLP(input_shape, num_outputs, hidden=(HIDDEN,))
    if isinstance(net, str):
        return models.build(net, num_outputs=num_outputs, input_shape=input_shape)
    if isinstance(net, nn.Module):
        return copy.deepcopy(net)
    made = net(num_outputs=num_outputs, input_shape=input_shape) if callable(net) else net
    if not isinstance(made, nn.Module):
        raise TypeError(
            "expected net to be a torch.nn.Module, a function of num_outputs and input_shape that returns one, or a "
            f"name of lb.models, got {net!r}"
        )
    return made


@dataclass(kw_only=True, eq=False, repr=False)
class _Bayesian(BaseEstimator):  # type: ignore[misc]
    """Parameters, training and prediction of both estimators; `fit` checks the parameters."""

    net: Net = None
    method: Method | str | None = None
    recipe: Recipe | None = None
    samples: int = 16
    standardize: bool = True
    random_state: int | np.random.RandomState | None = None
    device: str = "auto"

    def uncertainty(self, X: ArrayLike) -> Prediction:
        """Return the prediction of each row, with its uncertainty split into aleatoric and epistemic."""
        return self._predict(X, keep_samples=True)

    def _train(self, X: NDArray[Any], y: Tensor, likelihood: Likelihood, num_outputs: int) -> None:
        """Make the network, convert it and train it; the state of torch's generators is restored."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        method = chosen_method(self.method)
        recipe = replace(self._recipe(method, len(X)), seed=seed)
        scaler = StandardScaler(with_mean=self.standardize, with_std=self.standardize).fit(X)
        # Torch's generators are restored; an unused GPU is not initialised.
        used = recipe.accelerator != "cpu" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if used else ()

        def make(method: Method | None, likelihood: Likelihood) -> tuple[nn.Module, Likelihood]:
            torch.manual_seed(seed)
            model = network(self.net, num_outputs=num_outputs, features=X.shape[1])
            if method is not None:
                model = convert(model, method, likelihood=likelihood, copy=False)
            return model, likelihood

        with torch.random.fork_rng(devices), _silence():
            data = (_scaled(scaler, X).float(), y)
            if recipe.patience:
                making = partial(_make_fresh, make, likelihood=likelihood)
                model, likelihood, history = _stopped(making, method, recipe, data, self._samples)
            else:
                model, likelihood = make(method, likelihood)
                history = fit(model, data, recipe, likelihood=likelihood, progress=False)
        self.model_, self.history_, self.scaler_ = model, history, scaler
        self.likelihood_, self.seed_ = likelihood, seed

    @property
    def _samples(self) -> int:
        # searches over parameters pass numpy's integers
        return int(self.samples) if isinstance(self.samples, Integral) else self.samples

    def _recipe(self, method: Method | None, rows: int) -> Recipe:
        if self.recipe is None:
            recipe = recipe_for(method, default_recipe(rows))
        elif isinstance(self.recipe, Recipe):
            recipe = self.recipe
        else:
            raise TypeError(f"expected recipe to be one such as lb.Recipe(epochs=30), or None, got {self.recipe!r}")
        return recipe if self.device == "auto" else replace(recipe, accelerator=self.device)

    def _predict(self, X: ArrayLike, *, keep_samples: bool) -> Prediction:
        """Predict in float64, so that rounding does not make a row depend on the other rows."""
        check_is_fitted(self)
        inputs = _scaled(self.scaler_, validate_data(self, X, dtype=FLOATS, reset=False))
        exact = copy.deepcopy(self.model_).double()
        how: dict[str, Any] = {"samples": self._samples, "seed": self.seed_, "keep_samples": keep_samples}
        return predict(exact, inputs, self.likelihood_, **how)

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether there is a trained model; a failed `fit` leaves none."""
        return "model_" in vars(self)


class BayesianClassifier(ClassifierMixin, _Bayesian):  # type: ignore[misc]
    """A classifier with uncertainty for tables of numbers: a network whose weights have a posterior.

    Args:
        net: None for an MLP with one hidden layer; a function of `num_outputs` and `input_shape` that makes a network;
            a network (each `fit` trains a copy); or a name of `lb.models`. It takes rows (B, features); a network for
            images begins with `nn.Unflatten`.
        method: None for `lb.Rank1(components=4)`; any method or its name, such as "mean_field"; "plain" for the
            unconverted network.
        recipe: how to train; its seed is replaced by one from `random_state`. None chooses by the number of rows and
            the method. Below 2,000 rows it trains once, on all rows, for a fixed number of steps: seconds on one core.
            From 2,000 rows on it has the defaults of `leanbayes compare`: a constant rate until a tenth of the rows,
            held out, stops improving. A recipe with `patience` holds out a tenth, too.
        samples: draws per prediction.
        standardize: scale each column to mean zero and standard deviation one.
        random_state: of weights, noise, batches and draws; an integer makes `fit` repeatable. The state of torch's
            generators is restored.
        device: of the training: "auto", "cpu", "cuda", ...; "auto" leaves it to the recipe. Predictions run on the
            CPU, so that a trained estimator works anywhere.

    Attributes:
        classes_: the labels, in the order of the columns of `predict_proba`.
        model_: the trained model; its inputs are `scaler_.transform(X)`.
        history_: losses of each epoch.

    Example:
        >>> classifier = BayesianClassifier(method="rank1", random_state=0).fit(X, y)
        >>> classifier.predict_proba(X_test), classifier.uncertainty(X_test).epistemic
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on rows (n, features) with labels (n,) of any kind."""
        rows, labels = validate_data(self, X, y, dtype=FLOATS, ensure_min_samples=2)
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"expected labels of at least two classes, got one class only: {classes[0]}")
        self._train(rows, torch.from_numpy(codes.astype(np.int64)), Categorical(), len(classes))
        self.classes_ = classes
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable label of each row."""
        labels: NDArray[Any] = self.predict_proba(X).argmax(1)
        return self.classes_[labels]  # type: ignore[no-any-return]

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of each class, averaged over the draws: (n, classes)."""
        probabilities = self._predict(X, keep_samples=False).mean.double()
        return (probabilities / probabilities.sum(1, keepdim=True)).numpy()

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the logarithms of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


@dataclass(kw_only=True, eq=False, repr=False)
class BayesianRegressor(RegressorMixin, _Bayesian):  # type: ignore[misc]
    """A regression with uncertainty: a network whose weights have a posterior, with learned noise.

    Args:
        net: as for `BayesianClassifier`; with `heteroscedastic` it has two outputs for each target.
        method, recipe, samples, random_state, device: as for `BayesianClassifier`.
        standardize: scale each column to mean zero and standard deviation one; targets are always scaled.
        heteroscedastic: let the network predict the noise of each row, instead of one number for all rows.

    Attributes:
        model_: the trained model; its inputs are `scaler_.transform(X)`, its targets `target_scaler_.transform(y)`.
        history_: losses of each epoch.

    Example:
        >>> regressor = BayesianRegressor(random_state=0).fit(X, y)
        >>> mean, std = regressor.predict(X_test, return_std=True)
    """

    heteroscedastic: bool = False

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on rows (n, features) with targets (n,) or (n, targets)."""
        rows, values = validate_data(self, X, y, dtype=FLOATS, ensure_min_samples=2, multi_output=True, y_numeric=True)
        columns = values.reshape(len(rows), -1)
        scaler = StandardScaler().fit(columns.astype(np.float64))
        targets = _scaled(scaler, columns).float()
        if self.heteroscedastic:
            self._train(rows, targets, Gaussian(heteroscedastic=True), 2 * targets.shape[1])
        else:
            self._train(rows, targets, Gaussian(std=FIRST_NOISE, learn=True), targets.shape[1])
        self.target_scaler_, self._one_target = scaler, values.ndim == 1
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean of each target, and on request the standard deviation of the prediction.

        Its square is the total variance: aleatoric (noise of the targets) + epistemic (variance between draws).
        """
        prediction = self._predict(X, keep_samples=False)
        mean, std = (values[:, 0] if self._one_target else values for values in (prediction.mean, prediction.std))
        return (mean.numpy(), std.numpy()) if return_std else mean.numpy()

    @override
    def _predict(self, X: ArrayLike, *, keep_samples: bool) -> Prediction:
        p = super()._predict(X, keep_samples=keep_samples)
        return in_units(p, *(torch.from_numpy(v) for v in (self.target_scaler_.mean_, self.target_scaler_.scale_)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _make_fresh(make: Any, method: Method | None, likelihood: Likelihood) -> tuple[nn.Module, Likelihood]:
    return make(method, copy.deepcopy(likelihood))  # type: ignore[no-any-return]  # every training learns its own noise


def _stopped(
    make: Callable[[Method | None], tuple[nn.Module, Likelihood]],
    method: Method | None,
    recipe: Recipe,
    data: tuple[Tensor, Tensor],
    samples: int,
) -> tuple[nn.Module, Likelihood, History]:
    """Train as `leanbayes compare` does with one split: a tenth of the rows stops it, and gives the noise."""
    with TemporaryDirectory() as folder:

        def row(name: str, own: Method | None, how: Recipe) -> Row:
            return Row(partial(make, own), how, data, Held(HELD_OUT), Path(folder) / name, samples, {})

        plain = row("plain", None, recipe_for(None, recipe)) if method is not None else None
        trained = train_on_split(replace(row("row", method, recipe), plain=plain))
    return trained.model, trained.likelihood, trained.history


def _scaled(scaler: Any, values: NDArray[Any]) -> Tensor:
    """Return network inputs; means are subtracted before rounding to float32."""
    return torch.from_numpy(scaler.transform(values.astype(np.float64)))


@contextmanager
def _silence() -> Iterator[None]:
    """Switch off Fabric's advice: an estimator is silent."""
    loggers = [logging.getLogger(f"{package}.utilities.rank_zero") for package in PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
