"""Figure 10a of the nested paper in its own form: VGG11, trained 1.5 times as wide, and cut to two thirds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from leanbayes_papers.harness import Run, Study, Suite
from leanbayes_papers.nested import networks as nets
from leanbayes_papers.nested import PAPER
from leanbayes_papers.nested.widths import measure, plot, TABLE, WIDTHS

FULL = 2 / 3  # of all that is trained
PARTS = (0.09375, *WIDTHS, 1.5)  # of the full network: 2 groups of 32 are the least, 1.5 is all that is trained


def nested_vgg11(run: Run) -> Suite:
    """The paper's VGG11, 1.5 times as wide, cut to two thirds, with three distributions of the width (Figure 10a)."""
    data = run.pick(quick="digits", short="cifar10", full="cifar10")
    methods = {
        "BN3": nets.bn3(data),
        "BN3, uniform prior": nets.bn3(data, prior="uniform"),
        "BN3, uniform tails": nets.bn3(data, tail="categorical"),
        "FN3": nets.fn3(data),
    }
    specs = {
        name: nets.spec(run, data, name.lower().replace(", ", "-").replace(" ", "-"), method, wide=True)
        for name, method in methods.items()
    }
    plain = nets.spec(run, data, "plain", None, wide=True)
    specs["plain"] = replace(plain, net=plain.net.removesuffix("-w1.5"))
    specs |= {f"IBNN {width:g}": nets.individual(run, data, width, share=FULL) for width in WIDTHS}
    words, measured = {"data": data, "ood": nets.OOD[data]}, partial(measure, specs=specs, widths=PARTS, share=FULL)
    study = Study.of("nested", "vgg11", words, measure=measured, tables=(TABLE,), plot=plot)
    return Suite(paper=PAPER, studies=(study,))
