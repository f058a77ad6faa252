"""The prose of the comparisons (digits, Fashion-MNIST, CIFAR-10) says what their result files say."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from functools import cache
from typing import Any

import pytest

from leanbayes.metrics import ensemble_equivalent
from leanbayes.metrics.classification import Equivalent
from leanbayes.shift import corrupted_means, mean_corruption_error, relative_mean_corruption_error
from tests.docs.pages import file_of, lacking, RESULTS, span, unsaid

LEAN = ("rank1", "implicit", "batch_ensemble")
PATCHES = ("patch", "patch[crossed=true]")
FOLDERS = {"digits": "digits/small", "fashion-mnist": "fashion-mnist/lenet", "cifar10": "cifar10/wrn-16-4"}


@cache
def runs(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of every method, by seed."""
    folders = sorted((RESULTS / name / FOLDERS[name]).iterdir())
    return {
        folder.name: [json.loads(file.read_text()) for file in sorted(folder.glob("seed*/result.json"))]
        for folder in folders
    }


def metric(run: dict[str, Any], key: str) -> float:
    """Return a figure of the test set, or the NLL over all corruptions."""
    return corrupted_means(run["metrics"]["shift"])["nll"] if key == "corrupted" else run["metrics"]["test"][key]


def training(run: dict[str, Any]) -> float:
    """Return the price of a training: its first epochs are plain, the others cost a step ratio each."""
    epochs, plain = run["recipe"]["epochs"], run["recipe"]["convert_at_epoch"] or 0
    return (plain + (epochs - plain) * run["cost"]["train_step_ratio"]) / epochs


def paired(name: str, label: str, key: str = "cnll") -> tuple[float, float | None]:
    """Return the mean difference to the plain network of the same seed, and its standard error over seeds."""
    found = runs(name)
    pairs = zip(found[label], found["plain"], strict=True)
    assert all(one["seed"] == other["seed"] for one, other in zip(found[label], found["plain"], strict=True))
    differences = [metric(one, key) - metric(other, key) for one, other in pairs]
    several = len(differences) > 1
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if several else None
    return statistics.fmean(differences), error


def mean(name: str, label: str, key: str) -> float:
    return statistics.fmean(metric(run, key) for run in runs(name)[label])


def worth(name: str, label: str) -> Equivalent:
    """Return the networks of a deep ensemble that a method is worth, by its mean calibrated NLL."""
    curve = {1: mean(name, "plain", "cnll"), 4: mean(name, "deep_ensemble", "cnll")}
    return ensemble_equivalent(mean(name, label, "cnll"), curve)


def signed(difference: float, error: float | None) -> str:
    return f"{difference:+.4f}" + ("" if error is None else f" ± {error:.4f}")


@pytest.mark.parametrize("name", ["digits", "fashion-mnist", "cifar10"])
def test_differences_are_paired_by_seed_and_steps_stand_next_to_trainings(name):
    rows = []
    for label, found in runs(name).items():
        if label == "plain":
            continue
        step = statistics.fmean(run["cost"]["train_step_ratio"] for run in found)
        whole = statistics.fmean(map(training, found))
        prices = [f"{step:.2f}", f"{whole:.2f}", f"{found[0]['cost']['passes']:.0f}"]
        rows.append([label, signed(*paired(name, label)), f"{mean(name, label, 'disagreement'):.2f}", *prices])
    assert lacking(f"docs/results/{name}.md", rows) == []


def test_fashion_mnist_in_short():
    def told(label: str) -> str:
        return signed(*paired("fashion-mnist", label))

    errors = {label: difference / error for label in LEAN for difference, error in [paired("fashion-mnist", label)]}
    assert min(errors["rank1"], errors["batch_ensemble"]) > 2
    assert abs(errors["implicit"]) < 2
    for label in LEAN:
        assert all(paired("fashion-mnist", label, key)[0] < 0 for key in ("nll", "ece"))
    sentences = [
        f"implicit nodes are level with the plain network ({told('implicit')}), rank-1 ({told('rank1')}) and "
        f"BatchEnsemble ({told('batch_ensemble')}) are worse than it; a deep ensemble of four is far better "
        f"({told('deep_ensemble')})."
    ]
    assert unsaid("docs/results/fashion-mnist.md", sentences) == []


# ------------------------------------------------------------------------------------ CIFAR-10, one seed


