"""The phase transition of variance networks: see it happen, tell which weights need sampling, drop the rest."""

from leanbayes.phase.criterion import curvature as curvature
from leanbayes.phase.criterion import kappa as kappa
from leanbayes.phase.diagnostics import permute_scales as permute_scales
from leanbayes.phase.diagnostics import zero_means as zero_means
from leanbayes.phase.procedures import accuracies as accuracies
from leanbayes.phase.procedures import infer as infer
from leanbayes.phase.sparse import prune as prune
from leanbayes.phase.sparse import Sparse as Sparse
from leanbayes.phase.sparse import sparsify as sparsify
from leanbayes.phase.transition import Transition as Transition

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
