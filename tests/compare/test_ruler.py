"""Sub-ensembles against a computation in plain numpy; parts of finished runs against `predict` and result.json."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import leanbayes as lb
from leanbayes import metrics
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.run import perform
from tools.ruler import conversions, main, scores
from tools.ruler_page import late_sentences, less_of, short, tables, worth_sentences
from tools.ruler_scores import ece_floor, jackknife, paired, read_predictions, Ruler, save_predictions, Saved, score

ROWS, CLASSES = 300, 4
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def lacking(page, rows, says):
    """Return the rows of tables and the items of lists that a page of docs/results lacks."""
    text = (RESULTS / f"{page}.md").read_text()
    lines = [f"| {' | '.join(cells)} |\n" for cells in rows] + [f"* {line}\n" for line in says]
    return [line for line in lines if line not in text]


def networks(count: int, seed: int = 0, noise: float = 1.5) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Networks that share a signal and have noise of their own: averages are better."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    signal = 2.0 * torch.nn.functional.one_hot(y, CLASSES) + torch.randn(ROWS, CLASSES, generator=generator)
    each = [2 * (signal + noise * torch.randn(ROWS, CLASSES, generator=generator)) for _ in range(count)]
    return [logits.double().softmax(1) for logits in each], y


def numpy_cnll(p: np.ndarray, y: np.ndarray) -> float:
    """Two-fold calibrated NLL: golden-section search for the temperature, on the library's halves."""
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(0)).numpy()
    halves = np.array_split(order, 2)

    def losses(rows: np.ndarray, log_t: float) -> np.ndarray:
        logits = np.log(p[rows]) / np.exp(log_t)
        top = logits.max(1)
        return top + np.log(np.exp(logits - top[:, None]).sum(1)) - logits[np.arange(len(rows)), y[rows]]

    found = []
    for fitted, scored in (halves, halves[::-1]):
        low, high = -3.0, 3.0
        for _ in range(80):
            a, b = high - (high - low) * 0.618034, low + (high - low) * 0.618034
            low, high = (low, b) if losses(fitted, a).mean() < losses(fitted, b).mean() else (a, high)
        found.append(losses(scored, (low + high) / 2))
    return float(np.concatenate(found).mean())


def numpy_ece(p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    confidence, hit = p.max(1), p.argmax(1) == y
    which = np.ceil(confidence * bins).astype(int)
    return sum(abs((hit[which == b] - confidence[which == b]).sum()) for b in range(bins + 1)) / len(y)


def test_the_curve_is_the_mean_over_all_subsets():
    probabilities, y = networks(4)
    table = Ruler(probabilities, y).table()
    p, classes = np.stack([each.numpy() for each in probabilities]), y.numpy()
    assert [row["networks"] for row in table] == [1, 2, 3, 4]
    for row in table:
        means = [p[list(subset)].mean(0) for subset in combinations(range(4), row["networks"])]
        assert row["subsets"] == len(means)
        of = {
            "accuracy": [(mean.argmax(1) == classes).mean() for mean in means],
            "nll": [-np.log(mean[np.arange(ROWS), classes]).mean() for mean in means],
            "cnll": [numpy_cnll(mean, classes) for mean in means],
            "ece": [numpy_ece(mean, classes) for mean in means],
        }
        for figure, values in of.items():
            assert row[figure]["mean"] == pytest.approx(np.mean(values), abs=1e-7), figure
    singles = [numpy_cnll(each, classes) for each in p]
    assert table[0]["cnll"]["se_networks"] == pytest.approx(np.std(singles, ddof=1) / 2, rel=1e-4)
    assert table[3]["cnll"]["se_networks"] is None
    losses = np.stack([-np.log(each[np.arange(ROWS), classes]) for each in p]).mean(0)
    assert table[0]["nll"]["se_rows"] == pytest.approx(losses.std(ddof=1) / math.sqrt(ROWS), rel=1e-9)


def test_a_pair_is_worth_two_networks_and_one_network_one():
    probabilities, y = networks(6)
    ruler = Ruler(probabilities[:4], y)
    curve = ruler.curve()
    others = {size: Ruler(probabilities, y).curve()[size] for size in (1, 2, 3)}
    assert sorted(others.values(), reverse=True) == list(others.values())
    fresh = [score(sum(pair) / 2, y) for pair in combinations(probabilities[4:] + probabilities[:1], 2)]
    worth = ruler.worth(fresh)
    assert abs(worth["networks"] - 2) < 3 * worth["se"]
    assert 0.02 < worth["se"] < 1
    assert worth["gain"] == pytest.approx(curve[1] - np.mean([each.figures["cnll"] for each in fresh]))
    assert abs(worth["gain"] - (curve[1] - curve[2])) < 3 * worth["gain_se"]


def test_between_measured_sizes_the_curve_is_linear_in_the_inverse_size():
    law = {size: 0.14 + 0.04 / size for size in (1, 2, 4, 8)}
    for size in (1, 1.3, 2, 3, 5.5, 8):
        found = metrics.ensemble_equivalent(0.14 + 0.04 / size, law)
        assert found.networks == pytest.approx(size)
    assert metrics.ensemble_equivalent(0.2, law) == (1.0, "at most")
    assert metrics.ensemble_equivalent(0.1, law) == (8.0, "at least")


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=7)
    left = [np.delete(values, i).mean() for i in range(7)]
    assert jackknife(left) == pytest.approx(values.std(ddof=1) / math.sqrt(7))


