"""What ensembles cost in parameters and how large they are (Chang et al., 2019, Table 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from leanbayes.core.conversion import convert
from leanbayes.core.summary import summary
from leanbayes.methods._base import Method
from leanbayes.methods.dropconnect import DropConnect
from leanbayes.methods.ensemble import DeepEnsemble
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.patch import ModelPatch
from leanbayes.models import build
from leanbayes_papers.patch_samples import PAPER
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite

K = 5
METHODS: dict[str, Method] = {
    "EMP": ModelPatch(components=K),
    "ECMP": ModelPatch(components=K, crossed=True),
    "Dropout": MCDropout(),
    "DropConnect": DropConnect(),
    "Explicit Ensemble": DeepEnsemble(components=K),
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: build("mlp-100-100", num_outputs=100, input_shape=(1,)),
    "ResNet-18": lambda: build("resnet18", num_outputs=1000, input_shape=(3, 224, 224)),
    "PyramidNet": lambda: build("pyramidnet-110-270", num_outputs=100, input_shape=(3, 32, 32)),
}
PRINTED = {
    "EMP": (1_129_100, 13_779_912, 28_825_299),
    "ECMP": (1_129_100, 13_779_912, 28_825_299),
    "Dropout": (1_009_900, 11_689_512, 28_511_307),
    "DropConnect": (1_009_900, 11_689_512, 28_511_307),
    "Explicit Ensemble": (5_049_500, 58_447_560, 142_556_535),
}


def patch_overhead(setting: Setting) -> Suite:
    """Parameters and effective ensemble sizes of five ensembles on three networks (Table 3)."""
    study = Study(
        name="overhead",
        title="Patching paper, Table 3: parameters and effective ensemble sizes, K = 5, norms and output layer patched",
        claim="EMP and ECMP form huge ensembles for almost no parameters.",
        measure=count,
        draw=draw_counts,
        say=say_counts,
    )
    return Suite(paper=PAPER, tables=(), studies=(study,))


def count(case: Case) -> Numbers:
    """Count parameters and networks, ours beside the paper's."""
    return {
        method_name: {
            net_name: counted(make, method) | {"paper": PRINTED[method_name][position]}
            for position, (net_name, make) in enumerate(NETWORKS.items())
        }
        for method_name, method in METHODS.items()
    }


def counted(make: Callable[[], nn.Module], method: Method) -> Numbers:
    """Return the parameters of a converted network, and the decimal logarithm of the number of its draws."""
    with torch.random.fork_rng(devices=[]):
        said = summary(convert(make(), method, copy=False))
    return {
        "parameters": said.parameters + said.extra_parameters,
        "log10_networks": said.log_networks / math.log(10),
    }


def say_counts(numbers: Numbers) -> list[str]:
    """Tell parameters, whether they are the printed ones, and the size of the ensemble."""
    return [
        f"{method}, {net}: {row['parameters']:,} parameters ({_compared(row)}), "
        f"10^{row['log10_networks']:,.1f} networks"
        for method, nets in numbers.items()
        for net, row in nets.items()
    ]


def draw_counts(numbers: Numbers, path: Path) -> None:
    """Draw the size of the ensemble over its parameters, a panel for each network."""
    figure = new_figure(9, 3)
    for axis, net in zip(figure.subplots(1, len(NETWORKS)), NETWORKS, strict=True):
        for method, nets in numbers.items():
            axis.plot(nets[net]["parameters"] / 1e6, nets[net]["log10_networks"], "o", label=method)
        axis.set(title=net, xscale="log", yscale="log", xlabel="parameters, millions")
    figure.axes[0].set_ylabel("decimal digits of the number of networks")
    figure.axes[0].legend(fontsize=7)
    save_figure(figure, path)


def _compared(row: Numbers) -> str:
    return "as printed" if row["parameters"] == row["paper"] else f"paper: {row['paper']:,}"
