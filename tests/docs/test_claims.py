"""Sentences with numbers in the recipes and in the guide to the papers, against committed files."""

from __future__ import annotations

import math
import statistics

from leanbayes_papers import SUITES
from tests.docs.pages import file_of, RESULTS, text_of, unsaid
from tests.docs.test_comparison_pages import mean, training, worth
from tests.docs.test_comparison_pages import runs as runs_of
from tests.docs.test_prices import GPU


def test_figure_1_of_the_implicit_paper_has_five_seeds():
    found = file_of("x-cubed.json")
    rows = {
        method: [row for row in found["rows"] if row["method"] == method] for method in ("mean field", "implicit nodes")
    }
    assert all([row["seed"] for row in each] == [0, 1, 2, 3, 4] for each in rows.values())

    def told(method: str) -> str:
        values = [row["rmse"] for row in rows[method]]
        return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}"

    outside = {method: statistics.fmean(row["outside"] for row in each) for method, each in rows.items()}
    said = [
        f"is {told('mean field')} for mean field, which is worse than a constant ({found['constant']:.1f}), and "
        f"{told('implicit nodes')} for implicit nodes.",
        f"its epistemic standard deviation is {outside['mean field']:.0f} beyond |x| = 5, that of implicit nodes "
        f"{outside['implicit nodes']:.0f}.",
    ]
    assert unsaid("docs/reproduce.md", said) == []


def test_suites_without_results_are_named():
    text = text_of("docs/reproduce.md")
    start = text.index("**Not run yet** beyond `quick`:")
    named = text[start : text.index("Their tables and figures have no committed numbers")]
    silent = {
        "rank1-cifar",
        "rank1-ablations",
        "implicit-cifar",
        "implicit-complexity",
        "implicit-noise",
        "patch-samples",
    }
    assert silent <= set(SUITES)
    assert {name for name in SUITES if name in named} == silent
    assert not any((RESULTS / name).exists() for name in silent)


def test_late_conversion_is_compared_only_where_files_compare_it():
    records, text = file_of("ehr/trials.json"), file_of("text/trials.json")
    methods = sorted({row["row"] for row in records} - {"Deterministic"})

    def best(name: str, start: str) -> float:
        return min(row["nll"] for row in records if row["row"] == name and row["setting"].startswith(start))

    won = sum(best(name, "after") < best(name, "from the start") for name in methods)
    pairs = [
        (late["nll"], early["nll"])
        for late in text
        for early in text
        if late["row"] == early["row"]
        and late["setting"].startswith("after 2 epochs, ")
        and early["setting"] == late["setting"].replace("after 2 epochs", "from the start")
    ]
    said = [
        f"late conversion had the better NLL for {won} of {len(methods)} methods on [health records]",
        f"and for {sum(late < early for late, early in pairs)} of {len(pairs)} on [text]",
        *_said_of_images(),
    ]
    assert unsaid("docs/recipes.md", said) == []


def _said_of_images() -> list[str]:
    """Return what all seeds agree on: after which share the ECE is smallest, and the calibrated NLL worst."""
    late = file_of("ruler/late.json")
    by_share = {
        round(100 * each["convert_at_epoch"] / late["recipe"]["epochs"]): each["parts"]["both"]["by_seed"]
        for each in late["conversions"]
    }

    def least(figure: str, sign: int = 1) -> set[int]:
        return {min(by_share, key=lambda share: sign * by_share[share][seed][figure]) for seed in ("0", "1", "2")}

    (best,) = least("ece")
    (worst,) = least("cnll", -1)
    *others, last = (str(share) for share in by_share if share != worst)
    return [
        f"calibrated NLL does not tell conversion after {', '.join(others)} and {last} % of the epochs apart",
        f"the ECE is smallest after {best} % in every seed, the calibrated NLL worst after {worst} %.",
    ]


def test_the_recipes_say_what_the_comparisons_say():
    def told(name: str, label: str) -> str:
        return f"{mean(name, label, 'nll'):.3f} and {100 * mean(name, label, 'ece'):.1f} %"

    def shown(label: str) -> str:
        return f"{100 * mean('cifar10', label, 'accuracy'):.1f} %, {told('cifar10', label)}"

    lean = ("batch_ensemble", "rank1", "implicit")
    costs = {
        name: sorted(statistics.fmean(map(training, runs_of(name)[label])) for label in lean)
        for name in ("fashion-mnist", "cifar10")
    }
    spans = {name: f"at {found[0]:.1f} to {found[-1]:.1f} trainings" for name, found in costs.items()}
    cnll = [f"{mean('cifar10', label, 'cnll'):.3f}" for label in ("rank1", "implicit", "plain")]
    networks = [f"{worth('cifar10', label).networks:.1f}" for label in ("rank1", "implicit")]
    eager, compiled = (GPU["train_step"][f"WRN-16-4, 128, {mode}"]["ratio"]["rank1"] for mode in ("eager", "compiled"))
    said = [
        f"plain NLL {mean('fashion-mnist', 'plain', 'nll'):.3f} and ECE "
        f"{100 * mean('fashion-mnist', 'plain', 'ece'):.1f} %, "
        f"BatchEnsemble {told('fashion-mnist', 'batch_ensemble')}, rank-1 {told('fashion-mnist', 'rank1')}, implicit "
        f"nodes "
        f"{told('fashion-mnist', 'implicit')}, {spans['fashion-mnist']}.",
        f"one seed: plain {shown('plain')}; BatchEnsemble {shown('batch_ensemble')}; rank-1 {shown('rank1')}; "
        f"implicit nodes "
        f"{shown('implicit')}, {spans['cifar10']}.",
        f"gain in calibrated NLL ({cnll[0]} and {cnll[1]} against {cnll[2]}), worth {networks[0]} and {networks[1]} "
        f"networks;",
        f"costs about {eager:.1f} plain steps, compiled {compiled:.2f} ([prices](results/cost.md)).",
    ]
    assert unsaid("docs/recipes.md", said) == []
