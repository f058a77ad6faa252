"""Figures 1 and 10 of the nested paper: one network at every width, next to networks trained for each width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import nn

import leanbayes as lb
from leanbayes_papers.harness import plot_curves, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.nested import networks as nets
from leanbayes_papers.nested import PAPER
from leanbayes_papers.nested.tables import times

WIDTHS = (0.125, 0.25, 0.5, 0.75, 1.0)
TABLE = Table.of("nested", "widths")


def nested_widths(run: Run) -> Suite:
    """Accuracy, calibration, out-of-distribution inputs by width: BN3, FN3, with temperatures, IBNN (Figure 10)."""
    studies: list[Study] = []
    for data in nets.DATA[run.budget]:
        specs = {
            name: nets.spec(run, data, name.lower(), method)
            for name, method in {"BN3": nets.bn3(data), "FN3": nets.fn3(data), "plain": None}.items()
        }
        specs |= {f"IBNN {width:g}": nets.individual(run, data, width) for width in WIDTHS}
        words, measured = {"data": data, "ood": nets.OOD[data]}, partial(measure, specs=specs, widths=WIDTHS)
        studies.append(Study.of("nested", "widths", words, measure=measured, tables=(TABLE,), plot=plot))
        studies.append(times(data))
    return Suite(paper=PAPER, studies=tuple(studies))


def measure(
    run: Run, *, data: str, specs: Mapping[str, TrainingSpec], widths: Sequence[float], share: float = 1.0
) -> list[Record]:
    """Train every network; evaluate nested ones at every width, in units of the `share` that is called full."""
    records: list[Record] = []
    for seed in run.seeds:
        alone = [name for name in specs if name.startswith("IBNN")]
        trained = {name: run.train(spec, seed) for name, spec in specs.items() if name not in alone}
        first = next(iter(trained.values())) if trained else run.train(specs[alone[0]], seed)
        evaluate = nets.Evaluation(first, data, run)
        nested = [name for name in specs if name.startswith(("BN3", "FN3"))]
        found = {("plain", "1"): evaluate(trained["plain"].model)} if "plain" in trained else {}
        for width in widths:
            for name in nested:
                small = partial(evaluate.narrowed, trained[name].model, width * share)
                found |= at_width(name, f"{width:g}", small, evaluate)
        for name in alone:
            found["IBNN", name.removeprefix("IBNN ")] = evaluate(run.train(specs[name], seed).model)
        found |= {(f"{n}-MC", "any"): evaluate(trained[n].model) for n in nested if n.startswith("BN3")}
        records += [{"method": name, "width": width, "seed": seed} | row for (name, width), row in found.items()]
    layers = lb.stochastic_layers(trained["BN3"].model) if "BN3" in trained else []
    return records + [
        {"layer": layer.path, "importance": layer.posterior.order.log_tails.detach().exp().cpu().tolist()}
        for _, layer in layers
        if getattr(layer, "leads", False)
    ]


def at_width(
    name: str, key: str, narrowed: Callable[..., nn.Module], evaluate: nets.Evaluation
) -> dict[tuple[str, str], Record]:
    """Evaluate a nested network at a width: draws and means, or draws without and with a temperature."""
    small = narrowed()
    found = {(name, key): evaluate(small)}
    if name.startswith("BN3"):
        return found | {(f"DT-{name}", key): evaluate(narrowed(means=True))}
    return found | {(f"{name}-TS", key): found[name, key] | evaluate.tempered(small)}


def plot(records: list[Record], path: Path) -> None:
    """Plot accuracy, ECE and AUPR over width."""
    known = [record for record in records if record.get("width", "any") != "any"]
    plot_curves(known, path, x="width", columns=TABLE.some("accuracy", "ece", "aupr"))
