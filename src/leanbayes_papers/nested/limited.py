"""Table 1 of the nested paper: few parameters, the smallest width next to pruning and to random widths.

The paper's shares are of groups for BN3 and of weights for SVB; ours are of weights. ECE and AUPR do not compare with
ours: the authors average the ECE of batches of 64 rows, and their SVHN has 73,257 rows to 10,000 of CIFAR-10.
"""

from __future__ import annotations

import statistics
from functools import partial

from torch import nn

import leanbayes as lb
from leanbayes.phase import Sparse
from leanbayes_papers.harness import plot_curves, Record, Run, Study, Suite, Table
from leanbayes_papers.nested import PAPER
from leanbayes_papers.nested.networks import bn3, DATA, Evaluation, spec

DRAWS = 100
TABLE = Table.of("nested", "limited")


def nested_limited(run: Run) -> Suite:
    """Performance with few parameters: the smallest BN3, sparse variational dropout, random widths (Table 1)."""
    plot = partial(plot_curves, x="used", columns=TABLE.columns[:1], line=False)
    studies = (
        Study.of("nested", "limited", {"data": data}, measure=measure, tables=(TABLE,), plot=plot)
        for data in DATA[run.budget]
    )
    return Suite(paper=PAPER, studies=tuple(studies))


def measure(run: Run, *, data: str) -> list[Record]:
    """Train BN3 and a sparse network with every seed, and evaluate the four rows of the table."""
    method = bn3(data)
    sparse = lb.VarianceLayers(parameterization="additive", init_log_alpha=-8.0)
    records: list[Record] = []
    for seed in run.seeds:
        wide = run.train(spec(run, data, "bn3", method), seed)
        pruned = lb.phase.prune(run.train(spec(run, data, "svb", sparse), seed).model)
        evaluate = Evaluation(wide, data, run)
        smallest = evaluate.narrowed(wide.model, method.always_on / method.groups)
        shares = [100 * lb.slim.usage(wide.model, seed=seed, index=k) for k in range(DRAWS)]
        full = evaluate.narrowed(wide.model, 1.0)
        found = {
            "smallest BN3": evaluate(smallest) | {"used": 100 * weights(smallest) / weights(full)},
            "SVB": evaluate(pruned.model) | {"used": 100 * weights_left(pruned) / weights(pruned.model)},
            "BN3-MC": evaluate(wide.model) | {"used": statistics.fmean(shares), "used_std": statistics.stdev(shares)},
            "BN3": evaluate(full) | {"used": 100.0},
        }
        records += [{"method": name, "seed": seed} | row for name, row in found.items()]
    return records


def weights(model: nn.Module) -> int:
    """Return the number of weights of a network's mean."""
    return sum(p.numel() for p in lb.mean(model).parameters())


def weights_left(pruned: Sparse) -> int:
    """Return the weights after pruning: the kept ones of noisy layers, and all norms, biases and the last layer."""
    return pruned.kept + weights(pruned.model) - pruned.total
