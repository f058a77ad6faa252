"""Table 3 and Figure 5 of the nested paper: a student of a nested network, and uncertainties between widths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import leanbayes as lb
from leanbayes_papers.harness import plot_curves, Record, Run, Study, Suite, Table, Trained
from leanbayes_papers.harness.charts import new_figure, save_figure
from leanbayes_papers.nested import networks as nets
from leanbayes_papers.nested import PAPER

STUDENT = 0.25
SHARES = (0.25, 0.5, 0.75, 1.0)
CORRELATED = tuple(k / 10 for k in range(1, 11))
ROWS = 1000
# Weight of the labels next to the discrepancy, without which a short training may lose a class; the paper has none.
LABELS = 0.1
TABLE, CORRELATIONS = Table.of("nested", "student"), Table.of("nested", "correlation")


def nested_student(run: Run) -> Suite:
    """A distilled student at a quarter of the channels, cut further, next to its teacher (Table 3, Figure 5)."""
    plot = partial(plot_curves, x="parameters", columns=TABLE.some("accuracy", "ece"), log=True, line=False)
    studies: list[Study] = []
    for words in ({"data": data} for data in nets.DATA[run.budget]):
        studies.append(Study.of("nested", "student", words, measure=measure, tables=(TABLE,), plot=plot))
        fields = {"measure": correlations, "tables": (CORRELATIONS,), "plot": plot_correlations}
        studies.append(Study.of("nested", "correlation", words, **fields))
    return Suite(paper=PAPER, studies=tuple(studies))


def teacher(run: Run, data: str, seed: int) -> Trained:
    """Return the trained teacher; it is the network of nested-widths."""
    return run.train(nets.spec(run, data, "bn3", nets.bn3(data)), seed)


def measure(run: Run, *, data: str) -> list[Record]:
    """Distil a student of every teacher, and evaluate both."""
    records: list[Record] = []
    for seed in run.seeds:
        wide = teacher(run, data, seed)
        evaluate = nets.Evaluation(wide, data, run)
        small = student(wide, run, data, seed)
        found = {"teacher": evaluate(evaluate.narrowed(wide.model, 1.0))}
        for share in SHARES:
            found[f"student {100 * share:.0f} %"] = evaluate(evaluate.narrowed(small, share))
        records += [{"method": name, "seed": seed} | row for name, row in found.items()]
    return records


def student(teacher: Trained, run: Run, data: str, seed: int) -> nn.Module:
    """Return the student, distilled half as long as the teacher was trained; a finished one is read."""
    plan = nets.spec(run, data, "student", nets.bn3(data))
    epochs = max(1, plan.recipe.epochs // 2)
    recipe = replace(plan.recipe, seed=seed, epochs=epochs, anneal_epochs=round(nets.ANNEALED * epochs), compile=False)
    options: dict[str, Any] = {"resume": not run.fresh, "progress": run.budget != "quick"}
    small = lb.slim.distill(
        teacher.model,
        teacher.train(),
        width=STUDENT,
        recipe=recipe,
        labels=LABELS,
        folder=plan.folder(run.out, seed),
        **options,
    )
    return small.to(next(teacher.model.parameters()).device).eval()


def correlations(run: Run, *, data: str) -> list[Record]:
    """Correlate the entropies of test rows between widths, of the first seed."""
    wide = teacher(run, data, run.seeds[0])
    found = lb.slim.correlate(wide.model, wide.test(ROWS)[0], CORRELATED, data=wide.train(nets.NORM_ROWS)[0])
    rows = zip(found.widths, found.matrix.tolist(), strict=True)
    return [
        *({"width": width, "correlations": row} for width, row in rows),
        *({"correlation above": t, "smallest": found.smallest(t)} for t in (0.8, 0.9)),
    ]


def plot_correlations(records: list[Record], path: Path) -> None:
    """Plot the matrix of correlations."""
    figure = new_figure(4, 3.4)
    axis: Any = figure.subplots()
    ends = (min(CORRELATED) - 0.05, max(CORRELATED) + 0.05)
    matrix = torch.tensor([record["correlations"] for record in records if "width" in record]).numpy()
    shown = axis.imshow(matrix, origin="lower", extent=(*ends, *ends), vmin=0, vmax=1, cmap="RdBu_r")
    axis.set(xlabel="width", ylabel="width")
    figure.colorbar(shown, ax=axis)
    save_figure(figure, path)
