"""Measure methods in plain networks: the score of ensembles of 1, 2, ... networks, over all subsets of trained ones.

The score is the calibrated NLL. A method is worth K networks if it reaches the score of an ensemble of K. The inputs
are class probabilities of finished runs, from `save_predictions`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes import metrics
from leanbayes.compare.kept import SETTINGS_FILE
from leanbayes.compare.load_run import load_run
from leanbayes.core.conversion import is_stochastic
from leanbayes.core.plain import mean
from leanbayes.core.predictor import distinct_draws, predict
from leanbayes.data.cache import write_npz
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation.result import commit, read_json
from leanbayes.methods.ensemble import members_of
from leanbayes.metrics._validate import log_probabilities, pick
from leanbayes.metrics.calibration import cross_fitted
from leanbayes.runtime.passes import components_of
from leanbayes.training.objective import autocast

FIGURES = ("accuracy", "nll", "cnll", "ece")
BOOTSTRAPS = 400
"""Bootstrap samples of the test rows, for standard errors."""
FLOOR_DRAWS = 200
"""Draws of the classes of the test rows from a network's own probabilities."""


@dataclass(frozen=True, eq=False)
class Saved:
    """Class probabilities of a finished run.

    Attributes:
        about: net, method, seed, data, number of draws, commit of the predicting code.
        y: classes (N,).
        parts: probabilities (N, C) by name. `both` is the run's prediction: all members, with noise. Runs with members
            also have `member0`, `member1`, ... without noise; `noise0`, `noise1`, ..., one member with noise; and
            `centre`, the average of the members' parameters.
    """

    about: dict[str, Any]
    y: Tensor
    parts: dict[str, Tensor]

    @property
    def members(self) -> Tensor | None:
        """The mean over all members without noise; None for a run without members."""
        found = [p for name, p in self.parts.items() if name.startswith("member")]
        return torch.stack(found).double().mean(0) if found else None

    @property
    def noisy(self) -> list[Tensor]:
        """The prediction of each member with noise."""
        return [p for name, p in self.parts.items() if name.startswith("noise")]


def save_predictions(
    folder: Path, out: Path, *, samples: int = 16, noise: bool = True, device: str = "cpu", root: str | None = None
) -> Saved:
    """Predict the test rows with the network of a finished run, in its training precision, and write an `.npz`.

    Args:
        folder: of the run.
        out: the file to write.
        samples: draws of `both`, and of each member with noise.
        noise: predict also with each member with noise, which takes most of the passes.
        device: of the prediction.
        root: folder of the known data sets; default that of the run.
    """
    run = load_run(folder, root)
    settings = read_json(folder / SETTINGS_FILE)
    recipe = settings["recipe"]
    if run.data.task != "classification":
        raise ValueError(f"expected a run with classes, got '{folder}', which is a regression")
    model = run.model.to(device)
    if recipe.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = run.data.inputs(run.data.test.x), run.data.test.y
    with autocast(recipe.get("precision", "32-true"), torch.device(device)):
        parts = {
            name: p.float().cpu() for name, p in predicted_parts(model, x, run.likelihood.to(device), samples, noise)
        }
    about = {
        "net": run.net,
        "method": settings["method"],
        "seed": recipe["seed"],
        "data": {"name": run.data.name, "sha256": run.data.sha256, "train": len(run.data.train), "test": len(y)},
        "recipe": recipe,
        "samples": samples,
        "commit": commit(),
    }
    return write_predictions(out, Saved(about, y.long(), parts))


def write_predictions(path: Path, saved: Saved) -> Saved:
    """Write class probabilities as `.npz`, whole or not at all, and return them."""
    arrays = {f"p_{name}": p.numpy() for name, p in saved.parts.items()}
    write_npz(path, {"about": np.array(json.dumps(saved.about)), "y": saved.y.numpy(), **arrays})
    return saved


