"""How one row of a comparison is trained, and the role of held-out training rows in it.

| training                                | held-out rows          | they decide                                    |
|-----------------------------------------|------------------------|------------------------------------------------|
| no validation                           | none                   | nothing                                        |
| a schedule with a last epoch            | a share of the rows    | the temperature, or the noise of real targets  |
| constant rate with patience, many rows  | a share of the rows    | also when to stop, and when to convert         |
| constant rate with patience, few rows   | five folds, in turn    | the same; the final network trains on all rows |

A method that converts late is converted where the plain network of the same seed was best. If that network predicts
real targets to a few percent, the method begins with less noise (`noise_scale`): noise on factors is a share of the
outputs, and the epochs until the training stops do not lower it. The result depends on the settings alone, whatever
rows of the comparison ran before: `validation.json` keeps it in the folder of the run. Such a row begins from a state
of the plain training, if one was kept (`plain_state`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]
from torch import nn, Tensor
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from leanbayes.compare.job import relocated
from leanbayes.compare.plain_state import Made, method_after, PlainStates
from leanbayes.core.conversion import is_stochastic
from leanbayes.core.prediction import concatenate, Prediction
from leanbayes.core.predictor import predict
from leanbayes.data.holdout import fold_of, held_out
from leanbayes.distributions.likelihoods import Gaussian, Likelihood
from leanbayes.evaluation.figures import LEVEL
from leanbayes.evaluation.members import alone
from leanbayes.evaluation.result import read_json, write_json
from leanbayes.methods.ensemble import members_of
from leanbayes.metrics import interval_factor
from leanbayes.recalibrate import Temperature
from leanbayes.runtime.batches import device_of
from leanbayes.training import History, Recipe
from leanbayes.training.early_stopping import best_epoch
from leanbayes.training.fit import epochs_of, fit
from leanbayes.training.logs import Logger
from leanbayes.training.objective import autocast

FOLDS = 5
FEW = 2000
"""With fewer training rows, folds replace one split: a tenth of them would decide by chance."""

TEMPERATURE_PRIOR = 0.5
"""Standard deviation of log T: few held-out rows, almost all correct, do not decide a temperature (docs/compare.md)."""

ENOUGH_NOISE = 0.25
"""Standardised targets with at least this noise bear the initial noise of a method (docs/results/tables.md)."""

FILE = "validation.json"
Tensors = tuple[Tensor, ...]
"""Inputs, targets and, for some tables, weights of rows."""
Watch = Callable[[str, int], tuple[Callable[[Any], object], ...]]


@dataclass(frozen=True)
class Held:
    """How rows are held out: the share, and the group or time of each training row, if given."""

    share: float
    groups: Tensor | None = None
    time: Tensor | None = None


@dataclass(frozen=True)
class Row:
    """A row of the comparison before its training.

    Attributes:
        make: returns the untrained model and its likelihood, always the same ones.
        recipe: the training.
        data: inputs and targets of all training rows; weights may follow, see `weighted`.
        held: how rows are held out; None trains on all of them.
        folder: of the run.
        samples: draws per prediction.
        key: settings that the training depends on, as JSON values.
        plain: the plain network of the same seed, for methods that convert late.
        known: the `validation.json` of another run of the same row, which is read if its key is the same.
        states: of the plain training of the seed. A plain row keeps them, a row that converts late begins from one.
        evaluated: returns the network that is evaluated, such as a nested one at full width.
        callbacks: of the final training.
        watch: called with the name and the epochs of each training; returns further callbacks of it.
        loggers: of the final training.
        scaled: returns `make` with a share of the method's initial noise; None keeps that noise.
    """

    make: Callable[[], Made]
    recipe: Recipe
    data: Tensors
    held: Held | None
    folder: Path
    samples: int
    key: Mapping[str, Any]
    plain: Row | None = None
    known: Path | None = None
    states: PlainStates | None = None
    evaluated: Callable[[nn.Module], nn.Module] = lambda model: model
    callbacks: tuple[Callable[[Any], object], ...] = ()
    watch: Watch = lambda name, epochs: ()
    loggers: tuple[Logger, ...] = ()
    scaled: Callable[[float], Callable[[], Made]] | None = None


@dataclass(frozen=True)
class Validation:
    """The outcome of the held-out rows.

    Attributes:
        how: "split" or "folds".
        rows: number of held-out rows that were predicted.
        epochs: of the best state, or of the final training after folds.
        convert_at_epoch: epochs before the conversion.
        temperature: of the classes; 1 for real targets.
        noise: factor of the standard deviation of the noise of real targets; 1 for classes.
        nll: mean validation NLL of the best state, before temperature and noise.
        seconds: of the trainings on folds.
        interval: factor of the 95 % intervals of real targets, with which they hold 95 % of the held-out targets; None
            for classes, and in files of earlier versions.
        scale: share of the method's initial noise that the training began with; None if it is fixed.
        members: of an ensemble of plain networks after one split, the temperature of each member alone; for real
            targets, the factor of its noise. None for other rows.
    """

    how: str
    rows: int
    epochs: int
    convert_at_epoch: int
    temperature: float
    noise: float
    nll: float | None
    seconds: float = 0.0
    interval: float | None = None
    scale: float | None = None
    members: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without `scale` and `members` if there are none: older files lack them."""
        return {name: value for name, value in asdict(self).items() if not (name in RARE and value is None)}


