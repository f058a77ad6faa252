"""The networks of the variance paper by budget: variance layers in some places, binary dropout in the others.

The paper: Adam at 1e-3, linearly to zero, batches of 200 for 200 epochs on MNIST and of 100 for 550 epochs on CIFAR.
The KL has its full weight from the start. Log alpha is above 2 within a few hundred steps, and then rises slowly: the
number of steps decides whether the phase transition comes. Shorter trainings have larger rates.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import override

import leanbayes as lb
from leanbayes.data import DataSet
from leanbayes.layers import Abs, activate, first, last
from leanbayes.layers.family import DROPOUTS, LINEAR_MAPS
from leanbayes.layers.select import choose
from leanbayes.runtime._files import write_text
from leanbayes_papers.harness import Run, Trained, TrainingSpec

ALL_OF_LENET = (first(nn.Conv2d, 2), first(nn.Linear, 3))
FIRST_DENSE = (first(nn.Linear),)
VGG_LAYERS = (last(nn.Conv2d, 3), first(nn.Linear))
ACTIVATIONS: dict[str, type[nn.Module]] = {"abs": Abs, "softplus": nn.Softplus}
SAMPLES = {"quick": 10, "short": 50, "full": 50}
TEST_ROWS = {"quick": 300, "short": 0, "full": 0}
WATCHED = {"quick": 100, "short": 1000, "full": 1000}  # test rows on which accuracies are measured after every epoch
QUICK_LOOKS = 20  # epochs that the quick budget measures, of many short ones
THRESHOLD = 10**1.5  # kappa_0 of the paper, for the loss summed over all training rows
ROWS_FILE = "transition.json"


def digits_name(run: Run) -> str:
    """Return the data of LeNet-5: in quick, the digits of scikit-learn stand for MNIST."""
    return run.pick(quick="digits", short="mnist", full="mnist")


def lenet(
    run: Run, name: str, method: lb.VarianceLayers | None = None, *, dropout: bool = False, **options: Any
) -> TrainingSpec:
    """Return a LeNet-5 with norms; in quick, two linear layers with a norm. `build` and `Watch` read the options."""
    net = run.pick(quick="mlp-2-500", short="lenet5-bn", full="lenet5-bn")
    net += run.pick(quick="+dropout0.1", short="-dropout", full="-dropout") if dropout else ""
    recipe = run.recipe_of("variance", "lenet")
    fields = {"method": method, "options": options, "build": build, "watch": None if method is None else Watch}
    return run.spec(name, digits_name(run), net, recipe, quick_rows=1000, **fields)


def vgg(
    run: Run, data: str, name: str, method: lb.VarianceLayers | None = None, *, dropout: bool = True, **options: Any
) -> TrainingSpec:
    """Return a VGG-like network, in quick a narrow one on few images. `build` and `Watch` read the options."""
    net = run.pick(quick="vgg-like-w0.125", short="vgg-like", full="vgg-like") + ("-dropout" if dropout else "")
    recipe = run.recipe_of("variance", "vgg")
    fields = {"method": method, "options": options, "build": build, "watch": None if method is None else Watch}
    return run.spec(name, data, net, recipe, quick_rows=200, **fields)


def build(spec: TrainingSpec, data: DataSet) -> nn.Module:
    """Return the network with variance layers in `layers`, and `activation` after them in place of a rectifier.

    Dropout layers stay on when predicting. Those directly before variance layers are removed: these have their own
    noise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a zero-mean layer has no trained function to lose here
        net = lb.models.build(spec.net, num_outputs=data.num_outputs, input_shape=data.input_shape)
        places = list(net.named_modules())
        chosen = sorted(set().union(*(choose(places, layers) for layers in spec.options.get("layers", ()))))
        remove_dropout_before(net, chosen)
        if activation := spec.options.get("activation"):
            net = activate(net, chosen, ACTIVATIONS[activation])
        if any(isinstance(module, DROPOUTS) for module in net.modules()):
            net = lb.convert(net, lb.MCDropout(), likelihood=lb.Categorical())
        if spec.method is not None:
            net = lb.convert(net, spec.method, where=chosen, likelihood=lb.Categorical())
        return net


def remove_dropout_before(net: nn.Module, layers: list[str]) -> None:
    """Remove dropout layers directly before the named layers, in the order of registration."""
    before = ""
    for path, module in list(net.named_modules()):
        if isinstance(module, DROPOUTS):
            before = path
        elif isinstance(module, LINEAR_MAPS):
            if before and path in layers:
                net.set_submodule(before, nn.Identity())
            before = ""


class Watch(lb.phase.Transition):
    """Writes the measurements of every epoch to disk; accuracies have noise on activations, as in the paper."""

    def __init__(self, spec: TrainingSpec, folder: Path, data: DataSet, run: Run) -> None:
        """Read the epochs of a training that resumes."""
        rows, trained = spec.options.get("curvature_rows", 0), Trained(nn.Identity(), data, [])
        curvature = trained.train(rows) if rows else None
        every = max(1, spec.recipe.epochs // QUICK_LOOKS) if run.budget == "quick" else 1
        test, threshold = trained.test(WATCHED[run.budget]), THRESHOLD / kappa_factor(data, rows)
        super().__init__(test, curvature=curvature, threshold=threshold, every=every, noise="activation")
        self.path = folder / ROWS_FILE
        if self.path.is_file() and run.keeps(folder):
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))

    @override
    def __call__(self, state: Any) -> None:
        self.rows = [row for row in self.rows if row["epoch"] < state.epoch]
        seen = len(self.rows)
        super().__call__(state)
        if len(self.rows) > seen:
            write_text(json.dumps(self.rows) + "\n", self.path)


def kappa_factor(data: DataSet, rows: int) -> float:
    """Return the factor from kappa over some training rows to kappa over all."""
    whole = len(data.train)
    return whole / (min(rows, whole) or whole)


def log_alphas(model: nn.Module) -> dict[str, float | None]:
    """Return the mean log alpha of every variance layer, by "log_alpha PATH"; None if it is infinite (no means)."""
    layers = ((path, getattr(layer, "log_alpha", None)) for path, layer in lb.stochastic_layers(model))
    means = {f"log_alpha {path}": float(values.detach().mean()) for path, values in layers if values is not None}
    return {path: value if math.isfinite(value) else None for path, value in means.items()}
