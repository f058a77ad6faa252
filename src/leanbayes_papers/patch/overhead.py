"""Table 3 of the patching paper: parameters of ensembles, and the number of networks in them."""

from __future__ import annotations

import math
from functools import partial

import torch

import leanbayes as lb
from leanbayes.methods._base import Method
from leanbayes_papers.harness import plot_curves, printed, Record, Run, Study, Suite, Table
from leanbayes_papers.patch import PAPER

K = 5
METHODS: dict[str, Method] = {
    "EMP": lb.ModelPatch(components=K),
    "ECMP": lb.ModelPatch(components=K, crossed=True),
    "Dropout": lb.MCDropout(),
    "DropConnect": lb.DropConnect(),
    "Explicit Ensemble": lb.DeepEnsemble(components=K),
}
NETWORKS: dict[str, tuple[str, int, tuple[int, ...]]] = {  # name, outputs, input shape
    "MLP": ("mlp-100-100", 100, (1,)),
    "ResNet-18": ("resnet18", 1000, (3, 224, 224)),
    "PyramidNet": ("pyramidnet-110-270", 100, (3, 32, 32)),
}
PRINTED = {(m, n): {"parameters": p} for m, row in printed("patch", "table3").items() for n, p in row.items()}
TABLE = Table.of("patch", "overhead", paper=PRINTED)


def patch_overhead(run: Run) -> Suite:
    """Parameters and effective ensemble sizes of five ensembles on three networks (Table 3)."""
    plot = partial(plot_curves, x="parameters", by=("method", "net"), columns=TABLE.columns[1:], log=True, line=False)
    return Suite(paper=PAPER, studies=(Study.of("patch", "overhead", measure=measure, tables=(TABLE,), plot=plot),))


def measure(run: Run) -> list[Record]:
    """Count parameters and networks of every method on every network."""
    return [{"method": name, "net": net} | counted(net, method) for name, method in METHODS.items() for net in NETWORKS]


def counted(net: str, method: Method) -> Record:
    """Return the parameters of a converted network, and the decimal logarithm of the number of its draws."""
    name, outputs, shape = NETWORKS[net]
    with torch.random.fork_rng(devices=[]):
        made = lb.models.build(name, num_outputs=outputs, input_shape=shape)
        found = lb.summary(lb.convert(made, method, copy=False))
    parameters = found.parameters + found.extra_parameters
    return {"parameters": parameters, "log10_networks": found.log_networks / math.log(10)}