def test_differences_are_taken_seed_by_seed():
    probabilities, y = networks(4)
    one, other = ({i: score(probabilities[i + k], y) for i in range(2)} for k in (0, 2))
    found = paired({5: one[0], **one}, other)
    each = [one[i].figures["cnll"] - other[i].figures["cnll"] for i in range(2)]
    assert found["seeds"] == [0, 1]
    assert found["mean"] == pytest.approx(np.mean(each))
    assert found["se"] == pytest.approx(np.std(each, ddof=1) / math.sqrt(2))


def test_one_network_is_no_ruler():
    probabilities, y = networks(1)
    with pytest.raises(ValueError, match="at least two networks"):
        Ruler(probabilities, y)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Runs of plain networks and two methods, and their predictions."""
    out = tmp_path_factory.mktemp("ruler")
    source, judging = DataSpec(name="digits", train_rows=200), EvaluationSpec(samples=4, ood=(), shift=False)
    recipe = lb.Recipe(epochs=1, batch_size=64, lr=0.05)
    experiment = Experiment(source, "small", judging)
    found = {}
    for method, seeds in ((None, (0, 1)), (lb.Rank1(), (0,)), (lb.BatchEnsemble(), (0,))):
        for seed in seeds:
            job = Job(source=source, net="small", method=method, recipe=replace(recipe, seed=seed), evaluation=judging)
            result = perform(job, experiment, out, stage="train" if seed or method == lb.BatchEnsemble() else "compare")
            path = out / f"{job.name}-{seed}.npz"
            save_predictions(job.folder(out), path, samples=4)
            found[job.name, seed] = (path, job.folder(out), result)
    return found


def test_saved_predictions_have_the_figures_of_the_run(files):
    for path, _, result in (files["plain", 0], files["rank1", 0]):
        saved = read_predictions(path)
        figures = score(saved.parts["both"], saved.y).figures
        for name, value in figures.items():
            assert value == pytest.approx(result["metrics"]["test"][name], rel=1e-5), name


def test_parts_are_members_without_noise_and_one_member_with_it(files):
    path, folder, _ = files["rank1", 0]
    saved = read_predictions(path)
    experiment = Experiment(
        DataSpec(name="digits", train_rows=200), "small", EvaluationSpec(samples=4, ood=(), shift=False)
    )
    model, x = lb.load(folder / "model.safetensors", experiment.plain(0)), experiment.test[1]
    for k in range(4):
        expected = lb.mean(model, component=k).eval()(x).softmax(1)
        torch.testing.assert_close(saved.parts[f"member{k}"], expected, rtol=1e-4, atol=1e-6)
        noisy = lb.predict(model, x, samples=4, component=k).mean
        torch.testing.assert_close(saved.parts[f"noise{k}"], noisy, rtol=1e-4, atol=1e-6)
    assert set(saved.parts) == {"both", "centre", *(f"{part}{k}" for part in ("member", "noise") for k in range(4))}
    few = save_predictions(folder, path.with_name("few.npz"), samples=4, noise=False).parts
    assert set(few) == {name for name in saved.parts if not name.startswith("noise")}
    assert all(torch.equal(few[name], saved.parts[name]) for name in few)
    assert set(read_predictions(files["plain", 0][0]).parts) == {"both"}
    assert len(read_predictions(files["batch_ensemble", 0][0]).noisy) == 0


def test_batch_ensemble_is_its_members(files):
    saved = read_predictions(files["batch_ensemble", 0][0])
    torch.testing.assert_close(saved.members.float(), saved.parts["both"], rtol=1e-4, atol=1e-6)


def test_the_tool_writes_curves_and_equivalents(files, tmp_path):
    paths = [str(path) for path, _, _ in files.values()]
    main(["score", *paths, "--out", str(tmp_path / "ruler.json")])
    found = json.loads((tmp_path / "ruler.json").read_text())
    assert [row["networks"] for row in found["curves"][0]["curve"]] == [1, 2]
    rank1, batch = found["methods"]
    assert set(rank1["parts"]) == {"both", "members without noise", "centre", "one member with noise"}
    assert set(batch["parts"]) == {"both", "members without noise", "centre", "one member"}
    for part in rank1["parts"].values():
        assert part["paired"]["seeds"] == [0]
        assert part["networks"] >= 1


def test_one_plain_network_has_no_curve_and_keeps_its_figures(files):
    """It was left out in silence."""
    runs = [read_predictions(files[key][0]) for key in (("plain", 0), ("rank1", 0))]
    found = scores(runs)
    assert found["curves"] == []
    (alone,) = found["alone"]
    assert (alone["net"], alone["method"]) == ("small", "plain")
    assert alone["by_seed"]["0"] == score(runs[0].parts["both"], runs[0].y).figures
    assert set(found["methods"][0]["parts"]["both"]["by_seed"]) == {"0"}
    assert "alone" not in scores([read_predictions(path) for path, _, _ in files.values()])


def test_other_files_and_other_rows_are_refused(files, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="expected predictions of a run"):
        read_predictions(tmp_path / "bad.npz")
    one, other = (read_predictions(files["plain", seed][0]) for seed in (0, 1))
    with pytest.raises(ValueError, match="same test rows"):
        scores([one, replace(other, y=other.y.flip(0))])


def converted(saved: Saved, epoch: int, seed: int = 0, flatten: float = 0.0) -> Saved:
    """A run of the same network that was converted after other epochs, and whose predictions are nearer to uniform."""
    recipe = saved.about["recipe"] | {"convert_at_epoch": epoch}
    parts = {name: (1 - flatten) * p + flatten / p.shape[1] for name, p in saved.parts.items()}
    return replace(saved, about=saved.about | {"recipe": recipe, "seed": seed}, parts=parts)


def test_conversions_are_scored_by_their_epoch(files, tmp_path):
    plain = [read_predictions(files["plain", seed][0]) for seed in (0, 1)]
    rank1 = read_predictions(files["rank1", 0][0])
    runs = [converted(rank1, epoch, seed, 0.1 * seed + 0.01 * epoch) for epoch in (7, 0) for seed in (0, 1)]
    found = conversions([*plain, *runs])["conversions"]
    assert [(each["convert_at_epoch"], each["seeds"]) for each in found] == [(0, [0, 1]), (7, [0, 1])]
    assert found[1]["parts"]["both"]["by_seed"]["1"] == pytest.approx(score(runs[1].parts["both"], rank1.y).figures)
    assert found[0]["parts"] == scores([*plain, *runs[2:]])["methods"][0]["parts"]
    paths = [str(files[key][0]) for key in (("plain", 0), ("plain", 1), ("rank1", 0))]
    main(["late", *paths, "--out", str(tmp_path / "late.json")])
    assert json.loads((tmp_path / "late.json").read_text())["conversions"][0]["seeds"] == [0]


def test_conversions_of_several_methods_are_refused(files):
    every = [read_predictions(path) for path, _, _ in files.values()]
    with pytest.raises(ValueError, match=r"expected one method .* got 2 methods, 2 plain networks"):
        conversions(every)


def test_the_published_page_has_the_figures_of_its_files():
    folder = RESULTS / "ruler"
    page = (RESULTS / "ruler.md").read_text()
    assert [name for name, table in tables(folder).items() if f"\n\n{table}" not in page] == []
    assert lacking("ruler", [], [*worth_sentences(folder), *late_sentences(folder)]) == []
    worths = [re.findall(r"(`\w+`) is worth (.*?) networks", line)[0] for line in worth_sentences(folder)]
    assert [worth for worth in worths if " ".join(worth) not in (RESULTS / "runs.md").read_text()] == []


def test_the_published_default_conversion_is_that_of_the_ruler():
    late, ruler = (json.loads((RESULTS / "ruler" / f"{name}.json").read_text()) for name in ("late", "ruler"))
    default = next(each for each in late["conversions"] if each["convert_at_epoch"] == 28)
    method = next(each for each in ruler["methods"] if each["method"] == default["method"])
    for name, part in method["parts"].items():
        for seed, figures in part["by_seed"].items():
            assert default["parts"][name]["by_seed"][seed] == pytest.approx(figures), (name, seed)


def test_the_words_on_conversion_are_those_of_the_figures():
    late = json.loads((RESULTS / "ruler" / "late.json").read_text())
    found = {each["convert_at_epoch"]: each for each in late["conversions"]}
    assert list(found) == [0, 12, 20, 28, 34]
    for epoch in (0, 12, 20):
        less = less_of(found[epoch], late, 28)
        assert abs(np.mean(less)) < 1.5 * np.std(less, ddof=1) / math.sqrt(len(less)), epoch
        assert sum(value > 0 for value in less) == 2
        assert min(less_of(found[epoch], late, 28, "ece")) > 0
    assert min(value for epoch in (0, 12) for value in less_of(found[epoch], late, 28, "nll")) > 0
    for figure, sign in (("accuracy", -1), ("nll", 1), ("cnll", 1), ("ece", 1)):
        assert min(sign * value for value in less_of(found[34], late, 28, figure)) > 0, figure
    assert late["recipe"]["anneal_epochs"] == 200


def test_published_parts_are_scored_like_the_published_runs():
    """Two ways from a training to its figures: `evaluate`, and saved predictions that were scored later."""
    folder = RESULTS / "ruler"
    found = json.loads((folder / "ruler.json").read_text())
    by_key = {(curve["net"], "plain"): curve["by_seed"] for curve in found["curves"]}
    by_key |= {(m["net"], m["method"]): m["parts"]["both"]["by_seed"] for m in found["methods"]}
    runs = json.loads((folder / "runs.json").read_text())
    assert len(runs) == 15
    for run in runs:
        scored = by_key[run["network"]["name"], run["method"]["name"]][str(run["seed"])]
        for name, value in scored.items():
            assert value == pytest.approx(run["metrics"]["test"][name], rel=1e-3, abs=1e-4), (run["id"], name)


def test_a_short_result_names_no_folder_and_keeps_the_figures(files):
    result = files["plain", 0][2]
    kept = short({**result, "command": "leanbayes train --out somewhere/deep --seeds 0"})
    assert kept["command"] == "leanbayes train --out runs/ruler --seeds 0"
    assert kept["metrics"] == result["metrics"]
    assert "figures" not in kept
    assert "layers" not in kept["cost"]


def test_the_floor_of_the_ece_is_that_of_classes_drawn_from_the_probabilities():
    generator = torch.Generator().manual_seed(3)
    p = (2 * torch.randn(2000, 5, generator=generator, dtype=torch.float64)).softmax(1)
    y = torch.multinomial(p, 1, generator=generator)[:, 0]
    floor = ece_floor(p)
    assert floor["low"] < floor["mean"] < floor["high"]
    assert floor["low"] <= float(metrics.ece(p, y)) <= floor["high"]
    sharper = p.square() / p.square().sum(1, keepdim=True)
    assert float(metrics.ece(sharper, y)) > 2 * ece_floor(sharper)["high"]
    drawn = np.random.default_rng(0)
    again = [numpy_ece(p.numpy(), np.array([drawn.choice(5, p=row) for row in p.numpy()])) for _ in range(40)]
    assert floor["mean"] == pytest.approx(np.mean(again), rel=0.1)
    assert ece_floor(p[:200])["mean"] > 2 * floor["mean"]


def test_floors_stand_next_to_the_ece_of_runs_and_of_all_plain_networks(files, tmp_path):
    paths = [str(files[key][0]) for key in (("plain", 0), ("plain", 1), ("rank1", 0))]
    main(["floor", *paths, "--out", str(tmp_path / "floor.json")])
    rows = json.loads((tmp_path / "floor.json").read_text())["rows"]
    assert [(row["method"], row["seed"], row["networks"]) for row in rows] == [
        ("plain", 0, 1),
        ("plain", 1, 1),
        ("rank1", 0, 1),
        ("plain", None, 2),
    ]
    saved = [read_predictions(files["plain", seed][0]) for seed in (0, 1)]
    mean = torch.stack([each.parts["both"].double() for each in saved]).mean(0)
    assert rows[3]["ece"] == pytest.approx(float(metrics.ece(mean, saved[0].y)))
    assert rows[3]["floor"] == ece_floor(mean)
