"""Implicit nodes as networks and posteriors grow (Trinh, Kaski, Heinonen, 2020, Figures 1, 2, 4 and Table 6)."""

from __future__ import annotations

from leanbayes.compare.job import EvaluationSpec, Job
from leanbayes.methods._base import Method
from leanbayes.methods.implicit import ImplicitNodes
from leanbayes.training import Recipe
from leanbayes_papers import components, growth, x_cubed
from leanbayes_papers.implicit_cifar import INIT_STD, job, MEAN_FIELD, MEASURES, network, numbers_of, PAPER
from leanbayes_papers.study import Study
from leanbayes_papers.suite import printed, Row, Setting, Suite, Table

WIDTHS = {"lenet": "42K", "lenet-w2": "165K", "lenet-w4": "657K", "lenet-w8": "2619K"}
"""LeNets by width, with the numbers of parameters that figure 4 gives."""

NODES = ImplicitNodes(components=8, prior_std=0.1, init_spread=0.5, init_std=INIT_STD)
GROWTH = (
    "implicit nodes improve as the network grows; mean field degrades significantly after 165K parameters (a figure "
    "without printed numbers)."
)
TABLE6 = {  # error in per cent, NLL, ECE; VGG-16 on CIFAR-100
    4: "26.22±0.28 1.1249±0.0189 0.0807±0.0050",
    8: "25.89±0.19 1.0612±0.0074 0.0755±0.0018",
    16: "25.72±0.08 1.0325±0.0069 0.0713±0.0028",
    24: "25.53±0.34 1.0467±0.0184 0.0755±0.0035",
    32: "25.67±0.23 1.0758±0.0089 0.0828±0.0019",
}


def implicit_complexity(setting: Setting) -> Suite:
    """Implicit nodes and mean field on growing networks; K from 4 to 32; components (Figures 1, 2, 4, Table 6)."""
    nets = list(WIDTHS)[: setting.pick(quick=3, short=4, full=4)]
    nodes = {net: _lenet(setting, net, "implicit-k8", NODES) for net in nets}
    weights = {net: _lenet(setting, net, "mean_field", MEAN_FIELD) for net in nets}
    rows = [(name, made, net) for net in nets for name, made in (("iBNN", nodes[net]), ("BNN-VI", weights[net]))]
    return Suite(
        paper=PAPER,
        tables=(
            Table(
                title="Implicit-nodes paper, Figure 4: Fashion-MNIST, LeNets of more and more parameters",
                measures=("error", "nll", "ece", "parameters"),
                rows=tuple(Row(name=f"{name}, {WIDTHS[net]}", job=made, paper={}) for name, made, net in rows),
                claim=GROWTH,
            ),
            _sizes(setting),
        ),
        studies=(
            Study(
                name="growth",
                title="Implicit-nodes paper, Figure 4: test error by size of the network",
                claim=GROWTH,
                jobs=(*nodes.values(), *weights.values()),
                measure=growth.errors_by_size,
                draw=growth.draw_growth,
                say=growth.say_growth,
            ),
            Study(
                name="components",
                title="Implicit-nodes paper, Figure 2: eight components of a LeNet on Fashion-MNIST",
                claim="the components surround the shared weights and cover a wide mode, which generalises better.",
                jobs=(nodes["lenet"],),
                measure=components.map_components,
                draw=components.draw_map,
                say=components.say_map,
            ),
            Study(
                name="x-cubed",
                title="Implicit-nodes paper, Figure 1: y = x^3 with 1 to 5 hidden layers",
                claim="mean field collapses as layers are added; implicit nodes keep a good fit and their uncertainty.",
                measure=x_cubed.regress,
                draw=x_cubed.draw_regression,
                say=x_cubed.say_regression,
            ),
        ),
    )


def _sizes(setting: Setting) -> Table:
    """Return Table 6: on CIFAR-100 where it is here, else on CIFAR-10, with those numbers that Tables 3-5 have."""
    data = "cifar100" if setting.has("cifar100") else "cifar10"
    told = "CIFAR-100 is not here; the paper's numbers on CIFAR-10 are those of Tables 3-5" if data == "cifar10" else ""
    rows = []
    for k, line in TABLE6.items():
        theirs = printed(MEASURES, line) if data == "cifar100" else numbers_of(f"iBNN-{k}", data, "VGG-16")
        rows.append(Row(name=f"K = {k}", job=job(setting, f"iBNN-{k}", data, "VGG-16"), paper=theirs))
    return Table(
        title=f"Implicit-nodes paper, Table 6: {data}, {network(setting, 'VGG-16')} (paper: CIFAR-100, VGG-16)",
        measures=MEASURES,
        rows=tuple(rows),
        claim=f"NLL and ECE decline beyond K = 16, the error beyond 24{f' ({told})' if told else ''}.",
    )


def _lenet(setting: Setting, net: str, label: str, method: Method) -> Job:
    """Return a LeNet on Fashion-MNIST; the paper does not say how it was trained."""
    epochs = setting.pick(quick=5, short=30, full=100)
    recipe = Recipe(
        epochs=epochs,
        optimizer="adam",
        lr=1e-3,
        posterior_lr=1e-2,
        weight_decay=0.0,
        anneal_epochs=round(epochs / 2),
        batch_size=setting.pick(quick=64, short=128, full=128),
    )
    return Job(
        source=setting.source("fashion-mnist", quick_rows=2000),
        net=net,
        method=method,
        label=label,
        recipe=setting.recipe(recipe),
        evaluation=EvaluationSpec(
            samples=setting.pick(quick=16, short=40, full=40),
            shift=False,
            test_images=setting.pick(quick=1000, short=0, full=0),
        ),
    )
