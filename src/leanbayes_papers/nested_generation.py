"""One autoencoder at every code length: Tables 4, 5 and 6 of the nested paper, and its pictures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from leanbayes_papers.nested_coders import (
    coder,
    DATA,
    dimensions,
    lengths,
    MODELS,
    ORDERED,
    taught,
    Yardstick,
)
from leanbayes_papers.nested_generation_page import draw, overview, say
from leanbayes_papers.nested_pictures import pictures
from leanbayes_papers.nested_settings import PAPER
from leanbayes_papers.study import Case, Numbers, Study
from leanbayes_papers.suite import Setting, Suite

CUT = "VAE, cut"
"""The longest VAE, whose code was never meant to be cut."""

LEGEND = (
    "Ours: mean ± standard deviation over seeds, in the features of a classifier trained here on the same data; the "
    "paper's are of an Inception network. Compare rows, not numbers."
)


def nested_generation(setting: Setting) -> Suite:
    """Reconstruction and new images at 25 to 100 % of one ordered code, and a VAE for each (Tables 4-6, Figure 9)."""
    studies = [one(setting, data) for data in DATA[setting.budget] for one in (study, pictures)]
    return Suite(paper=PAPER, tables=(), studies=tuple(studies), overview=overview, legend=LEGEND)


def study(setting: Setting, data: str) -> Study:
    """Return the study of one data set."""
    return Study(
        name=f"generation-{data}",
        title=f"Nested paper, Tables 4, 5 and 6: codes of every length on {data}",
        claim="Trained once, VND-AE generates better images than a VAE trained for each length, and mostly with half "
        "of its code better ones than BetaVAE, JointVAE and SWAE. Longer codes are better. Its reconstruction error on "
        "CIFAR-10 is between 8 and 16 % above that of the VAE of the same length.",
        data=(data,),
        measure=partial(measure, setting=setting, data=data),
        draw=draw,
        say=say,
    )


def measure(case: Case, *, setting: Setting, data: str) -> Numbers:
    """Train all models with every seed, and judge them at every length they have."""
    yardstick = Yardstick(setting, data, case)
    whole = dimensions(setting, data)
    methods: dict[str, dict[str, list[Numbers]]] = {}
    orders: dict[str, list[list[float]]] = {}
    for seed in case.seeds:
        for name, length in trainings(whole):
            model = taught(coder(setting, data, name, length), case, seed)
            for row, percent, cut in judged(name, length, whole):
                methods.setdefault(row, {}).setdefault(percent, []).append(yardstick(model, cut))
            if name in (ORDERED, "VAE") and length == whole:
                orders.setdefault(name, []).append(yardstick.order(model))
    return {
        "data": data,
        "network": yardstick.network.name,
        "accuracy": yardstick.accuracy,
        "dimensions": whole,
        "images": len(yardstick.real),
        "real": yardstick.likeness(yardstick.train),
        "methods": methods,
        "order": {
            name: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for name, rows in orders.items()
        },
    }


def trainings(whole: int) -> Iterator[tuple[str, int]]:
    """Yield what is trained: every model with the full code, and the VAE for each length."""
    for name in MODELS:
        for length in lengths(whole).values() if name == "VAE" else [whole]:
            yield name, length


def judged(name: str, length: int, whole: int) -> Iterator[tuple[str, str, int]]:
    """Yield under which rows, at which percentages and lengths a model is judged."""
    for percent, cut in lengths(whole).items():
        if name == ORDERED or cut == length:
            yield name, percent, cut
        if name == "VAE" and cut < length == whole:
            yield CUT, percent, cut
