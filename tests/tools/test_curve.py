"""The price of an answer: trained networks, figures against a computation by hand, verdicts, and the page."""

from __future__ import annotations

import html
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import leanbayes as lb
from leanbayes.core.predictor import predict
from tests.docs.pages import RESULTS, unsaid
from tools import curve, curve_page, curve_scores
from tools.curve_runs import Runs, Study

FLAGS = ["--data", "fashion-demo", "--net", "small", "--budget", "quick", "--epochs", "3", "--train-rows", "160"]
FLAGS += ["--hold-out", "80", "--test-rows", "60", "--ood-rows", "40", "--ood", "left-out", "--methods", "implicit"]
FOLDER = RESULTS / "curve"


def history(out: Path, row: str, seed: int = 0) -> list[dict[str, float]]:
    (path,) = out.glob(f"fashion-demo/small/{row}/seed{seed}/history.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out: Path = tmp_path_factory.mktemp("curve")
    assert curve.main(["train", "--out", str(out), "--seeds", "0", *FLAGS]) == 0
    return out


@pytest.fixture(scope="module")
def into(trained, tmp_path_factory) -> Path:
    found: Path = tmp_path_factory.mktemp("figures")
    curve.main(["score", "--out", str(trained), "--into", str(found), "--seeds", "0", "--rows", "plain,implicit"])
    curve.main(["score", "--out", str(trained), "--into", str(found), "--seeds", "0"])
    timing = ["--price-rows", "16", "--turns", "2", "--seconds", "0"]
    curve.main(["price", "--out", str(trained), "--into", str(found), *timing])
    return found


@pytest.fixture(scope="module")
def figures(into) -> dict[str, dict[str, object]]:
    found = json.loads((into / "fashion-demo-small-seed0.json").read_text())
    return {f"{point['row']}, {point['way']}": point for point in found["points"]}


def test_every_network_is_trained_once_and_late_ones_begin_from_the_plain_network(trained, capsys):
    seeds = sorted(path.name for path in trained.glob("fashion-demo/small/plain/seed*"))
    assert seeds == ["seed0", "seed100", "seed200", "seed300"]
    plain = history(trained, "plain")
    for row in ("implicit", "implicit-head", "implicit-last_block", "implicit-last_stage"):
        own = history(trained, row)
        assert [each["seconds"] for each in own[:2]] == [each["seconds"] for each in plain[:2]]
        assert own[2]["kl"] > 0
    capsys.readouterr()
    assert curve.main(["train", "--out", str(trained), "--seeds", "0", *FLAGS]) == 0
    assert capsys.readouterr().err == ""


def test_other_settings_and_unknown_rows_are_refused(trained, tmp_path):
    with pytest.raises(ValueError, match="choose another --out"):
        curve.main(["train", "--out", str(trained), "--seeds", "0", *FLAGS, "--epochs", "4"])
    with pytest.raises(ValueError, match="expected rows among plain, member2"):
        curve.main(["score", "--out", str(trained), "--into", str(tmp_path), "--rows", "rank1"])
    with pytest.raises(ValueError, match="expected seeds from 0 to 99"):
        Runs(Study.read(trained), trained).jobs(100)


def test_late_networks_convert_their_part_alone(trained):
    runs = Runs(Study.read(trained), trained)
    counts = {
        row: len(list(lb.stochastic_layers(runs.model(0, row, "cpu"))))
        for row in ("implicit", "implicit-last_stage", "implicit-head")
    }
    assert counts["implicit"] > counts["implicit-last_stage"] > counts["implicit-head"] == 1


def nll(p, y) -> float:
    return float(-np.log(p.double().numpy()[np.arange(len(y)), y.numpy()]).mean())


@pytest.mark.parametrize(("way", "samples"), [("4 draws", 4), ("mean network", 1), ("tolerance 0.004", 16)])
def test_figures_equal_a_computation_by_hand(way, samples, trained, figures):
    runs = Runs(Study.read(trained), trained)
    data, model = runs.experiment.data, runs.model(0, "implicit", "cpu")
    model = lb.mean(model) if way == "mean network" else model
    tolerance = 0.004 if way.startswith("tolerance") else None
    assert (len(data.train), len(data.test), len(runs.test)) == (160, 80, 60)

    def answer(x):
        return predict(model, x, samples=samples, tolerance=tolerance, keep_samples=False)

    test, held = answer(data.inputs(runs.test.x)), answer(data.inputs(data.test.x))
    far = answer(runs.experiment.ood["left-out"][0])
    point, y = figures[f"implicit, {way}"], runs.test.y
    assert point["raw"]["nll"] == pytest.approx(nll(test.mean, y), abs=1e-5)
    temperature = point["temperature"]
    losses = {}
    for t in (0.95 * temperature, temperature, 1.05 * temperature):
        p = (held.mean.double().log() / t).softmax(1)
        losses[t] = nll(p, data.test.y) + np.log(t) ** 2 / (2 * 0.5**2 * len(held.mean))
    assert min(losses, key=losses.__getitem__) == temperature
    p = (test.mean.double().log() / temperature).softmax(1)
    assert point["tempered"]["nll"] == pytest.approx(nll(p, y), abs=1e-5)
    truth = np.r_[np.zeros(len(test.mean)), np.ones(len(far.mean))]
    for kind in ("total", "epistemic"):
        area = point["raw"]["auroc"]["left-out"].get(kind)
        if way == "mean network" and kind == "epistemic":
            assert area is None
            continue
        values = np.r_[getattr(test, kind), getattr(far, kind)]
        assert area == pytest.approx(roc_auc_score(truth, values), abs=1e-4)
    if tolerance is not None:
        assert 4 <= point["draws"] == pytest.approx(test.draws.double().mean().item())
    assert point["passes"] == pytest.approx(point["draws"], rel=0.02)


def test_differences_are_paired_by_row(trained, figures):
    folder = trained / "scores" / "seed0"
    losses = {name: np.load(folder / f"implicit-{name}-draws.npz") for name in ("2", "16")}
    for side in ("raw", "tempered"):
        gaps = losses["2"][side] - losses["16"][side]
        assert gaps.mean() != 0
        expected = [gaps.mean(), gaps.std(ddof=1) / len(gaps) ** 0.5]
        assert figures["implicit, 2 draws"]["less"]["16 draws"][side] == pytest.approx(expected)
        assert figures["implicit, 16 draws"]["less"]["16 draws"][side] == [0, 0]


def test_errors_over_test_rows_are_those_of_the_mean_over_seeds():
    rng = np.random.default_rng(0)
    losses = [
        {("m", way): {side: rng.random(50) for side in ("raw", "tempered")} for way in ("2 draws", "16 draws")}
        for _ in range(3)
    ]
    points = [{"row": "m", "method": "m", "way": way} for way in ("2 draws", "16 draws")]
    found = curve_scores.pooled({seed: (points, own) for seed, own in enumerate(losses)})
    gaps = np.mean([own["m", "2 draws"]["raw"] - own["m", "16 draws"]["raw"] for own in losses], axis=0)
    assert found["points"][0]["less"]["16 draws"]["raw"] == pytest.approx([gaps.mean(), gaps.std(ddof=1) / 50**0.5])


def test_every_way_has_a_price_and_a_second_call_keeps_it(trained, into, figures, capsys):
    path = into / "fashion-demo-small-price.json"
    prices = {f"{point['row']}, {point['way']}": point for point in json.loads(path.read_text())["points"]}
    assert prices.keys() == figures.keys()
    for point in prices.values():
        low, high = point["quartiles"]
        assert 0 < low <= point["ratio"] <= high
    before = path.read_bytes()
    capsys.readouterr()
    curve.main(["price", "--out", str(trained), "--into", str(into), "--price-rows", "16", "--turns", "2"])
    assert path.read_bytes() == before
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="prices with another rows"):
        curve.main(["price", "--out", str(trained), "--into", str(into), "--price-rows", "8", "--turns", "2"])
    with pytest.raises(ValueError, match="networks of one seed"):
        curve.main(["price", "--out", str(trained), "--into", str(into), "--seeds", "0,1"])


