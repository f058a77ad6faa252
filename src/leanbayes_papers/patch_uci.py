"""Ensemble model patching on the UCI regressions (Chang, Yao, Williams-King, Lipson, 2019, Tables 12 and 13)."""

from __future__ import annotations

from functools import partial

from leanbayes.evaluation.statistics import estimate
from leanbayes_papers.study import Case, Numbers, Study
from leanbayes_papers.suite import Printed, Setting, Suite
from leanbayes_papers.uci_cells import run
from leanbayes_papers.uci_page import draw_set, NOTES, overview, say_set
from leanbayes_papers.uci_protocol import METHODS, SETS

PAPER = "Ensemble Model Patching: A Parameter-Efficient Variational Bayesian Neural Network (Chang et al., 2019)"
TABLE = {  # columns as in METHODS: ECMP, EMP, dropout, explicit ensemble
    "rmse": {  # Table 12
        "uci-boston": "3.48±0.18 3.56±0.22 3.97±0.26 4.29±0.27",
        "uci-concrete": "5.61±0.14 5.64±0.15 7.06±0.19 8.81±0.15",
        "uci-energy": "1.35±0.06 1.24±0.04 2.63±0.05 3.40±0.31",
        "uci-kin8nm": "0.08±0.00 0.08±0.00 0.08±0.00 0.08±0.00",
        "uci-naval": "0.00±0.00 0.00±0.00 0.01±0.00 0.01±0.00",
        "uci-power": "4.24±0.05 4.29±0.05 4.07±0.04 4.04±0.04",
        "uci-protein": "1.95±0.06 2.00±0.07 2.01±0.07 2.24±0.06",
        "uci-wine-red": "0.60±0.02 0.62±0.02 0.63±0.01 0.88±0.06",
        "uci-yacht": "1.59±0.23 1.60±0.28 12.90±1.26 29.48±5.14",
    },
    "lpd": {  # Table 13
        "uci-boston": "-2.65±0.05 -2.70±0.07 -2.92±0.11 -2.81±0.07",
        "uci-concrete": "-3.46±0.07 -3.59±0.08 -4.60±0.14 -5.09±0.13",
        "uci-energy": "-2.19±0.01 -2.15±0.01 -2.42±0.01 -2.58±0.03",
        "uci-kin8nm": "-2.07±0.00 -2.07±0.00 -2.07±0.00 -2.07±0.00",
        "uci-naval": "-2.07±0.00 -2.07±0.00 -2.07±0.00 -2.07±0.00",
        "uci-power": "-2.95±0.02 -2.99±0.02 -2.90±0.01 -2.87±0.01",
        "uci-protein": "-2.26±0.01 -2.27±0.01 -2.27±0.01 -2.33±0.01",
        "uci-wine-red": "-2.09±0.00 -2.09±0.00 -2.09±0.00 -2.14±0.01",
        "uci-yacht": "-2.25±0.02 -2.22±0.05 -10.79±1.66 -5.24±0.36",
    },
}
CLAIM = "ECMP and EMP have the lowest RMSE on eight of ten sets, and the highest log predictive density on nine."
LEGEND = (
    "Ours: mean ± standard error over the standard splits. Paper: as printed, its ± is the same. A number is "
    "equal to the paper's if both differ by no more than two combined standard errors and 0.005 of rounding."
)
BUDGETS = {
    "quick": "The quick budget shows that everything runs: two sets, two splits, few epochs. It decides nothing.",
    "short": "The short budget has six of the nine sets, and all of the paper's hyper-parameters.",
    "full": "The full budget has all nine sets, and all of the paper's hyper-parameters.",
}
SIX = ("uci-boston", "uci-concrete", "uci-energy", "uci-power", "uci-wine-red", "uci-yacht")


def patch_uci(setting: Setting) -> Suite:
    """EMP, ECMP, dropout and explicit ensembles on the UCI regressions, all splits at once (Tables 12 and 13)."""
    sets = setting.pick(quick=("uci-yacht", "uci-boston"), short=SIX, full=tuple(SETS))
    return Suite(
        paper=PAPER,
        tables=(),
        studies=tuple(
            Study(
                name=name,
                title=f"Ensemble model patching, Tables 12 and 13: {name}",
                claim=f"{CLAIM} {NOTES.get(name, '')}".rstrip(),
                data=(name,),
                measure=partial(measure, name, setting),
                draw=draw_set,
                say=say_set,
            )
            for name in sets
        ),
        overview=overview,
        legend=f"{LEGEND} {BUDGETS[setting.budget]}",
    )


def measure(name: str, setting: Setting, case: Case) -> Numbers:
    """Run the methods on a data set, and put the means over splits beside the paper's."""
    records = run([name], METHODS, case.out, setting, fresh=case.fresh)
    return {"data": name, "rows": [row_of(name, method, records[name, method]) for method in METHODS]}


def numbers_of(name: str, method: str) -> dict[str, Printed]:
    """Return the paper's numbers of a method on a data set, by measure."""
    column = METHODS.index(method)
    return {measure: Printed(lines[name].split()[column]) for measure, lines in TABLE.items()}


def row_of(name: str, method: str, record: Numbers) -> Numbers:
    """Return the means over splits beside the paper's numbers, from the record of a cell."""
    scores: dict[str, list[float]] = record["scores"]
    ours = {measure: estimate(values) for measure, values in scores.items()}
    return {
        "method": method,
        "splits": len(scores["rmse"]),
        "ours": {m: {"mean": found.mean, "sem": found.sem} for m, found in ours.items() if found is not None},
        "paper": {m: {"value": p.value, "spread": p.spread} for m, p in numbers_of(name, method).items()},
        "train_seconds": record["train_seconds"],
    }
