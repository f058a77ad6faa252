"""Words of the results pages (best, before, between, more than) against their files, next to the numbers they hold."""

from __future__ import annotations

import re
import statistics
from itertools import pairwise
from typing import Any

import pytest

from tests.docs.pages import file_of, ROOT, text_of, unsaid

LENGTHS = ("25", "50", "75", "100")

# ------------------------------------------------------------------------------------ variance.md


def curves() -> dict[str, dict[str, list[float]]]:
    return file_of("variance/adversarial.json")["numbers"]["curves"]


def test_attacks_go_as_the_page_says():
    found = curves()
    success = {name: each["success"] for name, each in found.items()}
    entropy = {name: each["entropy"] for name, each in found.items()}
    steps = range(1, len(success["Variance"]))
    others = [name for name in found if name != "Variance ensemble"]
    assert all(success["Variance ensemble"][step] < min(success[name][step] for name in others) for step in steps)
    assert all(entropy["Variance ensemble"][step] > max(entropy[name][step] for name in others) for step in steps)
    third = [name for name in others if name != "Variance"]
    assert all(entropy["Variance"][step] > max(entropy[name][step] for name in third) for step in steps)
    second = [success["Variance"][step] < min(success[name][step] for name in third) for step in steps]
    first = next(step for step in steps if all(second[step - 1 :]))
    deep = [success["Deep ensemble"][step] < success["Variance"][step] for step in steps]
    until = max(step for step in steps if deep[step - 1])
    peaks = sorted(each.index(max(each)) for each in entropy.values())
    growth = {name: max(each) / each[0] for name, each in entropy.items()}
    assert min(growth.values()) > 2
    assert set(sorted(growth, key=growth.__getitem__)[:2]) == {"Variance", "Variance ensemble"}
    assert all(each[-1] < each[0] for each in entropy.values())
    said = [
        f"by entropy after every step, by success from step {first} on.",
        f"at its peak (steps {peaks[0]} to {peaks[-1]}) the entropy of all five is more than twice the clean one",
        f"Up to step {until} the deep ensemble resists better than one variance network.",
    ]
    assert unsaid("docs/results/variance.md", said) == []
    assert min(each[-1] for each in success.values()) > 0.89


def test_the_transition_on_mnist_is_as_the_page_says():
    after = [row["ensemble"] for row in file_of("variance/transition-mnist.json") if row["epoch"] >= 65]
    table = file_of("variance/table1-mnist.json")["numbers"]
    means = table["Variance"]["seeds"][0]["deterministic"]
    lost = table["Dropout"]["seeds"][0]["ensemble"] - table["Variance"]["seeds"][0]["ensemble"]
    said = [
        f"the ensemble stays between {100 * min(after):.1f} and {100 * max(after):.1f} % from there on:",
        f"of all 10,000 the means are right about {means:.2f} %",
        f"on MNIST up to {lost:.1f} points",
    ]
    assert unsaid("docs/results/variance.md", said) == []


def test_bounds_are_higher_than_printed_by_the_factors_of_the_page():
    found = file_of("variance/parameterizations.json")["numbers"].values()
    factors = [row["paper"]["elbo"] / row["seeds"][0]["elbo"] for row in found if row["paper"]["elbo"] is not None]
    said = [f"Our bounds are all higher than the printed ones, by factors of {min(factors):.0f} to {max(factors):.0f}."]
    assert unsaid("docs/results/variance.md", said) == []


# ------------------------------------------------------------------------------------ generation.md


def codes(data: str) -> dict[str, Any]:
    return file_of(f"generation/generation-{data}.json")["numbers"]


def mean(data: str, name: str, length: str, key: str) -> float:
    return statistics.fmean(row[key] for row in codes(data)["methods"][name][length])


@pytest.mark.parametrize("data", ["cifar10", "mnist", "fashion-mnist"])
def test_errors_of_ordered_codes_never_rise(data):
    errors = codes(data)["order"]["VND-AE"]
    fall = errors[0] - errors[-1]
    assert all(later <= earlier + 1e-6 * fall for earlier, later in pairwise(errors))