def cifar(label: str, key: str) -> float:
    return mean("cifar10", label, key)


def shifted(label: str) -> tuple[float, float]:
    """Return mCE and relative mCE in percent."""
    rows = [runs("cifar10")[name][0]["metrics"]["shift"] for name in (label, "plain")]
    return 100 * mean_corruption_error(*rows), 100 * relative_mean_corruption_error(*rows)


def test_cifar_has_one_seed_and_its_error_is_that_of_a_share():
    (plain,) = runs("cifar10")["plain"]
    share, rows = cifar("plain", "accuracy"), plain["data"]["test"]
    error = 100 * math.sqrt(share * (1 - share) / rows)
    gaps = [100 * abs(cifar(label, "accuracy") - share) for label in (*LEAN, *PATCHES)]
    assert max(gaps) < 2 * error
    said = [
        f"One standard error of an accuracy on {rows:,} images is {error:.2f} points; the lean methods and patches "
        f"differ from the plain network by at most {max(gaps):.2f}, so that no difference in accuracy on the clean "
        "test set can be told from chance."
    ]
    assert unsaid("docs/results/cifar10.md", said) == []


def test_cifar_in_short():
    said = [
        f"rank-1 has {cifar('rank1', 'cnll'):.3f}, implicit nodes {cifar('implicit', 'cnll'):.3f}, BatchEnsemble "
        f"{cifar('batch_ensemble', 'cnll'):.3f}, the plain network {cifar('plain', 'cnll'):.3f} and a deep ensemble of "
        f"four {cifar('deep_ensemble', 'cnll'):.3f}.",
        f"So rank-1 and implicit nodes are worth {worth('cifar10', 'rank1').networks:.1f} and "
        f"{worth('cifar10', 'implicit').networks:.1f} networks, along a curve a + b / K through the two ensembles of "
        "this page, one and four networks.",
    ]
    assert worth("cifar10", "batch_ensemble").bound == "at most"
    assert unsaid("docs/results/cifar10.md", said) == []


def test_cifar_on_the_measured_curve():
    """The ruler has the recipe of this page, other runs, and every number of networks from one to eight."""
    ruler = file_of("ruler/ruler.json")
    curve = next(each for each in ruler["curves"] if each["net"] == "wrn-16-4")["curve"]
    assert [row["networks"] for row in curve] == list(range(1, 9))
    sizes = {row["networks"]: row["cnll"]["mean"] for row in curve}
    rank1, implicit, plain = (
        f"{ensemble_equivalent(cifar(label, 'cnll'), sizes).networks:.2f}" for label in ("rank1", "implicit", "plain")
    )
    both = {method["method"]: method["parts"]["both"] for method in ruler["methods"]}
    less = {name: signed(part["paired"]["mean"], part["paired"]["se"]) for name, part in both.items()}
    seeds = {name: f"{part['networks']:.2f} ± {part['se']:.2f}" for name, part in both.items()}
    said = [
        f"On it this page's rank-1 is at {rank1}, implicit nodes at {implicit}, and its plain network, one good seed, "
        f"at {plain}. With three seeds the ruler has {seeds['rank1']} and {seeds['implicit']}.",
        f"three seeds of the same recipe: rank-1 {less['rank1']}, implicit nodes {less['implicit']}, BatchEnsemble "
        f"{less['batch_ensemble']}, each less the plain network of its seed.",
    ]
    assert unsaid("docs/results/cifar10.md", said) == []
    assert all(len(part["by_seed"]) == 3 for part in both.values())


@pytest.mark.parametrize("label", ["plain", *LEAN])
def test_the_ruler_has_the_recipe_of_the_page(label):
    (own,) = runs("cifar10")[label]
    other = next(
        run
        for run in file_of("ruler/runs.json")
        if (run["method"]["name"], run["network"]["name"], run["seed"]) == (label, "wrn-16-4", 0)
    )
    assert own["method"]["fields"] == other["method"]["fields"]
    shared = own["recipe"].keys() - {"accelerator"}
    assert {name: own["recipe"][name] for name in shared} == {name: other["recipe"][name] for name in shared}


