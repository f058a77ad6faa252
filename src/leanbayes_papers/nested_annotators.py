"""Segmentation where annotators disagree: Figure 14 of the nested paper, and a made-up set whose law is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from leanbayes.generative import ProbabilisticUNet
from leanbayes.training import Recipe
from leanbayes_papers.mask_pictures import draw_pictures, pictures
from leanbayes_papers.nested_settings import average, PAPER
from leanbayes_papers.opinions import code_use, judge, SAMPLES, truth, variants
from leanbayes_papers.segmenters import images_of, KINDS, Scale, Segmenter, train
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite

DATA = {"quick": ("ambiguous",), "short": ("ambiguous", "bsds500"), "full": ("bsds500",)}
USUAL = (32, 64, 128, 192)
SCALES = {
    ("quick", "ambiguous"): Scale(widths=(8, 8, 16), epochs=16, batch_size=10, lr=4e-3, members=2, images=(200, 100)),
    ("short", "ambiguous"): Scale(widths=(16, 32, 64), epochs=60, batch_size=32, lr=1e-3, members=4),
    ("short", "bsds500"): Scale(widths=USUAL, epochs=100, batch_size=10, lr=5e-4, members=4, flip=True),
    ("full", "bsds500"): Scale(widths=USUAL, epochs=400, batch_size=10, lr=5e-4, members=4, flip=True),
}
STYLES = {"BN3": "s--", "VND-PUNet": "o-", "P-UNet": "^-"}
COLOURS = {
    "deterministic": "#999999",
    "dropout": "#8c6d31",
    "ensemble": "#2ca02c",
    "P-UNet": "#d62728",
    "VND-PUNet 1/3": "#9ecae1",
    "VND-PUNet full": "#4292c6",
    "VND-PUNet as drawn": "#08519c",
    "BN3 0.25": "#fdc692",
    "BN3 0.5": "#f58a38",
    "BN3 1": "#b84a05",
}
"""Of lines and bars alike: one hue for each kind of model, darker the more of it is in use."""


def nested_annotators(setting: Setting) -> Suite:
    """Energy distance to several annotators: U-Nets, P-UNet, VND-PUNet and BN3 at every width (Figure 14)."""
    studies = [one for data in DATA[setting.budget] for one in studies_of(setting, data, SCALES[setting.budget, data])]
    return Suite(paper=PAPER, tables=(), studies=tuple(studies))


def studies_of(setting: Setting, data: str, scale: Scale) -> tuple[Study, Study]:
    """Return both studies of one set."""
    table = Study(
        name=f"annotators-{data}",
        title=f"Nested paper, Figure 14: energy distance to the annotators of {data}",
        claim="VND-PUNet is better than P-UNet and BN3, with a third of its code or all of it; BN3 is better than "
        "dropout, ensemble and, with few samples, P-UNet, and stays the same above a third of its width (paper: "
        "LIDC-IDRI, which is not here; it prints no numbers).",
        data=(data,),
        measure=partial(measure, setting=setting, data=data, scale=scale),
        draw=draw,
        say=say,
    )
    seen = Study(
        name=f"masks-{data}",
        title=f"Masks of annotators of {data}, and of every model",
        claim="The samples of a model should differ as the annotators do.",
        data=(data,),
        measure=partial(look, setting=setting, data=data, scale=scale),
        draw=draw_pictures,
        say=lambda numbers: [f"{len(numbers['images'])} test images, the first samples of each model, first seed."],
    )
    return table, seen


def plans(setting: Setting, data: str, scale: Scale) -> dict[str, Segmenter]:
    """Return the networks of a study by kind."""
    adam = setting.recipe(Recipe(optimizer="adam", lr=1e-3, weight_decay=0.0))
    return {kind: Segmenter(kind=kind, data=data, scale=scale, recipe=adam, root=setting.root) for kind in KINDS}


def measure(case: Case, *, setting: Setting, data: str, scale: Scale) -> Numbers:
    """Train every kind of network and judge its opinions; what codes tell is that of the first seed."""
    images = images_of(data, scale.images, setting.root)
    rows: dict[str, list[dict[str, float]]] = {}
    codes: dict[str, Any] = {}
    for seed in case.seeds:
        for kind, plan in plans(setting, data, scale).items():
            model = train(plan, case, seed)
            for name, opinions in variants(kind, model, images):
                rows.setdefault(name, []).append(judge(opinions, images))
            if isinstance(model, ProbabilisticUNet) and kind not in codes:
                codes[kind] = code_use(model, images)
    return {"truth": truth(images), "models": {name: average(runs) for name, runs in rows.items()}, "codes": codes}


def look(case: Case, *, setting: Setting, data: str, scale: Scale) -> Numbers:
    """Read the networks of the first seed and keep some of their samples."""
    images, seed = images_of(data, scale.images, setting.root), case.seeds[0]
    trained = ((kind, train(plan, case, seed)) for kind, plan in plans(setting, data, scale).items())
    opinions = {name: found for kind, model in trained for name, found in variants(kind, model, images)}
    return pictures(images, {name: found.balanced for name, found in opinions.items()})


def say(numbers: Numbers) -> list[str]:
    """Tell distances, overlap and calibration of every model; where the law is known, how often modes are sampled."""
    best, models = numbers["truth"], numbers["models"]
    counts = ", ".join(map(str, SAMPLES))
    lines = [
        f"{best['images']} test images, {100 * best['marked']:.1f} % of whose pixels annotators mark. Energy distance "
        f"(squared, less is better) with {counts} samples:"
    ]
    if "apart" in best:
        lines.append(
            f"Two annotators of an image are {best['apart']:.3f} apart (1 - IoU), a mask and itself one pixel to the "
            f"right {best['one pixel']:.3f}. The optimum is an estimate from the former."
        )
    lines.append(f"optimum: {_distances(best, 'ged')}")
    lines += [f"{name}: {_distances(row, 'ged')}; {_rest(row)}" for name, row in models.items()]
    if "mode 0" in best:
        lines.append(
            f"Modes (whole, half, nothing) in percent; truth: {_modes(best)}. Points off at most, also by thirds:"
        )
        lines += [f"{name}: {_modes(row)}; {_off(row)}" for name, row in models.items()]
    else:
        lines.append("The same with balanced masks, of which as many pixels are marked as annotators mark:")
        lines += [f"{name}: {_distances(row, 'balanced ged')}" for name, row in models.items()]
    return lines + [
        f"Code of {name}, nats told by each dimension (how often it is used): {_code(code)}"
        for name, code in numbers["codes"].items()
    ]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw the distance over samples, and that of the most samples for each model; of balanced masks if there are."""
    best, models, most = numbers["truth"], numbers["models"], max(SAMPLES)
    name = "ged" if "mode 0" in best else "balanced ged"
    figure = new_figure(11, 4.4)
    lines, bars = figure.subplots(1, 2)
    for place, (model, row) in enumerate(models.items()):
        colour = COLOURS.get(model, f"C{place}")
        lines.plot(SAMPLES, [row[f"{name} {n}"] for n in SAMPLES], _style(model), color=colour, ms=5)
        drawn = bars.barh(model, row[f"{name} {most}"], color=colour)
        bars.bar_label(drawn, fmt="%.3f", padding=3, fontsize=8)
    lines.plot(SAMPLES, [best[f"ged {count}"] for count in SAMPLES], color="black", lw=1)
    bars.axvline(best[f"ged {most}"], color="black", lw=1)
    bars.annotate("optimum", (best[f"ged {most}"], 1), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    lines.set(xlabel="samples", ylabel="squared energy distance (less is better)", xscale="log", ylim=(0, None))
    lines.set_xticks(SAMPLES, SAMPLES)
    lines.minorticks_off()
    bars.invert_yaxis()
    bars.margins(x=0.12)
    bars.set(xlabel=f"squared energy distance, {most} samples")
    for axis in (lines, bars):
        axis.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _style(model: str) -> str:
    return STYLES.get(model.split(" ")[0], ".:")


def _distances(row: Numbers, name: str) -> str:
    return " ".join(f"{row[f'{name} {count}']:.3f}" for count in SAMPLES)


def _rest(row: Numbers) -> str:
    return (
        f"matched IoU {row['matched iou']:.3f}, pixels' ECE {row['ece']:.3f}, vote error {row['vote error']:.3f}, "
        f"marked {100 * row['marked']:.1f} %, {row['parameters']:,.0f} parameters"
    )


def _modes(row: Numbers) -> str:
    return " ".join(f"{100 * value:.1f}" for name, value in row.items() if name.startswith("mode "))


def _off(row: Numbers) -> str:
    return ", ".join(f"{name.removeprefix('points off, ')} {v:.1f}" for name, v in row.items() if "points off" in name)


def _code(code: Numbers) -> str:
    return ", ".join(f"{nats:.2f} ({100 * used:.0f} %)" for nats, used in zip(code["nats"], code["used"], strict=True))
