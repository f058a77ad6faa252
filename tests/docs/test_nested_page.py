"""The prose of docs/results/nested.md says what its files say, and compares with the paper only what compares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanbayes_papers.nested.networks import bn3
from leanbayes_papers.nested.widths import WIDTHS
from tests.docs.pages import file_of, lacking, text_of, unsaid

PAGE = "docs/results/nested.md"
KEYS = [f"{width:g}" for width in WIDTHS]


def numbers(name: str) -> dict[str, Any]:
    return file_of(f"nested/{name}-cifar10.json")["numbers"]


def methods() -> dict[str, Any]:
    return numbers("widths")["methods"]


def test_widths_have_their_share_of_groups_and_of_weights():
    found = methods()
    whole = found["BN3"]["1"]["parameters"]
    rows = []
    for key in KEYS:
        shares = [f"{100 * float(key):g}", f"{100 * found['BN3'][key]['parameters'] / whole:.1f}"]
        accuracies = [f"{found[name][key]['accuracy']:.1f}" for name in ("BN3", "FN3", "IBNN")]
        nlls = [f"{found[name][key]['nll']:.3f}" for name in ("BN3", "FN3", "FN3-TS", "IBNN")]
        rows.append([*shares, *accuracies, *nlls])
    smallest, method = numbers("limited")["smallest BN3"], bn3("cifar10")
    share = f"{100 * method.always_on / method.groups:g}"
    cells = [f"{smallest['accuracy']:.1f}", "", "", f"{smallest['nll']:.3f}", "", "", ""]
    rows.append([share, f"{smallest['used']:.1f}", *cells])
    assert lacking(PAGE, rows) == []


# ------------------------------------------------------------------------------------ measures that do not compare

OURS, AUTHORS = (6_000, 10_000), (73_257, 10_000)  # rows of SVHN and of CIFAR-10


def precision_recall(scores: dict[str, list[float]], share: float, steps: int = 50) -> float:
    """Return the AUPR of two histograms at a share of positive rows: the mean of p t / (p t + (1 - p) f) over t."""
    positive, negative = (np.repeat(scores[name][::-1], steps) / steps for name in ("svhn", "test"))
    t, f = (np.cumsum(each) - each / 2 for each in (positive, negative))
    return float(np.sum(positive * share * t / (share * t + (1 - share) * f + 1e-12)))


def test_aupr_at_another_base_rate_is_converted_only_where_scores_were_kept():
    ours, authors = (positive / (positive + negative) for positive, negative in (OURS, AUTHORS))
    run = file_of("cifar10/cifar10/wrn-16-4/plain/seed0/result.json")
    kept, scores = run["metrics"]["ood"]["svhn"], run["figures"]["histograms"]["total"]["counts"]
    assert kept["scores"]["mutual_information"]["aupr"] == ours  # all scores are equal: chance
    assert precision_recall(scores, ours) == pytest.approx(kept["aupr"], abs=0.01)
    said = [
        f"Here {OURS[0]:,} of {sum(OURS):,} rows are SVHN, so that chance has {ours:.3f}. In the authors' code "
        f"{AUTHORS[0]:,} of {sum(AUTHORS):,} are, and chance has {authors:.2f}.",
        f"has {kept['aupr']:.3f} at our base rate and {precision_recall(scores, authors):.3f} at the authors'.",
    ]
    assert unsaid(PAGE, said) == []
    assert not any("auroc" in row for rows in methods().values() for row in rows.values())


def test_precision_and_recall_by_hand():
    """Two bins: half of the positive rows are above all others, the rest is mixed."""
    scores = {"svhn": [0.5, 0.5], "test": [1.0, 0.0]}
    mixed = [0.5 * t / (0.5 * t + 0.5 * (2 * t - 1)) for t in np.linspace(0.5, 1, 20_001)]
    assert precision_recall(scores, 0.5, steps=2_000) == pytest.approx(0.5 + 0.5 * np.mean(mixed), abs=1e-3)
    assert precision_recall({"svhn": [0.5, 0.5], "test": [0.5, 0.5]}, 0.3) == pytest.approx(0.3)


def binned_ece(confidence: np.ndarray, correct: np.ndarray, bins: int = 15) -> float:
    place = np.minimum((bins * confidence).astype(int), bins - 1)
    return float(np.abs(np.bincount(place, confidence - correct, bins)).sum() / len(confidence))


def test_ece_by_batches_of_a_calibrated_network():
    """Labels are drawn from the confidences themselves, 40 times; the standard error is below 0.0005."""
    run = file_of("fashion-mnist/fashion-mnist/lenet/deep_ensemble/seed0/result.json")
    bins = run["figures"]["reliability"]["bins"]
    confidence = np.repeat([each["confidence"] for each in bins], [each["count"] for each in bins])
    draw = np.random.default_rng(0)
    batches, whole = [], []
    for _ in range(40):
        correct = draw.random(len(confidence)) < confidence
        rows = draw.permutation(len(confidence))[: len(confidence) // 64 * 64].reshape(-1, 64)
        batches.append(np.mean([binned_ece(confidence[each], correct[each]) for each in rows]))
        whole.append(binned_ece(confidence, correct))
    assert np.std(batches) / np.sqrt(40) < 0.0005
    assert np.mean(batches) == pytest.approx(0.068, abs=0.0015)
    assert np.mean(whole) == pytest.approx(0.006, abs=0.0005)
    said = [
        f"({100 * run['metrics']['test']['accuracy']:.0f} % accurate) would have 0.068; "
        "over all rows it would have 0.006."
    ]
    assert unsaid(PAGE, said) == []


def test_the_page_in_short():
    found = methods()
    bn3, plain = found["BN3"]["1"], found["plain"]["1"]
    tempered = sorted(row["ece"] for row in found["FN3-TS"].values())
    assert all(row["ece"] < plain["ece"] for row in found["BN3"].values())
    assert all(found["IBNN"][key]["accuracy"] > found["BN3"][key]["accuracy"] for key in KEYS)
    said = [
        f"At full width BN3 has {bn3['accuracy']:.1f} %, {plain['accuracy'] - bn3['accuracy']:.1f} points less than "
        f"the plain network ({plain['accuracy']:.1f} %). BN3 has a smaller calibration error (ECE {bn3['ece']:.3f} "
        f"against {plain['ece']:.3f}) and a better AUPR for SVHN ({bn3['aupr']:.3f} against {plain['aupr']:.3f}).",
        f"Best calibrated is FN3 with a temperature for each width ({tempered[0]:.3f} to {tempered[-1]:.3f}).",
        f"most where few channels are left ({found['IBNN']['0.125']['accuracy']:.1f} against "
        f"{found['BN3']['0.125']['accuracy']:.1f} % at an eighth)",
    ]
    assert unsaid(PAGE, said) == []


def test_the_page_against_fn3():
    found, law = methods(), file_of("nested/law.json")["rows"]
    whole = sorted(tails[-1] for tails in numbers("widths")["importance"].values())
    first, third = (law[name] for name in ("FN3: uniform tails, no noise", "half of the passes whole, no noise"))
    change = {key: third[key]["nll"] - first[key]["nll"] for key in first}
    said = [
        f"({found['BN3']['1']['accuracy']:.1f} against {found['FN3']['1']['accuracy']:.1f} %), and worse from a half "
        f"down "
        f"({found['BN3']['0.25']['accuracy']:.1f} against {found['FN3']['0.25']['accuracy']:.1f} % at a quarter)",
        f"BN3 in {100 * whole[0]:.0f} to {100 * whole[-1]:.0f} of a hundred, by layer.",
        f"at an eighth and a quarter it costs {change['0.125']:.3f} and {change['0.25']:.3f} nats, at full width it "
        f"gains "
        f"{-change['1.0']:.3f}.",
    ]
    assert unsaid(PAGE, said) == []


def test_the_page_on_pruned_weights():
    found, rows = file_of("nested/svb.json"), numbers("limited")["SVB"]
    kept = {cut: row["kept"] for cut, row in found["cuts"].items()}
    unpruned = round(rows["used"] / 100 * rows["parameters"]) - kept["3"]
    accuracy = {cut: row["draws"][0] for cut, row in found["cuts"].items()}
    said = [
        f"Of {found['total']:,} noisy weights {kept['3']:,} are left; the other {unpruned:,} of the "
        f"{rows['used']:.1f} % are",
        f"unpruned it has {found['unpruned']['draws'][0]:.1f} %, and a cut at a log alpha of 1 or 6 in the place of 3 "
        f"keeps "
        f"{kept['1']:,} or {kept['6']:,} weights and {accuracy['1']:.1f} or {accuracy['6']:.1f} %",
    ]
    assert unsaid(PAGE, said) == []


def test_bn3_has_the_best_likelihood_only_without_a_temperature():
    found = methods()
    full = {name: found[name]["1"]["nll"] for name in ("BN3", "FN3", "FN3-TS", "IBNN", "plain")}
    assert full["BN3"] < min(full["FN3"], full["IBNN"], full["plain"])
    assert abs(full["BN3"] - full["FN3-TS"]) < 0.002
    assert all(found["FN3-TS"][key]["nll"] < found["BN3"][key]["nll"] for key in KEYS[:-1])
    said = [
        f"It also has the best likelihood of the networks that are not rescaled (NLL {full['BN3']:.3f}; "
        f"plain {full['plain']:.3f}, IBNN {full['IBNN']:.3f}, FN3 {full['FN3']:.3f}). FN3 with a temperature for "
        f"each width is level with it at full width ({full['FN3-TS']:.3f}) and better at the four narrower ones.",
    ]
    assert unsaid(PAGE, said) == []


def test_the_narrowest_network_is_compared_by_its_share_of_groups():
    limited, method, wide = numbers("limited"), bn3("cifar10"), methods()["BN3"]
    smallest = limited["smallest BN3"]
    share = 100 * method.always_on / method.groups
    quarter = 100 * wide["0.25"]["parameters"] / wide["1"]["parameters"]
    gap = smallest["accuracy"] - smallest["paper"][0]
    said = [
        f"The paper's {smallest['paper'][3]} % are {method.always_on} of {method.groups} groups. Our narrowest network "
        f"has the same {share:.2f} % of the groups, {smallest['used']:.1f} % of the weights and "
        f"{smallest['accuracy']:.1f} % ({gap:+.1f} points); with about as large a share of the weights, {quarter:.1f} "
        f"% at width 1/4, it has "
        f"{wide['0.25']['accuracy']:.1f} %.",
    ]
    assert unsaid(PAGE, said) == []


def test_students_stand_next_to_networks_of_their_size():
    students, found, limited = numbers("student"), methods(), numbers("limited")
    cut = {row["parameters"]: row for row in (limited["smallest BN3"], *found["BN3"].values())}
    scratch = {row["parameters"]: row for row in found["IBNN"].values()}
    rows = []
    for name, row in students.items():
        if name == "teacher":
            continue
        size = row["parameters"]
        others = [f"{each[size]['accuracy']:.1f}" if size in each else "" for each in (cut, scratch)]
        rows.append([name, f"{size:,.0f}", f"{row['accuracy']:.1f}", *others])
    assert lacking(PAGE, rows) == []
    whole = students["student 100 %"]
    better = whole["accuracy"] - cut[whole["parameters"]]["accuracy"]
    worse = scratch[whole["parameters"]]["accuracy"] - whole["accuracy"]
    half = students["student 50 %"]
    behind = scratch[half["parameters"]]["accuracy"] - half["accuracy"]
    said = [
        f"The student is better than the teacher cut to the same size (by {better:.1f} points with "
        f"{whole['parameters']:,.0f} weights), but a network of that size trained from scratch for 90 epochs is better "
        f"than the student (by {worse:.1f} points, and by {behind:.1f} with {half['parameters']:,.0f} weights)"
    ]
    assert unsaid(PAGE, said) == []


def test_uniform_tails_with_noise_are_recommended():
    rows = file_of("nested/law.json")["rows"]
    best, default = rows["uniform tails, noise on weights"], rows["BN3: the same, noise on weights"]
    learned, fixed = rows["the same, tails learned"], rows["half of the passes whole, no noise"]
    assert all(best[key]["accuracy"] > default[key]["accuracy"] for key in best)
    likelier = [best[key]["nll"] < default[key]["nll"] - 0.001 for key in best]
    assert likelier == [True, True, True, True, False]
    assert all(learned[key]["nll"] > fixed[key]["nll"] for key in learned)
    said = [
        "Uniform tails with noise on weights are more accurate than the default (last row) at all five widths, and "
        "have the better NLL at four; at full width they tie. Learned tails have a worse NLL than the same fixed ones "
        'at all five. So `NestedDropout(tail="categorical")` is the better choice in general, not only for narrow '
        "widths, as far as these two seeds go."
    ]
    assert unsaid(PAGE, said) == []


def test_the_width_of_the_student_is_the_papers_choice():
    found = numbers("correlation")
    full = dict(zip(found["widths"], found["matrix"][-1], strict=True))
    said = [
        f"correlations with the full width are {full[0.2]:.2f} at 0.2, {full[0.3]:.2f} at 0.3, {full[0.4]:.2f} at 0.4 "
        f"and {full[0.5]:.2f} at 0.5. By this criterion a student should keep 0.4 to 0.5 of the channels; its 0.25 is "
        "the paper's choice."
    ]
    assert unsaid(PAGE, said) == []


def test_nothing_of_the_page_compares_what_does_not():
    text = text_of(PAGE)
    assert "does not hold here: pruned sparse" not in text
    assert "best likelihood of all" not in text
    for line in ("AUPR does not compare with the paper's", "ECE does not compare with the paper's", "was not tested"):
        assert line in text
