"""Charts of records: rows with error bars, curves, and images. Other figures use `new_figure` and `save_figure`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.runtime._files import write_whole
from leanbayes_papers.harness.results import Column, group, Record, Table

SMALL = 7  # points of legends
WHITE = 255


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; sizes in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib, which is not here; install leanbayes[examples]") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as SVG, whole or not at all."""
    options = {"format": "svg", "bbox_inches": "tight", "metadata": {"Date": None}}
    write_whole(path, lambda temporary: figure.savefig(temporary, **options))


def plot_rows(records: Sequence[Record], path: Path, *, table: Table) -> None:
    """Plot a table: one panel for each column, one line for each row, mean ± error, the paper's number as a cross."""
    groups = group(table.derive(list(records)), table.by)
    columns = [column for column in table.columns if column.text is None]
    names = [", ".join(map(str, key)) for key in groups]
    figure = new_figure(2 + 2.6 * len(columns), 0.8 + 0.28 * len(names))
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, column in zip(axes, columns, strict=True):
        for place, (key, rows) in enumerate(groups.items()):
            if (found := column.estimate(rows)) is not None:
                axis.errorbar(found.mean, place, xerr=found.sem or 0.0, fmt="o", capsize=3, color="#1f5f9f")
            if (paper := table.paper.get(key, {}).get(column.name)) is not None:
                axis.plot(paper.value, place, "kx")
        axis.set(xlabel=column.head)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    save_figure(figure, path)


def plot_curves(  # keywords
    records: Sequence[Record],
    path: Path,
    *,
    x: str,
    columns: Sequence[Column],
    by: tuple[str, ...] = ("method",),
    log: bool = False,
    line: bool = True,
) -> None:
    """Plot every column over `x`: one panel for each, one curve for each row `by`, mean ± error over seeds."""
    figure = new_figure(4.4 * len(columns), 3.3)
    for axis, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        for key, rows in group([record for record in records if x in record], by).items():
            points = {float(at): column.estimate(each) for (at,), each in group(rows, (x,)).items()}
            known = sorted((at, point.mean, point.sem or 0.0) for at, point in points.items() if point is not None)
            style = {"fmt": "o-" if line else "o", "ms": 4, "label": ", ".join(map(str, key))}
            axis.errorbar(*zip(*known, strict=True), **style) if known else None
        axis.set(xlabel=x, ylabel=column.head, xscale="log" if log else "linear")
    figure.axes[0].legend(fontsize=SMALL) if by else None
    save_figure(figure, path)


def grid(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Put rows of images (C, H, W) below each other, each in a white frame, as one picture (H', W', C)."""
    longest = max(map(len, rows))
    strips = []
    for row in rows:
        blank = [torch.ones_like(row[0])] * (longest - len(row))
        strips.append(torch.cat([F.pad(image, (1, 1, 1, 1), value=1.0) for image in (*row, *blank)], 2))
    return torch.cat(strips, 1).movedim(0, 2)


def show(axis: Any, picture: Tensor, title: str, labels: Sequence[str]) -> None:
    """Put a picture (H, W, C) of one row for each label into axes without a frame."""
    step = picture.shape[0] / len(labels)
    named = [k for k, label in enumerate(labels) if label]
    shown = picture[..., 0] if picture.shape[2] == 1 else picture
    limit = WHITE if picture.dtype == torch.uint8 else 1.0
    axis.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=limit, interpolation="none")  # "none" blurs nothing
    axis.set_title(title, fontsize=11)
    axis.set(xticks=[], yticks=[step * (k + 0.5) - 0.5 for k in named], yticklabels=[labels[k] for k in named])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