def made(gains, *, nll=0.4, area=0.9, price=1.0, student=0.4, error=0.001):
    """Return a curve of one method: 16 draws have NLL 0.4 and AUROC 0.9, gains over the mean network are given."""

    def side(nll, area):
        return {"nll": nll, "ece": 0.01, "accuracy": 0.9, "auroc": {"far": {"total": area, "epistemic": area}}}

    def point(way, row, nll, area, gap):
        sides = {name: side(nll, area) for name in curve_page.SIDES}
        less = {"mean network": {name: [gap, 0.001] for name in curve_page.SIDES}}
        return {"row": row, "method": "m", "way": way, "draws": 1, "passes": 1, "less": less, **sides}

    seeds = [
        {
            "data": "d",
            "net": "n",
            "rows": {"ood": {"far": 10}},
            "points": [
                point("16 draws", "m", 0.4, 0.9, gap),
                point("head, 4 draws", "m-head", nll, area, 0),
                point("student", "m-student", student, 0.5, 0),
            ],
        }
        for gap in gains
    ]
    prices = {"16 draws": ("m", 16.0), "head, 4 draws": ("m-head", price), "student": ("m-student", 1.0)}
    points = [{"row": row, "way": way, "ratio": r, "quartiles": [r, r]} for way, (row, r) in prices.items()]
    less = {"mean network": {name: [statistics.fmean(gains), error] for name in curve_page.SIDES}}
    return curve_page.Curve(seeds, {"points": points}, {"points": [{"row": "m", "way": "16 draws", "less": less}]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "met by head, 4 draws"),
        ({"nll": 0.4039}, "met by head, 4 draws"),
        ({"nll": 0.4041}, "No way of at most"),
        ({"area": 0.889}, "No way of at most"),
        ({"price": 2.01}, "No way of at most"),
        ({"student": 0.4079}, "goal of the student is met"),
        ({"student": 0.4081}, "goal of the student is not met"),
    ],
)
def test_the_goal_is_met_within_its_limits(changes, said):
    found = dict(zip(curve_page.SIDES, curve_page.verdicts(made((-0.02, -0.022, -0.021), **changes)), strict=True))
    assert said in found["raw"]
    assert "Its AUROC is not near." in found["raw"]


