"""Sentences with numbers in the recipes and in the guide to the papers, against committed files."""

from __future__ import annotations

import math
import statistics

import leanbayes as lb
from leanbayes.methods import all_methods
from leanbayes.training.recipe import rate
from leanbayes_papers import SUITES
from leanbayes_papers.harness import printed
from tests.docs.pages import file_of, RESULTS, text_of, unsaid
from tests.docs.test_comparison_pages import mean, training
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
    ruler = {method["method"]: method["parts"]["both"] for method in file_of("ruler/ruler.json")["methods"]}
    networks = [f"{ruler[label]['networks']:.2f} ± {ruler[label]['se']:.2f}" for label in ("rank1", "implicit")]
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
        f"gain in calibrated NLL, worth {networks[0]} and {networks[1]} networks ([three seeds](results/ruler.md));",
        f"costs about {eager:.1f} plain steps, compiled {compiled:.2f} ([prices](results/cost.md)).",
        f"The {eager:.1f} is an indication only: another training used the GPU.",
    ]
    assert "rank1" in GPU["train_step"]["WRN-16-4, 128, eager"]["indication"]
    assert unsaid("docs/recipes.md", said) == []


def test_the_recipes_of_nested_networks_have_the_figures_of_their_trials():
    trials, longer = file_of("nested/trials.json")["rows"], file_of("nested/longer.json")["rows"]
    widths = file_of("nested/widths-cifar10.json")["numbers"]["methods"]

    def full(name: str) -> float:
        return float(trials[name]["1.0"]["accuracy"])

    def of(epochs: str) -> tuple[float, float]:
        return longer[f"BN3, {epochs}"]["1.0"]["accuracy"], longer[f"plain, {epochs}"]["1.0"]["accuracy"]

    rarer = "seven of ten passes whole"
    pairs = [("BN3, 30 epochs", f"BN3, {rarer}"), ("BN3, 60 epochs", f"BN3, 60 epochs, {rarer}")]
    gains = sorted(longer[b]["1.0"]["accuracy"] - longer[a]["1.0"]["accuracy"] for a, b in pairs)
    losses = sorted(longer[a]["0.125"]["accuracy"] - longer[b]["0.125"]["accuracy"] for a, b in pairs)
    assert [round(loss) for loss in losses] == [3, 4]
    assert " 20 epochs of SGD" in file_of("nested/trials.json")["settings"]
    said = [
        f"In 20 epochs annealing alone made it {full('BN3'):.0f} to {full('BN3, annealed to the end'):.0f} % at full "
        f"width, and {full('BN3, a fifth of the divergence'):.0f} to {full('BN3, posterior_lr as lr'):.0f} % with less "
        f"divergence or a slower posterior (plain: {full('plain'):.1f} %).",
        "the accuracy was then {:.1f} % on held-out rows (plain: {:.1f} %)".format(*of("30 epochs")),
        "The rest is epochs: {:.1f} against {:.1f} % with 60.".format(*of("60 epochs")),
        f"with 90 epochs has {widths['BN3']['1']['accuracy']:.1f} against {widths['plain']['1']['accuracy']:.1f} % on",
        f"That is worth {gains[0]:.1f} to {gains[1]:.1f} points at full width, and costs three to four at an eighth.",
    ]
    assert widths["BN3"]["1"]["nll"] < widths["plain"]["1"]["nll"]
    assert unsaid("docs/recipes.md", said) == []


def test_rates_of_the_posteriors_are_those_of_methods_and_papers():
    recipe = lb.Recipe(epochs=40, warmup_epochs=3)
    rates = [rate(recipe, epoch + step / 100) for epoch in range(40) for step in range(100)]
    late = f"{100 * sum(rates[2800:]) / sum(rates):.0f} % of its sum"
    tuned = printed("implicit", "table2")
    times = {name: round(row["posterior_lr"].value / row["lr"].value) for name, row in tuned.items()}
    assert {name: method.posterior_rate for name, method in all_methods().items() if method.late} == {
        "rank1": 1.0,
        "batch_ensemble": 0.5,
        "implicit": 1.0,
        "mean_field": 1.0,
    }
    assert times["cifar10 VGG-16"] == times["cifar10 WRN-28-10"]
    said = [
        f"after 28 of 40 epochs, with three of warm-up, {late}.",
        f"({times['cifar10 VGG-16']} times the weights' on CIFAR-10, {times['cifar100 VGG-16']} and "
        f"{times['cifar100 WRN-28-10']} times on CIFAR-100)",
    ]
    assert unsaid("docs/recipes.md", said) == []


def test_digits_under_corruption_have_a_third_of_the_nll():
    plain = mean("digits", "plain", "corrupted")
    for label in ("rank1", "implicit"):
        assert round(plain / mean("digits", label, "corrupted")) == 3


def test_plain_networks_of_tables_and_their_reference():
    found = file_of("tables/uci.json")
    sets = {one["set"] for one in found}
    both = [(one["set"], one["rows"]["plain"]["rmse"], one["rows"]["reference"]["rmse"]) for one in found]
    means = [sum(p for s, p, _ in both if s == name) / sum(r for s, _, r in both if s == name) for name in sets]
    assert len(sets) == 9
    single = sorted((p / r, name) for name, p, r in both)
    assert {name for _, name in (single[0], single[-1])} == {"yacht"}
    naval = next(o for o in file_of("tables/noise.json") if (o["set"], o["rows"]) == ("naval", 3000))
    (before,) = naval["plain"]["epochs"]
    best = {t["method"]: t["epochs"][0] for t in naval["trials"] if "squared 0.25" in (t.get("rules") or ())}
    near = sum(value <= 1.05 for value in means)
    gains = {
        method: {
            name: [o["rows"][method]["lpd"] - o["rows"]["plain"]["lpd"] for o in found if o["set"] == name]
            for name in sets
        }
        for method in ("implicit", "rank1", "patch")
    }
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    above = [words[sum(sum(one) > 0 for one in by_set.values())] for by_set in gains.values()]
    always = [words[sum(min(one) > 0 for one in by_set.values())] for by_set in gains.values()]
    minutes = sum(one["seconds"] for one in found) / 60
    said = [
        f"over three splits is at most 1.05 of the reference's on {words[near]} of nine sets (naval: {max(means):.3f})."
        f" Single splits differ more, from {single[0][0]:.2f} to {single[-1][0]:.2f} (both yacht).",
        f"`implicit` is above the plain network on {above[0]} of nine sets, `rank1` on {above[1]} and `patch` on "
        f"{above[2]}; in all three splits, on {always[0]}, {always[1]} and {always[2]}.",
        f"took {minutes:.0f} minutes",
        f"at its best after {before} epochs, the converted ones {best['rank1'] - before} (`rank1`) and "
        f"{best['implicit'] - before} (`implicit`) epochs after the conversion.",
    ]
    assert unsaid("docs/results/tables.md", said) == []
