"""Ensemble model patching on images, and how many draws it wants (Chang et al., 2019, Tables 6 and 9 to 11)."""

from __future__ import annotations

from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.job import recipe as recipe_of
from leanbayes.methods._base import Method
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.patch import ModelPatch
from leanbayes.training import Recipe
from leanbayes_papers import sample_size
from leanbayes_papers.study import Study
from leanbayes_papers.suite import printed, Row, Setting, Suite, Table

PAPER = "Ensemble Model Patching (Chang, Yao, Williams-King, Lipson, 2019)"
MEASURES = ("top5", "accuracy", "ece20")
ROWS: dict[str, Method | None] = {
    "Vanilla": None,
    "Dropout": MCDropout(),
    "EMP": ModelPatch(),
    "ECMP": ModelPatch(crossed=True),
}
LABELS = {"Vanilla": "plain", "Dropout": "dropout", "EMP": "emp", "ECMP": "ecmp"}
TABLE = {  # Tables 6 and 9-11: PyramidNet-110(270) on CIFAR-100, S = 200
    "Vanilla": "90.9 72.6 0.216",
    "Dropout": "91.4 72.0 0.211",
    "EMP": "92.0 74.0 0.136",
    "ECMP": "91.9 73.5 0.0873",
}


def patch_samples(setting: Setting) -> Suite:
    """EMP, ECMP and dropout on images by number of draws (Tables 6 and 9-11)."""
    jobs = {name: job(setting, name) for name in ROWS}
    one = jobs["Vanilla"]
    as_printed = one.source.name == "cifar100"
    return Suite(
        paper=PAPER,
        tables=(
            Table(
                title=f"Patching paper, Table 6: {one.source.name}, {one.net} (paper: cifar100, PyramidNet-110(270))",
                measures=MEASURES,
                rows=tuple(
                    Row(name=name, job=made, paper=printed(MEASURES, TABLE[name])) for name, made in jobs.items()
                ),
                claim="EMP and ECMP are more accurate and far better calibrated than the plain network; dropout is not."
                + ("" if as_printed else f" Its numbers are of CIFAR-100, ours of {one.source.name}."),
            ),
        ),
        studies=(
            Study(
                name="sample-size",
                title=f"Patching paper, Tables 9-11: accuracy and calibration by number of draws, {one.source.name}",
                claim="more draws calibrate better and are more accurate, up to about a hundred; dropout gains little.",
                jobs=tuple(jobs.values()),
                measure=sample_size.by_sample_size,
                draw=sample_size.draw_sizes,
                say=sample_size.say_sizes,
            ),
        ),
    )


def job(setting: Setting, name: str) -> Job:
    """Return the job of a row; the dropout network has a dropout layer of rate 0.005 before every norm."""
    source, net = place(setting)
    return Job(
        source=source,
        net=f"{net}+dropout" if name == "Dropout" else net,
        method=ROWS[name],
        label=LABELS[name],
        recipe=recipe(setting, source),
        evaluation=EvaluationSpec(
            samples=setting.pick(quick=20, short=200, full=200),
            shift=False,
            test_images=setting.pick(quick=300, short=0, full=0),
        ),
    )


def place(setting: Setting) -> tuple[DataSpec, str]:
    """Return data and network: the paper's in full; in short CIFAR-10 with a WRN-16-4; in quick the digits."""
    if setting.budget == "quick":
        return setting.source("digits", quick_rows=1000), "small"
    name = "cifar100" if setting.budget == "full" and setting.has("cifar100") else "cifar10"
    return setting.source(name, quick_rows=0), setting.pick(quick="", short="wrn-16-4", full="pyramidnet-110-270")


def recipe(setting: Setting, source: DataSpec) -> Recipe:
    """Return the recipe of all rows: the main job's, and in full the paper's Adam, 400 epochs in batches of 256.

    The paper adds 0.001 / 256 times the squared norm of all parameters to the loss, a weight decay of twice that.
    """
    if setting.budget == "quick":
        return setting.recipe(Recipe(epochs=6, batch_size=32, lr=0.1, weight_decay=1e-4))
    if setting.budget == "short":
        return setting.recipe(recipe_of("short", kind="image", rows=50_000, augment="crop_flip"))
    paper = Recipe(
        epochs=400, batch_size=256, optimizer="adam", lr=1e-3, schedule="constant", weight_decay=2 * 0.001 / 256,
        augment="crop_flip",
    )  # fmt: skip
    return setting.recipe(paper)