@pytest.mark.parametrize("gains", [(-0.02, 0.01, -0.01), (0.02, 0.021, 0.022), (-0.02,)])
def test_the_goal_is_dropped_without_a_gain_of_two_standard_errors(gains):
    assert all("The goals are dropped" in line for line in curve_page.verdicts(made(gains)))


def test_the_larger_error_decides_whether_there_is_a_gain():
    gains = (-0.02, -0.022, -0.021)
    said = {error: next(curve_page.verdicts(made(gains, error=error))) for error in (0.0104, 0.0106)}
    assert "The goals are dropped" not in said[0.0104]
    assert "The goals are dropped" in said[0.0106]


def test_a_page_has_the_figures_of_its_files(into):
    page = curve_page.page(into)
    found = json.loads((into / "fashion-demo-small-seed0.json").read_text())
    point = next(p for p in found["points"] if p["way"] == "16 draws")
    row = next(line for line in page.splitlines() if line.startswith("| 16 draws | 16 |"))
    assert f"| {100 * point['raw']['accuracy']:.2f} | {point['raw']['nll']:.4f} |" in row
    assert "--data fashion-demo --net small --methods implicit --ood left-out" in page


def test_the_committed_page_and_its_pictures_equal_their_files():
    text = (RESULTS / "curve.md").read_text(encoding="utf-8")
    assert text == curve_page.page(FOLDER), "run python -m tools.curve_page docs/results/curve > docs/results/curve.md"
    for each in curve_page.read(FOLDER):
        assert [seed["seed"] for seed in each.seeds] == [0, 1, 2]
        picture = (FOLDER / f"{each.name}.svg").read_text(encoding="utf-8")
        (drawn,) = re.findall(r"<dc:description>(.*?)</dc:description>", picture, re.S)
        assert json.loads(html.unescape(drawn)) == curve_page.chart_points(each)


def test_the_quick_start_says_how_far_few_draws_are_from_sixteen():
    (found,) = curve_page.read(FOLDER)
    assert unsaid("docs/quickstart.md", [curve_page.draws_sentence(found)]) == []