RARE = ("scale", "members")
"""Fields that most rows do not have."""

LATER = ("interval", *RARE)
"""Fields that files of earlier versions lack."""
NAMES = tuple(field.name for field in fields(Validation) if field.name not in LATER)


@dataclass(frozen=True)
class Trained:
    """A trained row: model, likelihood, history of the final training, validation; of a student, its teacher."""

    model: nn.Module
    likelihood: Likelihood
    history: History
    validation: Validation | None
    teacher: Trained | None = None


def train_row(row: Row) -> Trained:
    """Train a row of the comparison; resume if its folder has a state."""
    if row.held is None:
        return Trained(*_fitted(row, row.recipe, row.data), None)
    if uses_folds(row.recipe, len(row.data[1])):
        return _train_after_folds(row, row.held)
    return train_on_split(row)


def uses_folds(recipe: Recipe, rows: int) -> bool:
    """Return whether five folds are held out in turn, instead of one share of the rows."""
    return bool(recipe.patience) and rows < FEW


def held_out_parts(y: Tensor, held: Held, recipe: Recipe) -> list[Tensor]:
    """Return the rows (n,) that each training holds out: five folds, or one share. They depend on the seed."""
    if uses_folds(recipe, len(y)):
        fold = fold_of(y, FOLDS, recipe.seed, groups=held.groups)
        return [fold == number for number in range(FOLDS)]
    return [held_out(y, held.share, recipe.seed, groups=held.groups, time=held.time)]


def validation_nll(row: Row, report: Callable[[int, float], object]) -> float:
    """Train a row as `train_row` does, but not on all rows after folds; return the NLL of its held-out rows.

    NLL = -mean_i log mean_s p(y_i | draw s); the noise of real targets is scaled as in `train_row`. `report` is called
    with a step and the NLL there: after each fold, or after each epoch of the converted network. It may raise to stop.
    """
    held = row.held
    assert held is not None
    row, _ = _at_conversion(row, folds=uses_folds(row.recipe, len(row.data[1])))
    recipe = row.recipe
    parts = held_out_parts(row.data[1], held, recipe)
    follow = _follower(recipe, report)
    if len(parts) == 1:
        row = replace(row, callbacks=(*row.callbacks, lambda state: follow(state.history)))
    predictions, targets = [], []
    for number, out in enumerate(parts):
        train, valid = _rows(row.data, ~out), _rows(row.data, out)
        fold = None if len(parts) == 1 else number
        model, likelihood, history = _fitted(row, recipe, train, valid, fold)
        predictions.append(_predicted(row, model, likelihood, valid[0]))
        targets.append(valid[1])
        if fold is not None:
            report(number + 1, _nll(concatenate(predictions), torch.cat(targets)))
        elif not members_of(model):
            follow(history)  # a resumed training that was complete called no callback
    return _nll(concatenate(predictions), torch.cat(targets))


