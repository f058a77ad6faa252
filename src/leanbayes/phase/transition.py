"""Watch the phase transition happen: a callback for `fit` (Neklyudov et al., 2019, Figures 1, 3 and 4)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.predictor import NoiseOf
from leanbayes.methods.variance import VarianceLayer
from leanbayes.phase.criterion import kappa
from leanbayes.phase.procedures import accuracies
from leanbayes.runtime._files import local, write_whole
from leanbayes.runtime.batches import Inputs

SMALLEST = 1e-25
"""What stands for a kappa of zero, as in the paper's histograms."""

BINS = 60


class Epoch(Protocol):
    """What `fit` tells a callback: the epoch, and the model in training."""

    epoch: int
    model: nn.Module


class Transition:
    """Records, after every epoch, the accuracies of means and ensemble, log alpha, and how many weights need sampling.

    Args:
        test: inputs and labels on which accuracies are measured.
        curvature: inputs and labels over which kappa is summed; None leaves it out. A thousand rows suffice to see it.
        samples: draws of the ensemble.
        threshold: kappa from which a weight needs sampling; 10^1.5 in the paper.
        every: look after every so many epochs.
        noise: of the draws: sampled weights, or "activation" as the paper evaluates.

    Attributes:
        rows: one record for each look, as JSON can hold it.

    Example:
        >>> watch = lb.phase.Transition((x_test, y_test))
        >>> lb.fit(bnn, (x, y), recipe, callbacks=[watch])
        >>> watch.draw("transition.svg")
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
        """Take the data; nothing is looked at before the first epoch ends."""
        self.test, self.curvature = test, curvature
        self.samples, self.threshold, self.every, self.noise = samples, threshold, every, noise
        self.rows: list[dict[str, Any]] = []

    def __call__(self, state: Epoch) -> None:
        """Look at the model after an epoch; before a late conversion there is nothing to see."""
        layers = {p: layer for p, layer in stochastic_layers(state.model) if isinstance(layer, VarianceLayer)}
        if state.epoch % self.every or not layers:
            return
        row: dict[str, Any] = {"epoch": state.epoch, **self._accuracies(state.model)}
        row["log_alpha"] = {path: float(layer.log_alpha.detach().mean()) for path, layer in layers.items()}
        if self.curvature is not None:
            found = kappa(state.model, self.curvature)
            row["kappa"] = {path: histogram(values) for path, values in found.items()}
            row["sampled"] = {path: int((values > self.threshold).sum()) for path, values in found.items()}
        self.rows.append(row)

    def _accuracies(self, model: nn.Module) -> dict[str, float]:
        return accuracies(model, self.test, samples=self.samples, noise=self.noise)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw accuracies over epochs, log alpha below, and where it was measured the number of weights above kappa.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("figures need matplotlib, which is not here; install leanbayes[examples]") from error
        if not self.rows:
            raise ValueError("expected at least one epoch to draw, got none; pass this object to fit as a callback")
        epochs = [row["epoch"] for row in self.rows]
        counted = "sampled" in self.rows[0]
        figure = Figure(figsize=(6, 5.5 if counted else 4), layout="constrained")
        top, *lower = figure.subplots(3 if counted else 2, 1, sharex=True)
        for name in ("ensemble", "stochastic", "deterministic"):
            top.plot(epochs, [100 * row[name] for row in self.rows], label=name)
        top.set(ylabel="accuracy, %")
        top.legend(fontsize=7)
        _lines(lower[0], epochs, [row["log_alpha"] for row in self.rows], "mean log alpha")
        if counted:
            _lines(
                lower[1], epochs, [row["sampled"] for row in self.rows], f"weights with kappa > {self.threshold:.3g}"
            )
        lower[-1].set(xlabel="epoch")
        kind = local(path).suffix.removeprefix(".") or "svg"
        write_whole(local(path), lambda temporary: figure.savefig(temporary, format=kind))


def histogram(values: Tensor) -> dict[str, list[float]]:
    """Return a histogram of log10 kappa: edges of the bins and counts; zeros stand at 1e-25."""
    logs = values.detach().flatten().double().clamp(min=SMALLEST).log10().cpu()
    low, high = math.floor(float(logs.min())), math.ceil(float(logs.max()) + 1e-9)
    edges = torch.linspace(low, max(high, low + 1), BINS + 1, dtype=torch.float64)
    counts = torch.histogram(logs, edges).hist
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _lines(axis: Any, epochs: list[int], values: list[Mapping[str, float]], label: str) -> None:
    for path in values[0]:
        axis.plot(epochs, [row[path] for row in values], label=path or "(root)")
    axis.set(ylabel=label)
    axis.legend(fontsize=7)
