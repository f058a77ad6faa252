"""Few parameters: Table 1 of the nested paper, the smallest width beside pruning and beside random widths."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from torch import nn

from leanbayes.core.plain import mean
from leanbayes.methods.nested.config import NestedDropout
from leanbayes.methods.variance import VarianceLayers
from leanbayes.phase import prune, Sparse
from leanbayes.slim import usage
from leanbayes_papers.nested_settings import average, DATA, Judge, ours, PAPER, trainee
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.trained import train

PRINTED = {
    "smallest BN3": (83.5, 0.10, 0.94, "6.2"),
    "SVB": (82.9, 0.17, 0.94, "5.7"),
    "BN3-MC": (89.4, 0.08, 0.97, "46 ± 27"),
    "BN3": (92.6, 0.07, 0.97, "100"),
}
"""Accuracy in percent, ECE, AUPR of SVHN, and share that is used in percent, of VGG11 on CIFAR-10.

Of BN3 the share is one of groups, of SVB one of weights. ECE and AUPR do not compare with ours: the authors average
the ECE of batches of 64 rows, and their SVHN has 73,257 rows to 10,000 of CIFAR-10.
"""

DRAWS = 100


def nested_limited(setting: Setting) -> Suite:
    """Performance with few parameters: the smallest BN3, sparse variational dropout, random widths (Table 1)."""
    return Suite(paper=PAPER, tables=(), studies=tuple(study(setting, data) for data in DATA[setting.budget]))


def study(setting: Setting, data: str) -> Study:
    """Return the study of one data set."""
    return Study(
        name=f"limited-{data}",
        title=f"Nested paper, Table 1: few parameters on {data}",
        claim="The smallest BN3 is better than sparse variational dropout (SVB) of about its size; averaging over "
        "random widths (BN3-MC) is slightly worse than full width and uses fewer weights.",
        data=(data,),
        measure=partial(measure, setting=setting, data=data),
        draw=draw,
        say=say,
    )


def measure(case: Case, *, setting: Setting, data: str) -> Numbers:
    """Train BN3 and a sparse network with every seed, and judge the four rows of the table."""
    bn3 = trainee(setting, data, f"{data}-bn3", ours(data))
    sparse = trainee(setting, data, f"{data}-svb", VarianceLayers(parameterization="additive", init_log_alpha=-8.0))
    rows: dict[str, list[Numbers]] = {name: [] for name in PRINTED}
    for seed in case.seeds:
        wide, pruned = train(bn3, case, seed), prune(train(sparse, case, seed).model)
        judge = Judge(wide, data, setting.root)
        method = ours(data)
        smallest = judge.narrowed(wide.model, _smallest(method))
        shares = [100 * usage(wide.model, seed=seed, index=k) for k in range(DRAWS)]
        full = judge.narrowed(wide.model, 1.0)
        rows["smallest BN3"].append(judge(smallest) | {"used": 100 * _weights(smallest) / _weights(full)})
        rows["SVB"].append(judge(pruned.model) | {"used": 100 * _weights_left(pruned) / _weights(pruned.model)})
        rows["BN3-MC"].append(
            judge(wide.model) | {"used": statistics.fmean(shares), "spread": statistics.stdev(shares)}
        )
        rows["BN3"].append(judge(full) | {"used": 100.0})
    return {name: {**average(runs), "paper": PRINTED[name]} for name, runs in rows.items()}


def _smallest(method: NestedDropout) -> float:
    """Return the share of the groups that are always on."""
    return method.always_on / method.groups


def _weights(model: nn.Module) -> int:
    return sum(p.numel() for p in mean(model).parameters())


def _weights_left(pruned: Sparse) -> int:
    """Return what pruning leaves: of noisy layers the kept weights; norms, biases and the last layer are whole."""
    return pruned.kept + _weights(pruned.model) - pruned.total


def say(numbers: Numbers) -> list[str]:
    """Tell the four rows, with what of the paper's compares: accuracy, and the share of the groups or weights."""
    lines = []
    for name, row in numbers.items():
        accuracy, _, _, used = row["paper"]
        spread = f" ± {row['spread']:.0f}" if "spread" in row else ""
        unit = "weights" if name == "SVB" else "groups"
        lines.append(
            f"{name}: accuracy {row['accuracy']:.1f} % (paper: {accuracy}), ECE {row['ece']:.3f}, AUPR "
            f"{row['aupr']:.3f}, weights used {row['used']:.1f}{spread} % (paper: {used} % of the {unit})"
        )
    return lines


def draw(numbers: Numbers, path: Path) -> None:
    """Draw accuracy over the weights that are used."""
    figure = new_figure(5, 3.3)
    axis = figure.subplots()
    for name, row in numbers.items():
        axis.plot(row["used"], row["accuracy"], "o", label=name)
    axis.set(xlabel="weights used, %", ylabel="accuracy, %")
    axis.legend(fontsize=7)
    save_figure(figure, path)
