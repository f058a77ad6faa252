"""Tables 4, 5 and 6 and Figures 9 and 12 of the nested paper: one autoencoder at every code length, its pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.generative import Autoencoder, VNDAutoencoder
from leanbayes_papers.harness import evenly, plot_curves, printed, Record, Run, Study, Suite, Table
from leanbayes_papers.harness.charts import grid, new_figure, save_figure, show, WHITE
from leanbayes_papers.nested import PAPER
from leanbayes_papers.nested.coders import coder, DATA, dimensions, Evaluation, lengths, MODELS, ORDERED, pixels

CUT = "VAE, cut"  # the longest VAE; it was not trained to be cut
LEGEND = (
    "Ours: mean ± standard deviation over seeds, in the features of a classifier trained here on the same data; the "
    "paper's are of an Inception network. Compare rows, not numbers. Error: mean squared difference of pixels between "
    "0 and 1; the paper does not define its error."
)
PRINTED = {
    ("cifar10", name.rpartition(" ")[0], int(name.rpartition(" ")[2])): row
    for name, row in printed("nested", "tables4-6").items()
}
TABLE, REAL = Table.of("nested", "generation", paper=PRINTED), Table.of("nested", "real")
ROUNDING = 1e-6  # A rise below this share of the whole fall of an error is none
SHOWN, DEPTH = 8, 4
SPREAD = 1.5  # distance from zero of the two values of a dimension of the tree; the prior's deviation is one
WIDTH, TREE_HEIGHT = 11.0, 4.0  # inches of the figure and of the tree in it


def _errors(records: Sequence[Record]) -> list[float]:
    return [sum(column) / len(records) for column in zip(*(record["errors"] for record in records), strict=True)]


def rise(records: Sequence[Record]) -> str:
    """Write the largest rise of the error from one length to the next, in percent of its whole fall."""
    errors = _errors(records)
    fall = max(errors) - min(errors)
    worst = max(later - earlier for earlier, later in pairwise(errors))
    return "none" if worst <= ROUNDING * fall else f"{100 * worst / fall:.2g} %"


def enough(records: Sequence[Record]) -> str:
    """Write the number of dimensions that have 99 % of the gain."""
    errors = _errors(records)
    limit = errors[-1] + 0.01 * (max(errors) - min(errors))
    return str(next(k for k, error in enumerate(errors, 1) if error <= limit))


FIRST_AND_LAST = {
    "dimensions": lambda rows: str(len(rows[0]["errors"])),
    "first": lambda rows: f"{_errors(rows)[0]:.4g}",
    "last": lambda rows: f"{_errors(rows)[-1]:.4g}",
}
ORDER = Table.of("nested", "order", FIRST_AND_LAST | {"rise": rise, "enough": enough})


def nested_generation(run: Run) -> Suite:
    """Reconstruction and new images at 25 to 100 % of one ordered code, and a VAE for each (Tables 4-6, Figure 9)."""
    kinds = (("generation", measure, plot), ("pictures", measure_pictures, plot_pictures))
    studies = (
        Study.of("nested", kind, {"data": data}, measure=measured, plot=plotted)
        for data in DATA[run.budget]
        for kind, measured, plotted in kinds
    )
    return Suite(paper=PAPER, studies=tuple(studies), tables=(TABLE, REAL, ORDER), legend=LEGEND)


def measure(run: Run, *, data: str) -> list[Record]:
    """Train all models with every seed, and evaluate them at every length that they have."""
    evaluate, whole = Evaluation(run, data), dimensions(run, data)
    records: list[Record] = []
    for seed in run.seeds:
        for name, length in trainings(whole):
            model: Any = run.train(coder(run, data, name, length), seed).model
            for row, percent, cut in rows_of(name, length, whole):
                names = {"data": data, "method": row, "code, %": percent, "seed": seed}
                records.append(names | evaluate(model, cut))
            if name in (ORDERED, "VAE") and length == whole:
                records.append({"data": data, "order": name, "seed": seed, "errors": evaluate.order(model)})
    real = {"data": data, "network": evaluate.network.name, "accuracy": evaluate.accuracy, "images": len(evaluate.real)}
    return [*records, real | evaluate.likeness(evaluate.train)]


def trainings(whole: int) -> Iterator[tuple[str, int]]:
    """Yield model and length of every training: every model with the full code, and the VAE for each length."""
    for name in MODELS:
        for length in lengths(whole).values() if name == "VAE" else [whole]:
            yield name, length


def rows_of(name: str, length: int, whole: int) -> Iterator[tuple[str, int, int]]:
    """Yield rows, percentages and lengths at which a model is evaluated."""
    for percent, cut in lengths(whole).items():
        if name == ORDERED or cut == length:
            yield name, percent, cut
        if name == "VAE" and cut < length == whole:
            yield CUT, percent, cut


def plot(records: list[Record], path: Path) -> None:
    """Plot distance, score and error over the length of the code."""
    known = [record for record in records if "method" in record]
    plot_curves(known, path, x="code, %", columns=TABLE.columns[:3])


# ------------------------------------------------------------------------------------ pictures


def measure_pictures(run: Run, *, data: str) -> list[Record]:
    """Generate, reconstruct and branch with the VND-AE of the first seed."""
    spec = coder(run, data, ORDERED, dimensions(run, data))
    model: Autoencoder | Any = run.train(spec, run.seeds[0]).model
    if not isinstance(model, VNDAutoencoder):
        raise ValueError(f"expected {ORDERED} to have ordered codes, got {type(model).__name__}")
    test = spec.load(spec.source).test
    x = evenly((pixels(test), test.y), SHOWN)[0]
    growing = doubled(model.dimensions)
    again = [model.reconstruct(x.to(model.device), length=length).cpu() for length in growing]
    found = {
        "new": grid(list(map(list, model.progressive(SHOWN, growing).cpu()))),
        "again": grid(list(map(list, (x, *again)))),
        "tree": tree([F.pad(level.cpu(), (1, 1, 1, 1), value=1.0) for level in model.tree(DEPTH, spread=SPREAD)]),
    }
    return [{"picture": name, "lengths": growing} | packed(picture) for name, picture in found.items()]


def doubled(whole: int) -> list[int]:
    """Return 1, 2, 4, ... and the full length."""
    return [*(2**k for k in range(whole.bit_length()) if 2**k < whole), whole]


def tree(levels: Sequence[Tensor]) -> Tensor:
    """Put the levels of a tree below each other on white, every image in the middle above its two successors."""
    leaves = len(levels[-1])
    _, channels, height, width = levels[0].shape
    canvas = torch.ones(channels, height * len(levels), width * leaves)
    for depth, level in enumerate(levels):
        step = width * leaves // len(level)
        for k, image in enumerate(level):
            left = k * step + (step - width) // 2
            canvas[:, depth * height : (depth + 1) * height, left : left + width] = image
    return canvas.movedim(0, 2)


def packed(picture: Tensor) -> dict[str, Any]:
    """Return a picture of pixels between 0 and 1 as JSON can hold it: its shape, and a byte for each number."""
    grey = (picture.clamp(0, 1) * 255).round().to(torch.uint8)
    return {"shape": list(grey.shape), "bytes": base64.b64encode(bytes(grey.flatten().tolist())).decode()}


def unpacked(record: Record) -> Tensor:
    """Return the picture of a record, bytes (H, W, C)."""
    return torch.tensor(list(base64.b64decode(record["bytes"])), dtype=torch.uint8).view(record["shape"])


def plot_pictures(records: list[Record], path: Path) -> None:
    """Show new images next to reconstructions, equal lengths on equal heights, and the tree below them."""
    labels = [*map(str, records[0]["lengths"])]
    new, again, branches = (unpacked(record) for record in records)
    figure = new_figure(WIDTH, WIDTH * again.shape[0] / again.shape[1] / 2 + TREE_HEIGHT)
    above, below = figure.subfigures(2, 1, height_ratios=(figure.get_figheight() - TREE_HEIGHT, TREE_HEIGHT))
    left, right = above.subplots(1, 2)
    empty = torch.full((again.shape[0] - new.shape[0], *new.shape[1:]), WHITE, dtype=new.dtype)
    show(left, torch.cat([empty, new]), "new images", ["", *labels])
    show(right, again, "test images and their reconstructions", ["test", *labels])
    left.set_ylabel("dimensions of the code in use")
    show(below.subplots(), branches, "a tree of codes", [str(depth + 1) for depth in range(DEPTH)])
    save_figure(figure, path)