def test_the_readme_and_the_recipes_claim_no_larger_gain():
    for name, label in itertools.product(("cifar10", "fashion-mnist"), LEAN):
        assert all(paired(name, label, key)[0] < 0 for key in ("nll", "ece", "corrupted"))
    assert all(paired("digits", label, "nll")[0] > 0 for label in LEAN)
    most = max(worth("fashion-mnist", label).networks for label in ("rank1", "implicit"))
    ruler = json.loads((RESULTS / "ruler" / "ruler.json").read_text())
    found = {method["method"]: method["parts"]["both"] for method in ruler["methods"]}
    both = {name: f"{found[name]['networks']:.2f} ± {found[name]['se']:.2f}" for name in ("rank1", "implicit")}
    said = [
        f"`Rank1` is worth {both['rank1']} and `ImplicitNodes` {both['implicit']} networks of a deep ensemble on",
        f"(WRN-16-4, three seeds), and no more than {most:.1f} on",
        "`BatchEnsemble` is worth no more than 1.0 on both.",
        "also a better NLL under corruption (on CIFAR-10 [one seed](docs/results/cifar10.md))",
    ]
    assert found["batch_ensemble"]["bound"] == worth("fashion-mnist", "batch_ensemble").bound == "at most"
    plain = next(curve for curve in ruler["curves"] if curve["net"] == "wrn-16-4")["by_seed"]
    for label, key in itertools.product(LEAN, ("nll", "ece")):
        assert all(figures[key] < plain[seed][key] for seed, figures in found[label]["by_seed"].items())
    assert all(len(method["seeds"]) == 3 for method in ruler["methods"])
    assert unsaid("README.md", said) == []


def test_cifar_costs():
    found = runs("cifar10")
    steps = {label: found[label][0]["cost"]["train_step_ratio"] for label in (*LEAN, *PATCHES)}
    recipe = found["rank1"][0]["recipe"]
    late = f"{recipe['convert_at_epoch']} of {recipe['epochs']} epochs"
    price = file_of("cost-h200.json")["answer"]["WRN-16-4, 4096"]["ratio"]
    said = [
        f"A training costs {span((training(found[label][0]) for label in LEAN), 1)} plain ones, but only because "
        f"{late} are plain:",
        f"a step after the conversion costs {steps['rank1']:.2f} (rank-1), {steps['batch_ensemble']:.2f} "
        f"(BatchEnsemble) and {steps['implicit']:.2f} (implicit nodes), one of patching, which is trained from the "
        f"start, {steps['patch']:.2f} (EMP) and {steps['patch[crossed=true]']:.2f} (ECMP)",
        f"measured since on 4,096 images ([prices](cost.md)): {price['rank1']:.2f} (rank-1), {price['implicit']:.2f} "
        f"(implicit nodes) and {price['patch']:.2f} (EMP)",
    ]
    assert unsaid("docs/results/cifar10.md", said) == []


def test_cifar_patching_is_better_in_some_and_worse_in_others():
    (emp, emp_relative), (ecmp, ecmp_relative) = (shifted(label) for label in PATCHES)
    assert min(emp, ecmp, emp_relative, ecmp_relative) > 100
    keys = ("nll", "ece", "corrupted", "accuracy", "cnll")
    nll, ece, corrupted, accuracy, cnll = ([cifar(label, key) for label in (*PATCHES, "plain")] for key in keys)
    assert all(max(values[:2]) < values[2] for values in (nll, ece, corrupted))
    assert min(cnll[:2]) > cnll[2]
    assert max(accuracy[:2]) <= accuracy[2]

    def told(values: list[float], digits: int, unit: str = "") -> str:
        one, other, plain = (f"{value:.{digits}f}" for value in values)
        return f"({one} and {other}{unit} against {plain}{unit})"

    def percent(values: list[float]) -> list[float]:
        return [100 * value for value in values]

    said = [
        f"Better than the plain network are NLL {told(nll, 3)}, ECE {told(percent(ece), 1, ' %')} and NLL under "
        f"corruption {told(corrupted, 2)}.",
        f"Not better are accuracy {told(percent(accuracy), 2, ' %')}, calibrated NLL {told(cnll, 3)}, mCE ({emp:.1f} "
        f"and {ecmp:.1f} %; the plain network has 100 %, the paper prints 97.8 and 99.5 for ImageNet-C) and relative "
        f"mCE ({emp_relative:.1f} and {ecmp_relative:.1f} %; the paper 97.4 and 102).",
    ]
    assert unsaid("docs/results/cifar10.md", said) == []
