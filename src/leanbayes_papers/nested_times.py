"""What nested networks cost in time: Table 2 of the nested paper, as ratios to the plain network."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from leanbayes.compare.experiment import pick_device
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.evaluation.cost import measure_cost
from leanbayes_papers.nested_settings import fixed, individual, ours, SAMPLES, trainee
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import loaded

REPEATS = 3
TEST_ROWS = {"cuda": 4096, "cpu": 256}
"""Rows of a prediction: enough to keep a device busy."""

PRINTED = {"BN3": (14.9, None), "DT-BN3": (None, 1.78), "IBNN": (7.5, 1.68), "FN3": (5.6, 1.82)}
"""Hours of training (of one width, for IBNN) and seconds of a test, on VGG11."""


def times(setting: Setting, data: str) -> Study:
    """Return the study of one data set."""
    return Study(
        name=f"times-{data}",
        title=f"Nested paper, Table 2: time of training and test on {data}",
        claim="BN3 trains twice as long as one Bayesian network of a fixed width, and far less than one for each "
        "width; by its means alone it predicts as fast.",
        data=(data,),
        measure=partial(measure, setting=setting, data=data),
        draw=draw,
        say=say,
    )


def measure(case: Case, *, setting: Setting, data: str) -> Numbers:
    """Measure every network against the plain one, each several times, at full width; weights do not matter."""
    plan = trainee(setting, data, "plain", None)
    rows, device = loaded(plan.source), pick_device(case.device)
    plain = plan.make(rows, 0).to(device)
    bn3 = trainee(setting, data, "bn3", ours(data)).make(rows, 0)
    fn3 = trainee(setting, data, "fn3", fixed(data)).make(rows, 0)
    models: dict[str, nn.Module] = {
        "BN3": bn3,
        "IBNN": individual(setting, data, 1.0).make(rows, 0),
        "FN3": fn3,
    }
    x, y = rows.prepared(rows.train)
    count = min(len(x), TEST_ROWS[device.type])
    x, y = x[:count].to(device), y[:count].to(device)
    found: dict[str, list[dict[str, float]]] = {}
    with torch.autocast(device.type, torch.bfloat16, enabled=plan.recipe.precision == "bf16-mixed"):
        for name, model in models.items():
            found[name] = [ratios(model.to(device), plain, x, y, plan.recipe.batch_size) for _ in range(REPEATS)]
    return {"device": device.type, "samples": SAMPLES, "rows": count, "ratios": found}


def ratios(model: nn.Module, plain: nn.Module, x: torch.Tensor, y: torch.Tensor, batch_size: int) -> dict[str, float]:
    """Return the time of a training step and of a prediction, in units of the plain network's."""
    cost = measure_cost(model, plain, x, y, Categorical(), samples=SAMPLES, batch_size=batch_size)
    return {"train": cost.train_step_ratio, "test": cost.predict_ratio * cost.passes}


def say(numbers: Numbers) -> list[str]:
    """Tell all ratios, and the paper's."""
    rows = numbers["ratios"]
    lines = [
        f"On a {numbers['device']}: a training step, and a prediction of {numbers['rows']} rows, in units of the plain "
        f"network's; {REPEATS} repeats, smallest to largest:"
    ]
    for name, runs in rows.items():
        train, test = (sorted(run[key] for run in runs) for key in ("train", "test"))
        lines.append(
            f"{name}: training {train[0]:.2f} to {train[-1]:.2f}, test of {numbers['samples']} draws {test[0]:.2f} to "
            f"{test[-1]:.2f}"
        )
    lines.append("DT-BN3 is a plain network, of the plain network's price; it is not measured.")
    told = (f"{name} {hours} h" for name, (hours, _) in PRINTED.items() if hours is not None)
    tests = (f"{name} {seconds} s" for name, (_, seconds) in PRINTED.items() if seconds is not None)
    return [*lines, f"Paper: training {', '.join(told)} (IBNN for each width); test {', '.join(tests)}."]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw the ratios of all repeats."""
    figure = new_figure(7, 2.6)
    for axis, key in zip(figure.subplots(1, 2), ("train", "test"), strict=True):
        for place, (name, runs) in enumerate(numbers["ratios"].items()):
            axis.plot([run[key] for run in runs], [place] * len(runs), "o", label=name)
        axis.set(xlabel=f"{key}, plain = 1", yticks=range(len(numbers["ratios"])), yticklabels=list(numbers["ratios"]))
        axis.axvline(1, color="grey", lw=1)
    save_figure(figure, path)