def _follower(recipe: Recipe, report: Callable[[int, float], object]) -> Callable[[History], None]:
    """Return a function that reports each epoch after the conversion; before it, the noise has no effect.

    Of an ensemble, the epochs of one member count: the history of the next one is shorter.
    """
    reported: float = 0

    def follow(history: History) -> None:
        nonlocal reported
        steps = history[recipe.convert_at_epoch :]
        for step, one in enumerate(steps, 1):
            if step > reported and one.get("valid_nll") is not None:
                report(step, one["valid_nll"])
        reported = len(steps) if len(steps) >= reported else math.inf

    return follow


def _nll(p: Prediction, y: Tensor) -> float:
    """Return the mean NLL of predictions for held-out rows, at the noise that makes these rows most likely."""
    if p.variances is not None:
        p = replace(p, variances=p.variances.double() * _calibrated(p, y)["noise"] ** 2)
    return -float(p.log_prob(y).double().mean())


def train_on_split(row: Row) -> Trained:
    """Train a row with one split, for any number of rows."""
    held = row.held
    assert held is not None
    row, scale = _at_conversion(row, folds=False)
    recipe = row.recipe
    out = held_out(row.data[1], held.share, recipe.seed, groups=held.groups, time=held.time)
    train, valid = _rows(row.data, ~out), _rows(row.data, out)
    model, likelihood, history = _fitted(row, recipe, train, valid)

    def compute() -> dict[str, Any]:
        best = _best_epochs(history, recipe)
        prediction = _predicted(row, model, likelihood, valid[0])
        own = _calibrated(prediction, valid[1])
        epochs, nll = round(statistics.fmean(best)), _mean_nll(history, best)
        more: dict[str, Any] = {"nll": nll, "scale": scale}
        more["members"] = _of_members(model, prediction, valid[1])
        return Validation("split", len(valid[1]), epochs, recipe.convert_at_epoch, **more, **own).to_json()

    validation = _kept(row, compute)
    return Trained(model, with_noise(likelihood, validation.noise), history, validation)


def _train_after_folds(row: Row, held: Held) -> Trained:
    validation = _kept(row, lambda: _by_folds(row, held).to_json())
    row = _scaled(row, validation.scale)
    recipe = replace(row.recipe, patience=0, epochs=validation.epochs, convert_at_epoch=validation.convert_at_epoch)
    if row.states is not None and row.states.epochs:  # other rows convert after the last epoch of this training
        row = replace(row, states=replace(row.states, epochs=(recipe.epochs,)))
    model, likelihood, history = _fitted(row, recipe, row.data)
    return Trained(model, with_noise(likelihood, validation.noise), history, validation)


def _by_folds(row: Row, held: Held) -> Validation:
    """Train on four of five folds in turn: the mean of their best epochs, and a prediction for every row."""
    row, scale = _at_conversion(row, folds=True)
    recipe = row.recipe
    predictions, targets, best, nlls, seconds = [], [], [], [], 0.0
    for number, out in enumerate(held_out_parts(row.data[1], held, recipe)):
        train, valid = _rows(row.data, ~out), _rows(row.data, out)
        model, likelihood, history = _fitted(row, recipe, train, valid, fold=number)
        predictions.append(_predicted(row, model, likelihood, valid[0]))
        targets.append(valid[1])
        best += _best_epochs(history, recipe)
        nlls.append(_mean_nll(history, _best_epochs(history, recipe)))
        seconds += history.seconds
    own = _calibrated(concatenate(predictions), torch.cat(targets))
    epochs = max(recipe.convert_at_epoch + 1, round(statistics.fmean(best)))
    nll = statistics.fmean(known) if (known := [nll for nll in nlls if nll is not None]) else None
    if row.states is not None and row.states.epochs:
        for number in range(FOLDS):
            row.states.prune(number, epochs)
    more: dict[str, Any] = {"nll": nll, "seconds": seconds, "scale": scale}
    return Validation("folds", len(row.data[1]), epochs, recipe.convert_at_epoch, **more, **own)


