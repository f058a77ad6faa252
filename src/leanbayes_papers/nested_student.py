"""A student of a nested network: Table 3 and Figure 5 of the nested paper."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leanbayes.slim import correlate, distill
from leanbayes_papers.nested_settings import ANNEALED, average, DATA, Judge, NORM_ROWS, ours, PAPER, trainee
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.trained import train, Trained

STUDENT = 0.25
SHARES = (0.25, 0.5, 0.75, 1.0)
CORRELATED = tuple(k / 10 for k in range(1, 11))
LOOKED_AT = 1000
LABELS = 0.1
"""Weight of the labels beside the discrepancy, without which a short training may lose a class; the paper has none."""

PRINTED = {
    "teacher": (54.00, 0.22, 0.980),
    "student 25 %": (54.98, 0.21, 0.981),
    "student 50 %": (55.26, 0.21, 0.981),
    "student 75 %": (55.32, 0.20, 0.980),
    "student 100 %": (55.36, 0.20, 0.982),
}
"""Accuracy in percent, ECE and AUPR of SVHN, of VGG11 on Tiny ImageNet, which is not here."""


def nested_student(setting: Setting) -> Suite:
    """A distilled student at a quarter of the channels, cut further, beside its teacher (Table 3, Figure 5)."""
    studies = [one for data in DATA[setting.budget] for one in studies_of(setting, data)]
    return Suite(paper=PAPER, tables=(), studies=tuple(studies))


def studies_of(setting: Setting, data: str) -> tuple[Study, Study]:
    """Return both studies of one data set."""
    table = Study(
        name=f"student-{data}",
        title=f"Nested paper, Table 3: a student of a quarter of the channels on {data}",
        claim="Distilled, a student of a sixteenth of the teacher's size is better than the teacher, and better still "
        "when it is wider (paper: VGG11 on Tiny ImageNet).",
        data=(data,),
        measure=partial(measure, setting=setting, data=data),
        draw=draw,
        say=say,
    )
    figure = Study(
        name=f"correlation-{data}",
        title=f"Nested paper, Figure 5: correlation of uncertainties between widths on {data}",
        claim="Above a width of 0.2 to 0.25 the entropies of all widths are strongly correlated.",
        data=(data,),
        measure=partial(correlations, setting=setting, data=data),
        draw=draw_correlations,
        say=say_correlations,
    )
    return table, figure


def teacher_of(setting: Setting, data: str, case: Case, seed: int) -> Trained:
    """Return the trained teacher; it is the network of nested-widths."""
    return train(trainee(setting, data, f"{data}-bn3", ours(data)), case, seed)


def measure(case: Case, *, setting: Setting, data: str) -> Numbers:
    """Distil a student of every teacher, and judge both."""
    rows: dict[str, list[Numbers]] = {name: [] for name in PRINTED}
    for seed in case.seeds:
        teacher = teacher_of(setting, data, case, seed)
        judge = Judge(teacher, data, setting.root)
        small = taught(teacher, setting, data, case, seed)
        rows["teacher"].append(judge(judge.narrowed(teacher.model, 1.0)))
        for share in SHARES:
            rows[f"student {100 * share:.0f} %"].append(judge(judge.narrowed(small, share)))
    return {name: {**average(runs), "paper": PRINTED[name]} for name, runs in rows.items()}


def taught(teacher: Trained, setting: Setting, data: str, case: Case, seed: int) -> nn.Module:
    """Return the student, distilled half as long as the teacher was trained; one that is finished is only read."""
    plan = trainee(setting, data, f"{data}-student", ours(data))
    folder = plan.folder(case.out, seed)
    epochs = max(1, plan.recipe.epochs // 2)
    recipe = replace(plan.recipe, seed=seed, epochs=epochs, anneal_epochs=round(ANNEALED * epochs), compile=False)
    small = distill(
        teacher.model,
        teacher.train(),
        width=STUDENT,
        recipe=recipe,
        labels=LABELS,
        folder=folder,
        resume=not case.fresh,
        progress=case.budget != "quick",
    )
    return small.to(next(teacher.model.parameters()).device).eval()


def correlations(case: Case, *, setting: Setting, data: str) -> Numbers:
    """Correlate the entropies of test rows between widths, of the first seed."""
    teacher = teacher_of(setting, data, case, case.seeds[0])
    x = teacher.test(LOOKED_AT)[0]
    found = correlate(teacher.model, x, CORRELATED, data=teacher.train(NORM_ROWS)[0])
    return {
        "widths": list(found.widths),
        "matrix": found.matrix.tolist(),
        "smallest": {str(threshold): found.smallest(threshold) for threshold in (0.8, 0.9)},
    }


def say(numbers: Numbers) -> list[str]:
    """Tell teacher and students, beside the paper's."""
    whole, lines = numbers["teacher"]["parameters"], []
    for name, row in numbers.items():
        accuracy, ece, aupr = row["paper"]
        lines.append(
            f"{name}: accuracy {row['accuracy']:.1f} % (paper: {accuracy}), ECE {row['ece']:.3f} ({ece}), AUPR "
            f"{row['aupr']:.3f} ({aupr}); {row['parameters']:,.0f} weights, 1/{whole / row['parameters']:.0f} of "
            f"the teacher's, {row['multiply_adds']:,.0f} multiply-adds"
        )
    return lines


def say_correlations(numbers: Numbers) -> list[str]:
    """Tell from which width on uncertainties agree with those of the full width."""
    told = (f"{threshold} from width {width} on" for threshold, width in numbers["smallest"].items())
    return [f"Correlation with the full width stays above {'; above '.join(told)}."]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw accuracy and ECE over size."""
    figure = new_figure(8, 3.2)
    for axis, (key, label) in zip(figure.subplots(1, 2), (("accuracy", "accuracy, %"), ("ece", "ECE")), strict=True):
        students = [row for name, row in numbers.items() if name != "teacher"]
        axis.plot([row["parameters"] for row in students], [row[key] for row in students], "o-", label="student")
        axis.plot(numbers["teacher"]["parameters"], numbers["teacher"][key], "s", label="teacher")
        axis.set(xlabel="weights", ylabel=label, xscale="log")
    figure.axes[0].legend(fontsize=7)
    save_figure(figure, path)


def draw_correlations(numbers: Numbers, path: Path) -> None:
    """Draw the matrix."""
    figure = new_figure(4, 3.4)
    axis: Any = figure.subplots()
    ends = (min(CORRELATED) - 0.05, max(CORRELATED) + 0.05)
    shown = axis.imshow(
        torch.tensor(numbers["matrix"]).numpy(), origin="lower", extent=(*ends, *ends), vmin=0, vmax=1, cmap="RdBu_r"
    )
    axis.set(xlabel="width", ylabel="width")
    figure.colorbar(shown, ax=axis)
    save_figure(figure, path)
