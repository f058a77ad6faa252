"""leanbayes: parameter-efficient Bayesian deep learning for PyTorch, with its gain and its price measured.

`__all__` is the public page. All of it is imported on first use (PEP 562), so that the command line can print its help
without torch.
"""

from __future__ import annotations

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
    from leanbayes import data as data
    from leanbayes import generative as generative
    from leanbayes import layers as layers
    from leanbayes import metrics as metrics
    from leanbayes import models as models
    from leanbayes import phase as phase
    from leanbayes import recalibrate as recalibrate
    from leanbayes import shift as shift
    from leanbayes import slim as slim
    from leanbayes.core.checkpoint import load as load
    from leanbayes.core.checkpoint import save as save
    from leanbayes.core.conversion import convert as convert
    from leanbayes.core.conversion import stochastic_layers as stochastic_layers
    from leanbayes.core.objective import parameter_groups as parameter_groups
    from leanbayes.core.plain import draw as draw
    from leanbayes.core.plain import mean as mean
    from leanbayes.core.prediction import Prediction as Prediction
    from leanbayes.core.predictor import Predictor as Predictor
    from leanbayes.core.public import elbo as elbo
    from leanbayes.core.public import kl as kl
    from leanbayes.core.public import predict as predict
    from leanbayes.core.summary import summary as summary
    from leanbayes.distributions.likelihoods import Bernoulli as Bernoulli
    from leanbayes.distributions.likelihoods import Categorical as Categorical
    from leanbayes.distributions.likelihoods import Gaussian as Gaussian
    from leanbayes.evaluation.evaluate import evaluate as evaluate
    from leanbayes.methods.dropconnect import DropConnect as DropConnect
    from leanbayes.methods.ensemble import DeepEnsemble as DeepEnsemble
    from leanbayes.methods.ensemble import Ensemble as Ensemble
    from leanbayes.methods.implicit import ImplicitNodes as ImplicitNodes
    from leanbayes.methods.laplace import LastLayerLaplace as LastLayerLaplace
    from leanbayes.methods.mc_dropout import MCDropout as MCDropout
    from leanbayes.methods.mean_field import MeanField as MeanField
    from leanbayes.methods.nested import NestedDropout as NestedDropout
    from leanbayes.methods.patch import ModelPatch as ModelPatch
    from leanbayes.methods.rank1 import BatchEnsemble as BatchEnsemble
    from leanbayes.methods.rank1 import Rank1 as Rank1
    from leanbayes.methods.swag import SWAG as SWAG
    from leanbayes.methods.variance import VarianceLayers as VarianceLayers
    from leanbayes.runtime.norm import update_norm as update_norm
    from leanbayes.runtime.passes import draws as draws
    from leanbayes.training.distillation import distill as distill
    from leanbayes.training.fit import fit as fit
    from leanbayes.training.recipe import Recipe as Recipe

__version__ = "0.1.0"

_TOPICS = ("data", "generative", "layers", "metrics", "models", "phase", "recalibrate", "shift", "slim")
_INNER = ("core", "distributions", "evaluation", "methods", "runtime", "training")
_NAMES = {
    "leanbayes.core.checkpoint": ("load", "save"),
    "leanbayes.core.conversion": ("convert", "stochastic_layers"),
    "leanbayes.core.objective": ("parameter_groups",),
    "leanbayes.core.plain": ("draw", "mean"),
    "leanbayes.core.prediction": ("Prediction",),
    "leanbayes.core.predictor": ("Predictor",),
    "leanbayes.core.public": ("elbo", "kl", "predict"),
    "leanbayes.core.summary": ("summary",),
    "leanbayes.distributions.likelihoods": ("Bernoulli", "Categorical", "Gaussian"),
    "leanbayes.evaluation.evaluate": ("evaluate",),
    "leanbayes.methods.dropconnect": ("DropConnect",),
    "leanbayes.methods.ensemble": ("DeepEnsemble", "Ensemble"),
    "leanbayes.methods.implicit": ("ImplicitNodes",),
    "leanbayes.methods.laplace": ("LastLayerLaplace",),
    "leanbayes.methods.mc_dropout": ("MCDropout",),
    "leanbayes.methods.mean_field": ("MeanField",),
    "leanbayes.methods.nested": ("NestedDropout",),
    "leanbayes.methods.patch": ("ModelPatch",),
    "leanbayes.methods.rank1": ("BatchEnsemble", "Rank1"),
    "leanbayes.methods.swag": ("SWAG",),
    "leanbayes.methods.variance": ("VarianceLayers",),
    "leanbayes.runtime.norm": ("update_norm",),
    "leanbayes.runtime.passes": ("draws",),
    "leanbayes.training.distillation": ("distill",),
    "leanbayes.training.fit": ("fit",),
    "leanbayes.training.recipe": ("Recipe",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "SWAG",
    "BatchEnsemble",
    "Bernoulli",
    "Categorical",
    "DeepEnsemble",
    "DropConnect",
    "Ensemble",
    "Gaussian",
    "ImplicitNodes",
    "LastLayerLaplace",
    "MCDropout",
    "MeanField",
    "ModelPatch",
    "NestedDropout",
    "Prediction",
    "Predictor",
    "Rank1",
    "Recipe",
    "VarianceLayers",
    "convert",
    "data",
    "distill",
    "draw",
    "draws",
    "elbo",
    "evaluate",
    "fit",
    "generative",
    "kl",
    "layers",
    "load",
    "mean",
    "metrics",
    "models",
    "parameter_groups",
    "phase",
    "predict",
    "recalibrate",
    "save",
    "shift",
    "slim",
    "stochastic_layers",
    "summary",
    "update_norm",
]


def __getattr__(name: str) -> Any:
    """Import a name of the public page, or an inner package, when it is first asked for."""
    if name in _HOME:
        found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return found
    if name in _TOPICS or name in _INNER:
        return importlib.import_module(f"leanbayes.{name}")
    raise AttributeError(f"module 'leanbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public page; inner modules are importable, but not offered."""
    return [*__all__, "__version__"]