def read_predictions(path: Path) -> Saved:
    """Read a file of `save_predictions`.

    Raises:
        ValueError: in one sentence, if the file is of another kind.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            parts = {name[2:]: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("p_")}
            return Saved(about, torch.from_numpy(arrays["y"]), parts)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"expected predictions of a run in '{path}', got something else ({error})") from error


def predicted_parts(
    model: nn.Module, x: Tensor, likelihood: Likelihood, samples: int, noise: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the class probabilities of a network by part, as in `Saved.parts`; `noise` adds each member with noise."""

    def average(network: nn.Module, draws: int = 1, component: int | None = None) -> Tensor:
        return predict(network, x, likelihood, samples=draws, component=component, keep_samples=False).mean

    distinct = distinct_draws(model)
    yield "both", average(model, distinct or samples)
    if members_of(model) or not is_stochastic(model):
        return
    yield "centre", average(mean(model))
    for k in range(components_of(model)):
        yield f"member{k}", average(mean(model, component=k))
        if distinct is None and noise:
            yield f"noise{k}", average(model, samples, component=k)


@dataclass(frozen=True, eq=False)
class Scored:
    """The figures of one prediction.

    Attributes:
        figures: accuracy, NLL, calibrated NLL and ECE.
        rows: contribution of each row to the first three figures, which are means over rows.
    """

    figures: dict[str, float]
    rows: dict[str, Tensor]


def score(probabilities: Tensor, y: Tensor) -> Scored:
    """Score the class probabilities (N, C) of N rows; the calibrated NLL equals `metrics.calibrated_nll`."""
    y = y.long()
    calibrated = torch.empty(len(y), dtype=torch.float64)
    for rows, losses in cross_fitted(probabilities, y):
        calibrated[rows] = losses
    each = {
        "accuracy": (probabilities.argmax(1) == y).double(),
        "nll": -pick(log_probabilities(probabilities), y),
        "cnll": calibrated,
    }
    figures = {name: float(values.mean()) for name, values in each.items()}
    return Scored(figures | {"ece": float(metrics.ece(probabilities, y))}, each)


