"""The phase transition of variance networks: record it, find the weights that need sampling, drop the others."""

from leanbayes.phase.ablation import permute_scales, prune, Sparse, sparsify, zero_means
from leanbayes.phase.criterion import curvature, kappa
from leanbayes.phase.transition import accuracies, infer, Transition

__all__ = [
    "Sparse",
    "Transition",
    "accuracies",
    "curvature",
    "infer",
    "kappa",
    "permute_scales",
    "prune",
    "sparsify",
    "zero_means",
]
