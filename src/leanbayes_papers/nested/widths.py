"""Figures 1 and 10 of the nested paper: one network at every width, next to networks trained for each width."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import leanbayes as lb
from leanbayes_papers.harness import plot_curves, Record, Run, Study, Suite, Table
from leanbayes_papers.nested import networks as nets
from leanbayes_papers.nested import PAPER
from leanbayes_papers.nested.tables import times

WIDTHS = (0.125, 0.25, 0.5, 0.75, 1.0)
TABLE = Table.of("nested", "widths")


def nested_widths(run: Run) -> Suite:
    """Accuracy, calibration, out-of-distribution inputs by width: BN3, FN3, with temperatures, IBNN (Figure 10)."""
    studies: list[Study] = []
    for data in nets.DATA[run.budget]:
        words = {"data": data, "ood": nets.OOD[data]}
        studies.append(Study.of("nested", "widths", words, measure=measure, tables=(TABLE,), plot=plot))
        studies.append(times(data))
    return Suite(paper=PAPER, studies=tuple(studies))


def measure(run: Run, *, data: str) -> list[Record]:
    """Train BN3, FN3, a plain network and one for each width; evaluate each at every width that it has."""
    methods = {"bn3": nets.bn3(data), "fn3": nets.fn3(data), "plain": None}
    records: list[Record] = []
    for seed in run.seeds:
        trained = {name: run.train(nets.spec(run, data, name, method), seed) for name, method in methods.items()}
        evaluate = nets.Evaluation(trained["bn3"], data, run)
        found = {("plain", "1"): evaluate(trained["plain"].model)}
        for width in WIDTHS:
            found |= at_width(trained["bn3"].model, trained["fn3"].model, width, evaluate)
        for width in WIDTHS:
            found["IBNN", f"{width:g}"] = evaluate(run.train(nets.individual(run, data, width), seed).model)
        found["BN3-MC", "any"] = evaluate(trained["bn3"].model)
        records += [{"method": name, "width": width, "seed": seed} | row for (name, width), row in found.items()]
    tails = [layer for _, layer in lb.stochastic_layers(trained["bn3"].model) if getattr(layer, "leads", False)]
    return records + [
        {"layer": layer.path, "importance": layer.posterior.order.log_tails.detach().exp().cpu().tolist()}
        for layer in tails
    ]


def at_width(bn3: nn.Module, fn3: nn.Module, width: float, evaluate: nets.Evaluation) -> dict[tuple[str, str], Record]:
    """Evaluate both nested networks at a width: draws, means, and with a temperature."""
    key = f"{width:g}"
    found = {("BN3", key): evaluate(evaluate.narrowed(bn3, width))}
    found["DT-BN3", key] = evaluate(evaluate.narrowed(bn3, width, means=True))
    small = evaluate.narrowed(fn3, width)
    found["FN3", key] = evaluate(small)
    found["FN3-TS", key] = found["FN3", key] | evaluate.tempered(small)
    return found


def plot(records: list[Record], path: Path) -> None:
    """Plot accuracy, ECE and AUPR over width."""
    known = [record for record in records if record.get("width", "any") != "any"]
    plot_curves(known, path, x="width", columns=TABLE.some("accuracy", "ece", "aupr"))
