"""Three ways to predict with one stochastic network, and a callback of `fit` that records the phase transition.

The ways (Neklyudov et al., 2019, section 3) have norms in eval mode:

* deterministic: the network of posterior means (eq. 3);
* stochastic: one draw;
* ensemble: the average over draws (eq. 2).

For a low-variance network they agree. After the phase transition, only the ensemble predicts better than chance
(Figures 1, 3 and 4).
"""

from __future__ import annotations

import math
import os
from typing import Any, Literal, Protocol

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import own_likelihood
from leanbayes.core.plain import mean
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import NoiseOf, predict
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.metrics._validate import check_whole
from leanbayes.metrics.classification import accuracy
from leanbayes.phase.ablation import variance_layers
from leanbayes.phase.criterion import kappa
from leanbayes.runtime._files import local, write_whole
from leanbayes.runtime.batches import Inputs

Procedure = Literal["deterministic", "stochastic", "ensemble"]
PROCEDURES: tuple[Procedure, ...] = ("deterministic", "stochastic", "ensemble")

SMALLEST = 1e-25
"""Replaces a kappa of zero, as in the paper's histograms."""

BINS = 60


def infer(
    model: nn.Module,
    x: Inputs,
    procedure: Procedure,
    likelihood: Likelihood | None = None,
    *,
    samples: int = 16,
    seed: int = 0,
    noise: NoiseOf = "function",
) -> Prediction:
    """Predict by one of the three procedures; arguments as of `lb.predict`.

    noise="activation" has fresh noise for every row and activation, as in the paper.

    Example:
        >>> lb.phase.infer(bnn, x, "deterministic").mean
    """
    if procedure not in PROCEDURES:
        raise ValueError(f"expected procedure to be one of {', '.join(PROCEDURES)}, got {procedure!r}")
    if procedure == "deterministic":
        return predict(mean(model), x, likelihood or own_likelihood(model), samples=1, keep_samples=False)
    count = 1 if procedure == "stochastic" else samples
    return predict(model, x, likelihood, samples=count, seed=seed, noise=noise, keep_samples=False)


def accuracies(
    model: nn.Module, data: tuple[Inputs, Tensor], *, samples: int = 16, noise: NoiseOf = "function"
) -> dict[str, float]:
    """Return the accuracy of each of the three procedures, as in Table 1 of the paper."""
    x, y = data
    found: dict[str, float] = {}
    for procedure in PROCEDURES:
        p = infer(model, x, procedure, samples=samples, noise=noise).mean
        found[procedure] = float(accuracy(p, torch.as_tensor(y, device=p.device)))
    return found


class Epoch(Protocol):
    """The attributes of a training state that a callback reads: the epoch, and the model."""

    epoch: int
    model: nn.Module


class Transition:
    """Record the accuracies of means and ensemble, log alpha, and the number of weights that need sampling.

    Args:
        test: inputs and labels for the accuracies.
        curvature: inputs and labels over which kappa is summed, a thousand rows suffice; None omits it.
        samples: draws of the ensemble.
        threshold: kappa above which a weight needs sampling; 10^1.5 in the paper.
        every: number of epochs between two records.
        noise: "function" samples weights; "activation" as in the paper.

    Attributes:
        rows: one JSON-safe record for each recorded epoch.

    Example:
        >>> watch = lb.phase.Transition((x_test, y_test))
        >>> lb.fit(bnn, (x, y), recipe, callbacks=[watch])
        >>> watch.plot("transition.svg")
    """

    def __init__(
        self,
        test: tuple[Inputs, Tensor],
        *,
        curvature: tuple[Inputs, Tensor] | None = None,
        samples: int = 10,
        threshold: float = 10**1.5,
        every: int = 1,
        noise: NoiseOf = "function",
    ) -> None:
        check_whole(every, "every")
        self.test, self.curvature = test, curvature
        self.samples, self.threshold, self.every, self.noise = samples, threshold, every, noise
        self.rows: list[dict[str, Any]] = []

    def __call__(self, state: Epoch) -> None:
        """Record an epoch; before a late conversion there are no variance layers to record."""
        layers = variance_layers(state.model)
        if state.epoch % self.every or not layers:
            return
        row: dict[str, Any] = {"epoch": state.epoch}
        row |= accuracies(state.model, self.test, samples=self.samples, noise=self.noise)
        row["log_alpha"] = {path: float(layer.log_alpha.detach().mean()) for path, layer in layers.items()}
        if self.curvature is not None:
            found = kappa(state.model, self.curvature)
            row["kappa"] = {path: histogram(values) for path, values in found.items()}
            row["sampled"] = {path: int((values > self.threshold).sum()) for path, values in found.items()}
        self.rows.append(row)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot accuracies, log alpha and, if measured, the number of weights above kappa. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("figures need matplotlib, which is not here; install leanbayes[examples]") from error
        if not self.rows:
            raise ValueError("expected at least one epoch to plot, got none; pass this object to fit as a callback")
        epochs = [row["epoch"] for row in self.rows]
        counted = "sampled" in self.rows[0]
        figure = Figure(figsize=(6, 5.5 if counted else 4), layout="constrained")
        top, *lower = figure.subplots(3 if counted else 2, 1, sharex=True)
        for name in ("ensemble", "stochastic", "deterministic"):
            top.plot(epochs, [100 * row[name] for row in self.rows], label=name)
        top.set(ylabel="accuracy, %")
        top.legend(fontsize=7)
        labels = {"log_alpha": "mean log alpha", "sampled": f"weights with kappa > {self.threshold:.3g}"}
        for axis, (name, label) in zip(lower, labels.items(), strict=False):
            for layer in self.rows[0][name]:
                axis.plot(epochs, [row[name][layer] for row in self.rows], label=layer or "(root)")
            axis.set(ylabel=label)
            axis.legend(fontsize=7)
        lower[-1].set(xlabel="epoch")
        kind = local(path).suffix.removeprefix(".") or "svg"
        write_whole(local(path), lambda temporary: figure.savefig(temporary, format=kind))


def histogram(values: Tensor) -> dict[str, list[float]]:
    """Return a histogram of log10 kappa, edges and counts; zeros count as 1e-25."""
    logs = values.detach().flatten().double().clamp(min=SMALLEST).log10().cpu()
    low, high = math.floor(float(logs.min())), math.ceil(float(logs.max()) + 1e-9)
    edges = torch.linspace(low, max(high, low + 1), BINS + 1, dtype=torch.float64, device="cpu")
    counts = torch.histogram(logs, edges).hist
    return {"edges": edges.tolist(), "counts": counts.tolist()}
