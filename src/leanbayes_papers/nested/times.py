"""Table 2 of the nested paper: time of nested networks, as ratios to the plain network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.evaluation.cost import measure_cost
from leanbayes_papers.harness import plot_rows, Record, Run, Study, Table
from leanbayes_papers.nested.networks import bn3, fn3, individual, SAMPLES, spec

REPEATS = 3
TEST_ROWS = {"cuda": 4096, "cpu": 256}  # rows of a prediction: enough to keep a device busy


def _range(name: str, records: Sequence[Record]) -> str:
    values = sorted(record[name] for record in records)
    return f"{values[0]:.2f} to {values[-1]:.2f}"


TABLE = Table.of("nested", "times", {name: partial(_range, name) for name in ("train", "test")})


def times(data: str) -> Study:
    """Return the study of one data set."""
    columns = tuple(replace(column, text=None) for column in TABLE.columns)
    plot = partial(plot_rows, table=Table(by=("method",), columns=columns))
    return Study.of("nested", "times", {"data": data}, measure=measure, tables=(TABLE,), plot=plot)


def measure(run: Run, *, data: str) -> list[Record]:
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