def _at_conversion(row: Row, *, folds: bool) -> tuple[Row, float | None]:
    """Return the row, with patience converted after the best epoch of the plain network; and its share of the noise."""
    recipe = row.recipe
    if row.plain is None or not (recipe.patience and recipe.convert_at_epoch):
        return row, None
    found = _plain_validation(row.plain, folds=folds)
    recipe = replace(recipe, convert_at_epoch=found.epochs, epochs=found.epochs + recipe.epochs)
    scale = None if row.scaled is None else noise_scale(found.nll, row.data[1][0].numel())
    return _scaled(replace(row, recipe=recipe), scale), scale


def _scaled(row: Row, scale: float | None) -> Row:
    """Return the row with a share of its method's initial noise."""
    return row if row.scaled is None or scale in (None, 1.0) else replace(row, make=row.scaled(scale))


def noise_scale(nll: float | None, targets: int = 1) -> float:
    """Return the share of a method's initial noise that real targets bear: min(1, (sigma / ENOUGH_NOISE)^2).

    sigma is the noise of the standardised targets: the standard deviation of the Normal whose entropy is the held-out
    NLL of the plain network, for each of the targets of a row.
    """
    if nll is None:
        return 1.0
    sigma = math.exp(nll / targets - 0.5 * math.log(2 * math.pi * math.e))
    return min(1.0, (sigma / ENOUGH_NOISE) ** 2)


def _plain_validation(plain: Row, *, folds: bool) -> Validation:
    """Return the validation of the plain network: known from its own run, or found now."""
    assert plain.held is not None
    held = plain.held
    if plain.known is not None and (found := _read(plain.known, plain.key)) is not None:
        return found
    if folds:
        return _kept(plain, lambda: _by_folds(plain, held).to_json())
    found = train_on_split(plain).validation
    assert found is not None
    return found


def _read(path: Path, key: Mapping[str, Any]) -> Validation | None:
    try:
        found = read_json(path)
        if relocated(found.get("key"), key) != dict(key):
            return None
    except (OSError, ValueError):
        return None
    later = {name: found[name] for name in LATER if name in found}
    return Validation(**{name: found[name] for name in NAMES}, **later)


def _kept(row: Row, compute: Callable[[], Mapping[str, Any]]) -> Validation:
    """Return the validation of a row from its folder, or compute and store it."""
    found = _read(row.folder / FILE, row.key)
    if found is None:
        computed = dict(compute())
        write_json(computed | {"key": dict(row.key)}, row.folder / FILE)
        return Validation(**computed)
    return found


def _fitted(
    row: Row,
    recipe: Recipe,
    data: Tensors,
    valid: Tensors | None = None,
    fold: int | None = None,
) -> tuple[nn.Module, Likelihood, History]:
    """Train the final network of a row, or that of a fold; resume if its folder has a state."""
    model, likelihood = row.make()
    name, folder = (
        ("training", row.folder) if fold is None else (f"fold {fold + 1} of {FOLDS}", row.folder / f"fold{fold}")
    )
    given: dict[str, Any] = {"folder": folder, "resume": True, "progress": False, "likelihood": likelihood}
    given["callbacks"] = row.watch(name, epochs_of(model, recipe))
    if fold is None:
        given |= {"callbacks": (*row.callbacks, *given["callbacks"]), "loggers": row.loggers}  # a limit stops after all
    given["validation"] = None if valid is None else valid[:2]
    if row.states is not None and row.plain is not None:
        row.states.begin(folder, recipe, row.make, row.plain.make, fold)
    if row.states is not None and row.states.epochs:
        keep = partial(row.states.keep, folder, recipe, fold)
        keep()  # of a training that was killed before it did
        given["callbacks"] = (*given["callbacks"], keep)
    return model, likelihood, fit(model, weighted(data, recipe), recipe, **given)


