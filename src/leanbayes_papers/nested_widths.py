"""One network at every width: Figures 1 and 10 of the nested paper, with networks trained for each width beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.predictor import predict
from leanbayes.metrics import ece
from leanbayes.recalibrate import Temperature
from leanbayes_papers.nested_settings import (
    average,
    DATA,
    fixed,
    FOREIGN,
    individual,
    Judge,
    ours,
    PAPER,
    SAMPLES,
    trainee,
    WIDTHS,
)
from leanbayes_papers.nested_times import times
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.trained import train

FIGURES = {"accuracy": "accuracy, %", "ece": "ECE", "aupr": "AUPR of foreign inputs"}
STYLES = {"BN3": "o-", "DT-BN3": "o--", "FN3": "s-", "FN3-TS": "s--", "IBNN": "^-"}


def nested_widths(setting: Setting) -> Suite:
    """Accuracy, calibration and foreign inputs at every width: BN3, FN3, with temperatures, and IBNN (Figure 10)."""
    studies = [one(setting, data) for data in DATA[setting.budget] for one in (study, times)]
    return Suite(paper=PAPER, tables=(), studies=tuple(studies))


def study(setting: Setting, data: str) -> Study:
    """Return the study of one data set."""
    return Study(
        name=f"widths-{data}",
        title=f"Nested paper, Figures 1 and 10: one network at every width on {data}",
        claim="BN3 improves or stays with width, is better than FN3 in all measures, and is about as good as networks "
        "trained for each width; its means alone (DT-BN3) are similar. Paper, VGG11 on CIFAR-10 at full width: 92.6 %, "
        "ECE 0.07, AUPR 0.97.",
        data=(data,),
        measure=partial(measure, setting=setting, data=data),
        draw=draw,
        say=say,
    )


def measure(case: Case, *, setting: Setting, data: str) -> Numbers:
    """Train BN3, FN3, a plain network and one for each width; judge all of them."""
    bn3 = trainee(setting, data, f"{data}-bn3", ours(data))
    fn3 = trainee(setting, data, f"{data}-fn3", fixed(data))
    plain = trainee(setting, data, f"{data}-plain", None)
    rows: dict[str, list[Any]] = {}
    for seed in case.seeds:
        trained = {name: train(one, case, seed) for name, one in (("BN3", bn3), ("FN3", fn3), ("plain", plain))}
        judge = Judge(trained["BN3"], data, setting.root)
        rows.setdefault("plain", []).append({"1": judge(trained["plain"].model)})
        models = {name: trained[name].model for name in ("BN3", "FN3")}
        for name, curve in curves(models, judge).items():
            rows.setdefault(name, []).append(curve)
        rows.setdefault("IBNN", []).append(
            {f"{w:g}": judge(train(individual(setting, data, w), case, seed).model) for w in WIDTHS}
        )
        rows.setdefault("BN3-MC", []).append({"any": judge(models["BN3"])})
        importance = importances(models["BN3"])
    return {
        "foreign": FOREIGN[data],
        "methods": {name: {w: average([run[w] for run in runs]) for w in runs[0]} for name, runs in rows.items()},
        "importance": importance,
    }


def curves(models: dict[str, nn.Module], judge: Judge) -> dict[str, dict[str, Numbers]]:
    """Judge the nested networks at every width: draws, means, and with a temperature for each width."""
    found: dict[str, dict[str, Numbers]] = {name: {} for name in ("BN3", "DT-BN3", "FN3", "FN3-TS")}
    for width in WIDTHS:
        key = f"{width:g}"
        found["BN3"][key] = judge(judge.narrowed(models["BN3"], width))
        found["DT-BN3"][key] = judge(judge.narrowed(models["BN3"], width, means=True))
        small = judge.narrowed(models["FN3"], width)
        found["FN3"][key] = judge(small)
        found["FN3-TS"][key] = found["FN3"][key] | tempered(small, judge)
    return found


def tempered(model: nn.Module, judge: Judge) -> dict[str, float]:
    """Return ECE and NLL after temperature scaling; each half of the test set has the temperature of the other."""
    x, y = judge.test
    prediction = predict(model, x, samples=SAMPLES).to("cpu")
    halves = [torch.arange(len(y)) % 2 == k for k in range(2)]
    parts = [
        Temperature(scale="mean").fit(_rows(prediction, other), y[other])(_rows(prediction, mine))
        for mine, other in (halves, halves[::-1])
    ]
    p, targets = torch.cat([part.mean for part in parts]), torch.cat([y[half] for half in halves])
    nll = torch.cat([-part.log_prob(y[half]) for part, half in zip(parts, halves, strict=True)])
    return {"ece": float(ece(p, targets)), "nll": float(nll.mean())}


def _rows(prediction: Any, chosen: torch.Tensor) -> Any:
    """Return some rows of a prediction."""
    names = ("mean", "total", "aleatoric", "epistemic")
    return replace(prediction, samples=None, **{name: getattr(prediction, name)[chosen] for name in names})


def importances(model: nn.Module) -> dict[str, list[float]]:
    """Return the learned probabilities of the last group kept, by layer (Figure 1)."""
    return dict(_importances(model))


def _importances(model: nn.Module) -> Iterator[tuple[str, list[float]]]:
    for path, layer in stochastic_layers(model):
        if getattr(layer, "leads", False):
            yield path, layer.posterior.order.log_tails.detach().exp().cpu().tolist()


def say(numbers: Numbers) -> list[str]:
    """Tell every method at every width."""
    lines = [f"Foreign inputs: {numbers['foreign']}. Accuracy, ECE and AUPR at widths {', '.join(map(str, WIDTHS))}:"]
    for name, row in numbers["methods"].items():
        told = "; ".join(f"{w}: {f['accuracy']:.1f} %, {f['ece']:.3f}, {f['aupr']:.3f}" for w, f in row.items())
        lines.append(f"{name}: {told}")
    sizes = numbers["methods"]["BN3"]
    whole = sizes["1"]["parameters"]
    told = ", ".join(
        f"{w}: {f['parameters']:,.0f} ({100 * f['parameters'] / whole:.1f} % of all) and {f['multiply_adds']:,.0f}"
        for w, f in sizes.items()
    )
    return [*lines, f"Weights and multiply-adds of BN3: {told}."]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw the figures over width, and the learned tails of the first and the last ordered layer."""
    figure = new_figure(14, 3.3)
    axes = figure.subplots(1, 4)
    for axis, (key, label) in zip(axes, FIGURES.items(), strict=False):
        for name, style in STYLES.items():
            row = numbers["methods"][name]
            axis.plot([float(w) for w in row], [f[key] for f in row.values()], style, ms=4, label=name)
        axis.axhline(numbers["methods"]["plain"]["1"][key], color="grey", lw=1, label="plain")
        axis.set(xlabel="width", ylabel=label)
    axes[0].legend(fontsize=7)
    learned = numbers["importance"]
    for layer in dict.fromkeys((next(iter(learned)), next(reversed(learned)))):
        axes[3].plot(range(1, len(learned[layer]) + 1), learned[layer], ".-", label=layer)
    axes[3].set(xlabel="group", ylabel="probability of being the last kept")
    axes[3].legend(fontsize=7)
    save_figure(figure, path)
