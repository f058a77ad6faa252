"""Table 1 of the variance paper: accuracy of dropout and variance networks by three procedures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import leanbayes as lb
from leanbayes_papers.harness import Column, plot_rows, printed, Record, Run, Study, Suite, Table, Trained, TrainingSpec
from leanbayes_papers.harness.numbers import numbers
from leanbayes_papers.variance import networks as nets
from leanbayes_papers.variance import PAPER

PROCEDURES = ("stochastic", "deterministic", "ensemble")
ACCURACIES = tuple(Column(name, f"{name}, %", ".1f") for name in PROCEDURES)


def variance_table1(run: Run) -> Suite:
    """Accuracy of dropout and variance networks: stochastic, deterministic and ensemble (Table 1)."""
    variance = lb.VarianceLayers()
    small = {
        "Dropout": nets.lenet(run, "lenet-dropout", dropout=True),
        "Variance": nets.lenet(run, "lenet-variance", variance, layers=nets.ALL_OF_LENET),
    }
    studies = [table_of(nets.digits_name(run), "mnist", small)]
    for data in ("cifar10", "cifar100"):
        large = {
            "Dropout": nets.vgg(run, data, f"{data}-dropout"),
            "Variance": nets.vgg(run, data, f"{data}-variance", variance, layers=nets.VGG_LAYERS),
        }
        studies.append(table_of(data, data, large))
    return Suite(paper=PAPER, studies=tuple(studies))


def table_of(data: str, paper: str, specs: Mapping[str, TrainingSpec]) -> Study:
    """Return the study of one data set, with the paper's numbers of this or another."""
    table = Table(
        by=("method",),
        columns=(*ACCURACIES, Column("log_alpha", "log alpha by layer", text=write_log_alphas)),
        paper={(name,): row for name, row in printed("variance", f"table1 {paper}").items()},
    )
    words = {"data": data, "alpha": numbers("variance")["alpha"][paper]}
    plot = partial(plot_rows, table=table)
    return Study.of("variance", "table1", words, measure=partial(measure, specs=specs), tables=(table,), plot=plot)


def measure(
    run: Run,
    *,
    specs: Mapping[str, TrainingSpec],
    data: str = "",
    more: Callable[[Trained, Run], Record] = lambda trained, run: {},
) -> list[Record]:
    """Train every network with every seed and evaluate it by the three procedures, with noise on activations."""
    records = []
    for name, spec in specs.items():
        for seed in run.seeds:
            trained = run.train(spec, seed)
            test, samples = trained.test(nets.TEST_ROWS[run.budget]), nets.SAMPLES[run.budget]
            found = lb.phase.accuracies(trained.model, test, samples=samples, noise="activation")
            accuracies = {procedure: 100 * found[procedure] for procedure in PROCEDURES}
            names = {"method": name, "seed": seed}
            records.append(names | accuracies | nets.log_alphas(trained.model) | more(trained, run))
    return records


def write_log_alphas(records: Sequence[Record]) -> str:
    """Write the log alpha of every layer, of the first seed."""
    found = {name.partition(" ")[2]: value for name, value in records[0].items() if name.startswith("log_alpha ")}
    return ", ".join(f"{path} {value:.1f}" for path, value in found.items() if value is not None) or "-"