def weighted(data: Tensors, recipe: Recipe) -> Any:
    """Return data for `fit`; rows with weights are drawn in proportion to them, with replacement."""
    inputs, targets, *weights = data
    if not weights:
        return inputs, targets
    generator = torch.Generator()
    sampler = WeightedRandomSampler(weights[0].double().tolist(), len(inputs), generator=generator)
    how: dict[str, Any] = {"batch_size": recipe.batch_size, "sampler": sampler, "generator": generator}
    lone = len(inputs) % recipe.batch_size == 1  # one row has no batch statistics
    return DataLoader(TensorDataset(inputs, targets), drop_last=lone, **how)


def _predicted(row: Row, model: nn.Module, likelihood: Likelihood, x: Tensor) -> Prediction:
    with autocast(row.recipe.precision, device_of(model)):
        return predict(row.evaluated(model), x, likelihood, samples=row.samples).to("cpu")


def _best_epochs(history: History, recipe: Recipe) -> list[int]:
    """Return the best epoch of each network: of one, or of the members of an ensemble; without patience, the last."""
    members = {row.get("member"): History() for row in history}
    for row in history:
        members[row.get("member")].append(row)
    best = best_epoch if recipe.patience else lambda rows, _: len(rows)
    return [best(rows, recipe) or len(rows) for rows in members.values()]


def _mean_nll(history: History, best: list[int]) -> float | None:
    """Return the mean of the validation NLL of each network at its best epoch."""
    found = [row.get("valid_nll") for row in history if row["epoch"] == best[row.get("member") or 0]]
    known = [nll for nll in found if nll is not None]
    return statistics.fmean(known) if known else None


def _rows(data: Tensors, chosen: Tensor) -> Tensors:
    return tuple(part[chosen] for part in data)


def _calibrated(p: Prediction, y: Tensor) -> dict[str, Any]:
    """Return the temperature of classes, or the factors of noise and intervals of real targets, of held-out rows."""
    if not isinstance(p.likelihood, Gaussian):
        fitted = Temperature("mean", prior=TEMPERATURE_PRIOR).fit(p, y)
        return {"temperature": float(fitted.temperature or 1.0), "noise": 1.0}
    noise = 1.0 if p.likelihood.heteroscedastic else best_noise(p, y)
    assert p.variances is not None
    wider = replace(p, variances=p.variances * noise**2)
    return {"temperature": 1.0, "noise": noise, "interval": interval_factor(*wider.interval(LEVEL), y, LEVEL)}


def _of_members(model: nn.Module, p: Prediction, y: Tensor) -> tuple[float, ...] | None:
    """Return temperature, or factor of the noise, of each member that was trained as a plain network; None without."""
    members = members_of(model)
    if not members or p.samples is None or method_after(model) or any(is_stochastic(member) for member in members):
        return None
    found = [_calibrated(alone(p, draw), y) for draw in range(min(len(members), len(p.samples)))]
    return tuple(float(one["temperature"] * one["noise"]) for one in found)


def best_noise(p: Prediction, y: Tensor) -> float:
    """Return the factor f of the noise that maximises mean log mean_s Normal(y; m_s, f^2 v_s)."""
    assert p.variances is not None
    variances = p.variances

    def loss(log_factor: float) -> float:
        wider = replace(p, variances=variances.double() * math.exp(2 * log_factor))
        return -float(wider.log_prob(y).mean())

    found = minimize_scalar(loss, bounds=(math.log(0.05), math.log(20.0)), method="bounded", options={"xatol": 1e-4})
    return math.exp(float(found.x))


def with_noise(likelihood: Likelihood, factor: float) -> Likelihood:
    """Multiply the standard deviation of a Gaussian in place."""
    if isinstance(likelihood, Gaussian) and factor != 1.0:
        with torch.no_grad():
            likelihood.log_std.add_(math.log(factor))
    return likelihood
