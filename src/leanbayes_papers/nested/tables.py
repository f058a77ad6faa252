"""Tables 1 and 2 of the nested paper: few parameters (the smallest width, pruning, random widths), and times.

The paper's shares are of groups for BN3 and of weights for SVB; ours are of weights. ECE and AUPR do not compare with
ours: the authors average the ECE of batches of 64 rows, and their SVHN has 73,257 rows to 10,000 of CIFAR-10.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.evaluation.cost import measure_cost
from leanbayes.phase import Sparse
from leanbayes_papers.harness import plot_curves, plot_rows, Record, Run, Study, Suite, Table
from leanbayes_papers.nested import PAPER
from leanbayes_papers.nested.networks import bn3, DATA, Evaluation, fn3, individual, SAMPLES, spec

DRAWS = 100
LIMITED = Table.of("nested", "limited")


def nested_limited(run: Run) -> Suite:
    """Performance with few parameters: the smallest BN3, sparse variational dropout, random widths (Table 1)."""
    plot = partial(plot_curves, x="used", columns=LIMITED.columns[:1], line=False)
    studies = (
        Study.of("nested", "limited", {"data": data}, measure=measure, tables=(LIMITED,), plot=plot)
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


# ------------------------------------------------------------------------------------ Table 2: times

REPEATS = 3
TEST_ROWS = {"cuda": 4096, "cpu": 256}  # rows of a prediction: enough to keep a device busy


def _range(name: str, records: Sequence[Record]) -> str:
    values = sorted(record[name] for record in records)
    return f"{values[0]:.2f} to {values[-1]:.2f}"


TIMES = Table.of("nested", "times", {name: partial(_range, name) for name in ("train", "test")})


def times(data: str) -> Study:
    """Return the study of one data set."""
    columns = tuple(replace(column, text=None) for column in TIMES.columns)
    plot = partial(plot_rows, table=Table(by=("method",), columns=columns))
    return Study.of("nested", "times", {"data": data}, measure=measure_times, tables=(TIMES,), plot=plot)


def measure_times(run: Run, *, data: str) -> list[Record]:
    """Measure every network against the plain one, each several times, at full width; weights do not matter."""
    plan, device = spec(run, data, "plain", None), run.torch_device
    rows = plan.load(plan.source)
    plain = plan.make(rows, 0).to(device)
    models = {
        "BN3": spec(run, data, "bn3", bn3(data)).make(rows, 0),
        "IBNN": individual(run, data, 1.0).make(rows, 0),
        "FN3": spec(run, data, "fn3", fn3(data)).make(rows, 0),
    }
    x, y = rows.prepared(rows.train)
    count = min(len(x), TEST_ROWS[device.type])
    x, y = x[:count].to(device), y[:count].to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=plan.recipe.precision == "bf16-mixed"):
        return [
            {"method": name, "repeat": repeat, "device": device.type, "rows": count}
            | ratios(model.to(device), plain, x, y, plan.recipe.batch_size)
            for name, model in models.items()
            for repeat in range(REPEATS)
        ]


def ratios(model: nn.Module, plain: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> dict[str, float]:
    """Return the time of a training step and of a prediction, in units of the plain network's."""
    cost = measure_cost(model, plain, x, y, lb.Categorical(), samples=SAMPLES, batch_size=batch_size)
    return {"train": cost.train_step_ratio, "test": cost.predict_ratio * cost.passes}