def ece_floor(probabilities: Tensor, *, draws: int = FLOOR_DRAWS) -> dict[str, float]:
    """Return the ECE of a calibrated network with these probabilities, which is positive because rows are few.

    Classes are drawn from the probabilities, so the network is calibrated and its ECE is noise. A measured ECE within
    the central 95 % of these is not distinguishable from that of a calibrated network.

    Returns:
        `mean`, `low` (2.5 %) and `high` (97.5 %) over the draws.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probabilities.double(), draws, replacement=True, generator=generator)
    values = torch.stack([torch.as_tensor(metrics.ece(probabilities, y)) for y in drawn.unbind(1)]).double()
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high}


class Ruler:
    """Scores of ensembles of all subsets of trained networks."""

    def __init__(self, networks: Sequence[Tensor], y: Tensor) -> None:
        """Score all subsets.

        Args:
            networks: class probabilities (N, C) of each network for the same rows; at least two networks.
            y: classes (N,).
        """
        if len(networks) < 2 or len({tuple(p.shape) for p in networks}) > 1:
            shapes = [tuple(p.shape) for p in networks]
            raise ValueError(f"expected probabilities of one shape of at least two networks, got shapes {shapes}")
        self.count = len(networks)
        self.scored: dict[tuple[int, ...], Scored] = {}
        for size in range(1, self.count + 1):
            for subset in combinations(range(self.count), size):
                mixture = torch.stack([networks[i].double() for i in subset]).mean(0)
                self.scored[subset] = score(mixture, y)

    def curve(self, figure: str = "cnll", without: int | None = None) -> dict[int, float]:
        """Return the mean of a figure over all subsets of each size; `without` leaves one network out."""
        found: dict[int, list[float]] = {}
        for subset, scored in self.scored.items():
            if without not in subset:
                found.setdefault(len(subset), []).append(scored.figures[figure])
        return {size: math.fsum(values) / len(values) for size, values in found.items()}

    def rows(self, figure: str = "cnll") -> Tensor:
        """Return the contribution of each row to the curve: (sizes, rows), means over the subsets of a size."""
        sizes = range(1, self.count + 1)
        of_size = [[s.rows[figure] for subset, s in self.scored.items() if len(subset) == size] for size in sizes]
        return torch.stack([torch.stack(each).mean(0) for each in of_size])

    def table(self) -> list[dict[str, Any]]:
        """Return a record for each size: the mean of each figure, and its standard errors.

        `se_networks` is the error from the choice of networks (jackknife over networks; None for the ensemble of all).
        `se_rows` is the error from the choice of test rows. All methods on these rows share it, so it mostly cancels in
        their differences.
        """
        found: list[dict[str, Any]] = [
            {"networks": size, "subsets": math.comb(self.count, size)} for size in range(1, self.count + 1)
        ]
        for figure in FIGURES:
            parts = [self.curve(figure, without=i) for i in range(self.count)]
            for record, average in zip(found, self.curve(figure).values(), strict=True):
                left = [part[record["networks"]] for part in parts if record["networks"] in part]
                record[figure] = {"mean": average, "se_networks": jackknife(left) if left else None}
            if figure != "ece":
                for record, each in zip(found, self.rows(figure), strict=True):
                    record[figure]["se_rows"] = float(each.std() / math.sqrt(len(each)))
        return found

    def worth(self, runs: Sequence[Scored]) -> dict[str, Any]:
        """Return the number of networks that the runs of a method are worth, by calibrated NLL.

        The curve is linear in 1 / K between measured sizes. The variance of an error has three terms: other plain
        networks and other seeds of the method (jackknife), and other test rows (bootstrap, the same rows for both).

        Returns:
            `networks` with `bound` ("at most" or "at least" outside of the curve) and `se`; `gain`, the calibrated NLL
            of one network minus that of the method, with `gain_se`.
        """
        losses = torch.stack([run.rows["cnll"] for run in runs])
        found: dict[str, Any] = {"cnll": float(losses.mean(1).mean()), "runs": len(runs)}
        networks = metrics.ensemble_equivalent(found["cnll"], self.curve())
        found |= {"networks": networks.networks, "bound": networks.bound}
        for name, of in (("se", _equivalent), ("gain_se", _gain)):
            found[name] = math.sqrt(sum(self._variances(of, losses)))
        return found | {"gain": self.curve()[1] - found["cnll"]}

    def _variances(self, of: Callable[[float, dict[int, float]], float], losses: Tensor) -> Iterable[float]:
        """Yield the variances of a figure that come from networks, seeds and rows."""
        average, curve = float(losses.mean()), self.curve()
        yield jackknife([of(average, self.curve(without=i)) for i in range(self.count)]) ** 2
        if len(losses) > 1:
            own = losses.mean(1)
            yield jackknife([of(float((own.sum() - one) / (len(own) - 1)), curve) for one in own]) ** 2
        each = torch.cat([losses.mean(0, keepdim=True), self.rows()])  # the method, then 1, 2, ... networks
        again = torch.stack([row_counts @ each.T for row_counts in _resample(each.shape[1])]) / each.shape[1]
        values = [of(row[0], dict(enumerate(row[1:], start=1))) for row in again.tolist()]
        yield float(torch.tensor(values, dtype=torch.float64).var())


def jackknife(left_out: Sequence[float]) -> float:
    """Return the standard error of an estimate from its values with one unit left out.

    se^2 = (n - 1) / n sum_i (e_i - mean e)^2.
    """
    values = torch.tensor(left_out, dtype=torch.float64)
    return float(((len(values) - 1) * (values - values.mean()).square().mean()).sqrt())


def paired(runs: dict[int, Scored], plain: dict[int, Scored], figure: str = "cnll") -> dict[str, Any]:
    """Return the differences to the plain networks of the same seeds, which had the same initial weights."""
    seeds = sorted(set(runs) & set(plain))
    each = [runs[seed].figures[figure] - plain[seed].figures[figure] for seed in seeds]
    values = torch.tensor(each, dtype=torch.float64)
    se = float(values.std() / math.sqrt(len(seeds))) if len(seeds) > 1 else None
    return {"seeds": seeds, "differences": each, "mean": float(values.mean()) if seeds else None, "se": se}


def _equivalent(cnll: float, curve: dict[int, float]) -> float:
    return metrics.ensemble_equivalent(cnll, curve).networks


def _gain(cnll: float, curve: dict[int, float]) -> float:
    return curve[1] - cnll


def _resample(rows: int) -> Iterable[Tensor]:
    """Yield the count of each row in bootstrap samples."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(BOOTSTRAPS):
        yield torch.bincount(torch.randint(rows, (rows,), generator=generator), minlength=rows).double()