def test_ordered_codes_need_as_many_dimensions_as_the_page_says():
    needed = {}
    for data in ("cifar10", "mnist", "fashion-mnist"):
        errors = codes(data)["order"]["VND-AE"]
        enough = errors[0] - 0.99 * (errors[0] - errors[-1])
        needed[data] = next(place for place, error in enumerate(errors, 1) if error <= enough)
    said = [
        f"only {needed['cifar10']} of {codes('cifar10')['dimensions']} dimensions for 99 % of what it gains "
        f"({needed['mnist']} of {codes('mnist')['dimensions']} on MNIST, {needed['fashion-mnist']} on Fashion-MNIST).",
    ]
    assert unsaid("docs/results/generation.md", said) == []


def test_no_ordered_code_generates_better_images_on_cifar():
    for length in LENGTHS:
        assert mean("cifar10", "VND-AE", length, "frechet") > mean("cifar10", "VAE", length, "frechet")
    whole = {name: mean("cifar10", name, "100", "frechet") for name in ("VND-AE", "VAE", "BetaVAE", "JointVAE", "SWAE")}
    assert min(whole, key=whole.__getitem__) == "SWAE"
    cut = [mean("cifar10", name, length, "frechet") for name in ("VND-AE", "VAE") for length in LENGTHS]
    assert 77 < min(*cut, *whole.values()) <= max(*cut, *whole.values()) < 84
    smaller = {
        data: [each for each in LENGTHS if mean(data, "VND-AE", each, "frechet") < mean(data, "VAE", each, "frechet")]
        for data in ("mnist", "fashion-mnist")
    }
    assert smaller == {"mnist": ["25"], "fashion-mnist": ["50", "75"]}
    assert unsaid("docs/results/generation.md", ["all of them lie between 77 and 84 unless a VAE is cut,"]) == []


def test_reconstruction_errors_are_above_those_of_the_vae_as_the_page_says():
    def above(data: str) -> str:
        found = [
            100 * (mean(data, "VND-AE", each, "reconstruction") / mean(data, "VAE", each, "reconstruction") - 1)
            for each in LENGTHS
        ]
        return f"{min(found):.0f} to {max(found):.0f} %"

    said = [f"On CIFAR-10 {above('cifar10')}; on MNIST {above('mnist')}; on Fashion-MNIST {above('fashion-mnist')}."]
    assert unsaid("docs/results/generation.md", said) == []


# ------------------------------------------------------------------------------------ other pages


def test_distances_between_samples_are_as_the_page_says():
    """The distance falls by E d(s, s') (1 - 1/S) from one sample to S, so that the fall gives E d(s, s')."""
    models = file_of("annotators/annotators-bsds500.json")["numbers"]["models"]

    def apart(name: str, samples: int, before: str = "") -> float:
        row = models[name]
        return (row[f"{before}ged 1"] - row[f"{before}ged 16"]) / (1 - 1 / samples)

    fall = models["ensemble"]["ged 1"] - models["ensemble"]["ged 16"]
    said = [
        f"two members are {apart('ensemble', 4):.2f} apart ({fall:.3f} over 1 - 1/4), two samples of VND-PUNet "
        f"{apart('VND-PUNet full', 16):.2f}, of P-UNet {apart('P-UNet', 16):.2f} (over 1 - 1/16);",
        f"With balanced masks the ensemble's {apart('ensemble', 4):.2f} becomes "
        f"{apart('ensemble', 4, 'balanced '):.2f}.",
    ]
    assert unsaid("docs/results/annotators.md", said) == []


def test_two_runs_on_the_made_up_set_are_as_near_as_the_page_says():
    now = file_of("annotators/annotators-ambiguous.json")["numbers"]["models"]
    before = file_of("annotators/earlier.json")["ambiguous"]["models"]
    kept = [name for name in now if not name.startswith("BN3") and name != "VND-PUNet 1/3"]
    most = max(abs(now[name]["ged 16"] - before[name]["ged 16"]) for name in kept)
    said = [f"On the made-up set two runs are at most {most:.3f} apart,"]
    assert unsaid("docs/results/annotators.md", said) == []


def test_seeds_of_health_records_differ_as_the_page_says():
    rows = file_of("ehr/ehr.json")["numbers"]["rows"].values()
    spread = [statistics.stdev(seed["set-b"]["nll"] for seed in row["seeds"]) for row in rows]
    said = [f"by a standard deviation of {min(spread):.3f} to {max(spread):.3f} in NLL on set b,"]
    assert unsaid("docs/results/ehr.md", said) == []


def test_errors_of_trained_networks_rise_as_the_page_says():
    rows = file_of("pretrained/pretrained-fashion-mnist.json")["numbers"]["rows"]
    ratios = []
    for name in ("iBNN-4", "iBNN-8", "iBNN-16", "Rank-1, K = 4"):
        pairs = zip(rows[name]["after"], rows["SGD"]["after"], strict=True)
        differences = [one["error"] - other["error"] for one, other in pairs]
        ratios.append(statistics.fmean(differences) / (statistics.stdev(differences) / len(differences) ** 0.5))
    said = [f"points higher, {min(ratios):.1f} to {max(ratios):.1f} standard errors."]
    assert unsaid("docs/results/pretrained.md", said) == []


def test_tables_with_little_noise_go_as_the_page_says():
    trials = {(one["set"], one["rows"]): one for one in file_of("tables/noise.json")}

    def worse(method: str) -> set[tuple[str, int]]:
        default = {
            name: next(t["nll"] for t in one["trials"] if t["method"] == method and "default" in t.get("rules", ()))
            for name, one in trials.items()
        }
        return {name for name in default if default[name] > trials[name]["plain"]["nll"] + 0.05}

    little = {("yacht", 277), ("naval", 3000)}
    assert worse("rank1") == little | {("energy", 691)}
    assert worse("implicit") == little | {("naval", 10741)}
    before = {
        one["set"]: {name: row["lpd"] for name, row in one["rows"].items()} for one in file_of("tables/noise-test.json")
    }
    below = {
        method: {name for name, lpd in before.items() if lpd[f"{method}, before"] < lpd["plain"] and name != "boston"}
        for method in ("rank1", "implicit")
    }
    assert below == {"rank1": {"energy"}, "implicit": {"yacht", "energy", "naval"}}
    said = [
        "with default noise are worse than the plain network on yacht and on 3,000 rows of naval, `rank1` also on "
        "energy, `implicit` also on all rows of naval.",
        "`implicit` was worse than the plain network on yacht, energy and naval, and `rank1` on energy",
    ]
    assert unsaid("docs/results/tables.md", said) == []


def test_other_times_of_conversion_are_worse_as_the_page_says():
    found = {
        each["convert_at_epoch"]: each["parts"]["both"]["by_seed"] for each in file_of("ruler/late.json")["conversions"]
    }
    less = {
        (epoch, key): [seeds[seed][key] - found[28][seed][key] for seed in seeds]
        for epoch, seeds in found.items()
        for key in ("accuracy", "nll", "cnll", "ece")
    }
    assert all(min(less[epoch, "ece"]) > 0 for epoch in (0, 12, 20, 34))
    assert min(*less[0, "nll"], *less[12, "nll"], *less[34, "nll"], *less[34, "cnll"]) > 0
    assert min(less[20, "nll"]) < 0
    assert max(less[34, "accuracy"]) < 0
    for epoch in (0, 12, 20):
        differences = less[epoch, "cnll"]
        assert sum(difference < 0 for difference in differences) == 1
        assert 0 < statistics.fmean(differences) < 1.5 * statistics.stdev(differences) / len(differences) ** 0.5


def test_single_encoders_answer_better_when_they_may_withhold():
    numbers = file_of("text/text-reviews.json")["numbers"]
    fifth, half = (numbers["coverages"].index(share) for share in (0.8, 0.5))
    rows = {
        name: [statistics.fmean(seed["curve"][place] for seed in row["seeds"]) for place in (-1, fifth, half)]
        for name, row in numbers["rows"].items()
    }
    ensemble, plain = rows.pop("Deep ensemble"), rows["Deterministic"]
    rounded = [{round(100 * row[place]) for row in rows.values()} for place in range(3)]
    said = [f"right in {100 * ensemble[2]:.1f} % (one network: {100 * plain[2]:.1f} %)"]
    assert rounded == [{75, 76}, {80, 81}, {87, 88}]
    assert unsaid("docs/results/text.md", said) == []


def test_separated_members_miss_their_goal_as_the_page_says():
    found = {each["method"]: each["parts"]["both"] for each in file_of("separation/separation.json")["methods"]}
    best = sorted(found.values(), key=lambda part: -part["networks"])[:2]
    low, high = sorted(f"{part['se']:.2f}" for part in best)
    said = [f"the best ones are worth {best[0]['networks']:.2f} networks, with standard errors of {low} and {high}"]
    assert f"{best[0]['networks']:.2f}" == f"{best[1]['networks']:.2f}"
    assert unsaid("docs/results/separation.md", said) == []


# ------------------------------------------------------------------------------------ the index of the papers


def test_numbers_of_the_index_of_suites_are_on_the_pages_it_links():
    """`src/leanbayes_papers/README.md` repeats one number of each page, and a page is tested against its files."""
    rows = re.findall(r"^\|(.+)\|$", (ROOT / "src" / "leanbayes_papers" / "README.md").read_text(), re.MULTILINE)
    found = 0
    for cells in ([cell.strip() for cell in row.split("|")] for row in rows[2:]):
        if cells[-1].endswith(".md") and cells[-1] != "reproduce.md":
            text = text_of(f"docs/results/{cells[-1]}")
            told = re.findall(r"\d+\.\d+", cells[-2])
            assert [number for number in told if number not in text] == [], cells
            found += len(told)
    assert found > 20


def test_growing_networks_have_the_numbers_of_their_files():
    """The table, the range of the plane, and which way error and NLL go with the size."""
    rows = {row["name"]: row for row in file_of("complexity/figure4.json")["records"]}
    points = file_of("complexity/components.json")["records"]
    named = {"iBNN": "implicit nodes (8 components)", "BNN-VI": "mean field"}
    said = [
        f"| {named[kind]}, {size} | {row['error']:.2f} | {row['nll']:.4f} | {row['ece']:.4f} | "
        f"{row['parameters']:.3f} |"
        for (kind, size), row in ((name.split(", "), row) for name, row in rows.items())
    ]
    errors = [100 * point["test error"] for point in points if point["point"] == "component"]
    single = {point["point"]: point for point in points if point["point"] not in ("component", "grid")}
    nlls = [point["test nll"] for point in points if point["point"] == "grid"]
    said += [
        f"| components | {min(errors):.2f} to {max(errors):.2f} |",
        f"| shared weights U | {100 * single['shared weights']['test error']:.2f} |",
        f"| averaged prediction | {100 * single['averaged prediction']['test error']:.2f} |",
        f"a similar test NLL ({min(nlls):.2f} to {max(nlls):.2f})",
        f"({100 * sum(single['plane']['explained']):.0f} % of their variance)",
    ]
    assert unsaid("docs/results/complexity.md", said) == []
    assert rows["iBNN, 165K"]["error"] < rows["iBNN, 42K"]["error"]
    assert rows["iBNN, 165K"]["nll"] > rows["iBNN, 42K"]["nll"]
    for size in ("42K", "165K"):
        nodes, mean_field = rows[f"iBNN, {size}"], rows[f"BNN-VI, {size}"]
        assert nodes["error"] < mean_field["error"]
        assert nodes["nll"] > mean_field["nll"]
        assert nodes["ece"] > mean_field["ece"]
