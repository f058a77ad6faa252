"""Studies against oracles, and one small suite run for real."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

import leanbayes as lb
from leanbayes import models
from leanbayes.compare.job import DataSpec, EvaluationSpec
from leanbayes.data import DataSet, Split
from leanbayes.training import Recipe
from leanbayes_papers import run_suite, SUITES
from leanbayes_papers.harness import Printed, Run, Study, Suite, TrainingSpec
from leanbayes_papers.harness.suite import _labels, present, run_named
from leanbayes_papers.implicit import complexity, noise
from leanbayes_papers.rank1 import ablations

# ------------------------------------------------------------------------------------ studies


def small_data() -> DataSet:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(256, (200, 1, 8, 8), generator=generator, dtype=torch.uint8)
    split = Split(x, torch.arange(200) % 10)
    return DataSet("made up", "classification", split, split, tuple("abcdefghij"), "")


def test_gaussian_noise_goes_from_the_image_to_nothing_but_noise():
    data, generator = small_data(), torch.Generator().manual_seed(0)
    x = data.test.x
    assert torch.equal(noise.gaussian(data, x, 0.0, generator), data.inputs(x))
    pure = noise.gaussian(data, x, 1.0, generator)
    assert abs(pure.mean()) < 5 / pure.numel() ** 0.5
    assert pure.std().item() == pytest.approx(1, abs=5 / (2 * pure.numel()) ** 0.5)


def test_salt_and_pepper_replace_the_share_they_should():
    data, generator = small_data(), torch.Generator().manual_seed(0)
    x = torch.full_like(data.test.x, 100)
    black, grey, white = (data.inputs(torch.full_like(x[:1], value))[0, 0, 0, 0] for value in (0, 100, 255))
    noisy = noise.salt_and_pepper(data, x, 0.3, generator)
    shares = [(noisy == value).double().mean().item() for value in (black, grey, white)]
    assert sum(shares) == pytest.approx(1)
    for share, expected in zip(shares, (0.15, 0.7, 0.15), strict=True):
        assert share == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / noisy.numel()))


def test_the_plane_of_components_is_that_of_pca():
    points = torch.randn(8, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (centre, axes, explained), oracle = complexity.plane_of(points), PCA(2).fit(points.numpy())
    assert np.allclose(explained, oracle.explained_variance_ratio_)
    assert np.allclose(((points - centre) @ axes.T).abs(), np.abs(oracle.transform(points.numpy())))
    assert torch.allclose(axes @ axes.T, torch.eye(2, dtype=torch.float64))


def test_a_checkpoint_is_evaluated_component_by_component():
    torch.manual_seed(0)
    model = lb.convert(models.MLP(4, 3), lb.Rank1(components=3, init_spread=1.0))
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    with torch.no_grad():
        outputs = [lb.draw(model, seed=0, index=k)(x) for k in range(3)]
    each = torch.stack([logits.softmax(1) for logits in outputs]).double()
    found = ablations.evaluate_components(model, x, y)
    rows = torch.arange(40)
    assert found["components"] == pytest.approx([-p[rows, y].log().mean().item() for p in each], rel=1e-5)
    assert found["nll"] == pytest.approx(-each.mean(0)[rows, y].log().mean().item(), rel=1e-5)
    assert found["accuracy"] == (each.mean(0).argmax(1) == y).double().mean().item()
    votes = each.argmax(2)
    pairs = [(votes[i] != votes[j]).double().mean() for i in range(3) for j in range(i)]
    errors = (votes != y).double().mean()
    assert found["disagreement"] == pytest.approx((sum(pairs) / 3 / errors).item())
    assert ablations.evaluate_components(models.MLP(4, 3), x, y)["disagreement"] is None


def test_the_regression_fits_and_spreads():
    torch.manual_seed(0)
    x = torch.linspace(-4, 4, 30)[:, None]
    grid = torch.linspace(-6, 6, 25)[:, None]
    found = complexity.fitted(complexity.X_CUBED_METHODS["implicit nodes"], 1, (x, x**3), grid, steps=150)
    assert found["rmse"] < 15 < complexity.Y_UNIT
    assert 0 < found["inside"] < found["outside"]


@pytest.mark.slow
def test_mean_field_misses_the_curve_where_implicit_nodes_do_not():
    """Figure 1 of the implicit-nodes paper at five hidden layers: mean field is no better than a constant."""
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.rand(30, 1, generator=generator) - 1) * 4
    y = x**3 + 3 * torch.randn(30, 1, generator=generator)
    grid = torch.linspace(-6, 6, 121)[:, None]
    methods = complexity.X_CUBED_METHODS.items()
    found = {name: complexity.fitted(method, 5, (x, y), grid, steps=1200)["rmse"] for name, method in methods}
    assert found["implicit nodes"] < 6
    assert found["mean field"] > 15


# ------------------------------------------------------------------------------------ a suite run for real


def tiny(run: Run) -> Suite:
    """Return a suite on digits that runs in seconds: every kind of study, and a table whose data set is not here."""
    plain = TrainingSpec(
        name="plain",
        source=DataSpec(name="digits", train_rows=200),
        net="small",
        recipe=run.recipe(Recipe(epochs=2, batch_size=64, lr=0.05)),
        evaluation=EvaluationSpec(samples=4, shift=False, test_images=60),
        watch=ablations.Checkpoints,
    )
    nodes = replace(plain, method=lb.ImplicitNodes(components=3), name="implicit-k3")
    elsewhere = replace(plain, source=DataSpec(name="cifar100", root=run.root))
    paper = {"SGD": {"error": Printed("3.53±0.11"), "nll": Printed("0.1280")}}
    both = (plain, nodes)

    def study(name: str, title: str, measure, plot=None, specs=both) -> Study:
        kind = partial(measure, specs=specs) if specs is both else partial(measure, spec=nodes)
        return Study(name=name, title=title, claim="it is so.", measure=kind, plot=plot, specs=specs)

    curves = ablations._figure("components", both)
    return Suite(
        paper="No paper",
        studies=(
            Study(name="table9", title="Table 9", claim="it is so.").compared(
                {"SGD": plain, "iBNN": nodes}, ("error", "nll"), paper
            ),
            Study(name="table10", title="Table 10", claim="it is so.").compared({"SGD": elsewhere}, ("error",)),
            curves,
            study("noise", "Figure 3", noise.measure),
            study("growth", "Figure 4", complexity.errors_by_size),
            study("map", "Figure 5", complexity.map_components, complexity.plot_map, (nodes,)),
        ),
    )


def flags(root, **changes) -> SimpleNamespace:
    given = {"name": "tiny", "budget": "quick", "seeds": "0,1", "device": "cpu", "precision": "32-true"}
    return SimpleNamespace(
        **given
        | {"root": str(root), "data": "", "fresh": False, "compile": False, "rows": "", "stop_after": None}
        | changes
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite")
    assert run_named({"tiny": tiny}, flags(out), out) == 0
    return out


def records_of(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "studies" / f"{name}.json").read_text())["records"]


def test_a_suite_leaves_tables_studies_and_a_report(out):
    record = json.loads((out / "reproduce.json").read_text())
    assert (record["suite"], record["budget"], record["seeds"]) == ("tiny", "quick", [0, 1])
    rows = record["studies"][0]["tables"][0]["rows"]
    assert [row["name"] for row in rows] == ["SGD", "iBNN"]
    results = [json.loads((out / f"digits/small/plain/seed{seed}/result.json").read_text()) for seed in (0, 1)]
    errors = [100 - 100 * result["metrics"]["test"]["accuracy"] for result in results]
    assert rows[0]["ours"]["error"]["mean"] == pytest.approx(sum(errors) / 2)
    assert rows[0]["ours"]["error"]["sem"] == pytest.approx(np.std(errors, ddof=1) / math.sqrt(2))
    assert record["remarks"] == [
        "cifar100 is not here, so what needs it is left out; `leanbayes data prepare cifar100` fetches it."
    ]
    assert "paper | 3.53 ± 0.11 | 0.1280 |" in (out / "reproduce.md").read_text()
    assert len(record["studies"]) == 5
    assert all((out / study["file"]).is_file() for study in record["studies"])
    for name in ("components", "map"):
        assert (out / "studies" / f"{name}.svg").read_text().rstrip().endswith("</svg>")
    assert (out / "report.html").is_file()
    assert not list(out.rglob("*.tmp"))


def test_checkpoints_are_kept_epoch_by_epoch(out):
    rows = ablations.read(out / "digits/small/implicit-k3/seed1" / ablations.FILE)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert len(rows[-1]["test components"]) == 3
    records = records_of(out, "components")
    assert [record["epoch"] for record in ablations.last_epoch(records)] == [2] * 4
    assert records[-1]["component nll"] == pytest.approx(np.mean(rows[-1]["test components"]))


def test_the_map_has_every_component_and_every_point(out):
    records = records_of(out, "map")
    points = [record["point"] for record in records]
    assert (points.count("component"), points.count("grid")) == (3, 7 * 7)
    assert {"train nll", "test error"} <= set(records[-1])
    (plane,) = (record for record in records if record["point"] == "plane")
    assert sum(plane["explained"]) == pytest.approx(1)  # three points are in one plane


def test_pure_noise_is_the_last_point_of_every_curve(out):
    records = records_of(out, "noise")
    assert {record["noise"] for record in records} == {"gaussian", "salt and pepper"}
    rows = [r for r in records if (r["noise"], r["method"], r["seed"]) == ("gaussian", "implicit-k3", 0)]
    assert [row["strength"] for row in rows] == [0, 0.25, 0.5, 0.75, 1]
    for row in rows:
        assert row["total"] == pytest.approx(row["aleatoric"] + row["epistemic"], abs=1e-5)
    assert all(r["epistemic"] == pytest.approx(0, abs=1e-6) for r in records if r["method"] == "plain")


def test_a_second_run_keeps_what_is_there(out, capsys):
    kept = [*out.rglob("result.json"), *out.rglob("checkpoints.json"), *(out / "studies").iterdir()]
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert run_named({"tiny": tiny}, flags(out), out) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert "SGD" in capsys.readouterr().out


def test_other_seeds_measure_the_studies_again(out, tmp_path):
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    assert run_named({"tiny": tiny}, flags(out, seeds="1"), copy) == 0
    assert [{record["seed"] for record in records_of(folder, "growth")} for folder in (out, copy)] == [{0, 1}, {1}]


def test_a_failed_run_is_told_and_its_studies_are_left_out(tmp_path):
    def broken(run: Run) -> Suite:
        suite = tiny(run)
        spec = suite.studies[0].specs[0]
        spec = replace(spec, recipe=replace(spec.recipe, lr=1e30))
        return replace(suite, studies=(replace(suite.studies[4], specs=(spec,)),))

    assert run_named({"tiny": broken}, flags(tmp_path, seeds="0"), tmp_path) == 1
    remarks = json.loads((tmp_path / "reproduce.json").read_text())["remarks"]
    assert remarks[0].startswith("plain, seed 0, failed: TrainingError: the loss is")
    assert remarks[1] == "Figure 4 is left out: not all of its runs are done."


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rank1-cifar", "cifar10 is not here, .*cifar100 is not here"),
        ("rank1-ehr", ".*`leanbayes data prepare physionet2012` fetches it"),
        ("text-reviews", ".*`leanbayes data prepare rt-polarity` fetches it"),
    ],
)
def test_nothing_to_run_says_what_is_missing(name, said, tmp_path):
    run = Run(root=str(tmp_path))
    with pytest.raises(ValueError, match=f"nothing to run: {said}"):
        present(SUITES[name](run), run)


def test_chosen_data_sets_leave_out_tables(monkeypatch):
    monkeypatch.setattr(Run, "has", lambda self, name, ood=False: True)
    run = Run(data=("cifar10",))
    suite, remarks = present(SUITES["rank1-cifar"](run), run)
    assert [study.name for study in suite.studies] == ["table2"]
    assert remarks == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "rank2"}, "expected a suite among rank1-cifar, rank1-ablations, .*, got 'rank2'"),
        ({"name": "rank1-cifar", "seeds": "0,x"}, "expected seeds such as 0,1,2, got '0,x'"),
        ({"name": "rank1-cifar", "seeds": "-1"}, "expected seeds such as 0,1,2, got '-1'"),
    ],
)
def test_wrong_flags_say_what_was_expected(changes, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        run_suite(flags(tmp_path, **changes), tmp_path)


# ------------------------------------------------------------------------------------ single rows


def test_chosen_rows_have_files_of_their_own_and_say_what_they_are(out, tmp_path):
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    full = {path: path.read_bytes() for path in (copy / "reproduce.json", *(copy / "studies").iterdir())}
    assert run_named({"tiny": tiny}, flags(out, rows="iBNN"), copy) == 0
    assert {path: path.read_bytes() for path in full} == full
    record = json.loads((copy / "reproduce.rows-implicit-k3.json").read_text())
    assert record["rows"] == ["iBNN", "implicit-k3"]
    assert [row["name"] for row in record["studies"][0]["tables"][0]["rows"]] == ["iBNN"]
    assert {row["method"] for row in records_of(copy, "growth.rows-implicit-k3")} == {"implicit-k3"}
    assert json.loads((copy / "studies/growth.rows-implicit-k3.json").read_text())["rows"] == ["implicit-k3"]
    page = (copy / "reproduce.rows-implicit-k3.md").read_text()
    assert "A partial run, of these rows alone: iBNN; implicit-k3." in page
    assert "studies/map.rows-implicit-k3.svg" in page
    assert all((copy / study["file"]).is_file() for study in record["studies"])


def test_all_rows_are_the_whole_run(out):
    before = sorted(out.rglob("*"))
    assert run_named({"tiny": tiny}, flags(out, rows="plain,iBNN"), out) == 0
    assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize(
    ("suite", "rows", "said"),
    [
        ("rank1-cifar", "nothing", "expected rows of rank1-cifar among Deterministic; BatchEnsemble; .* got 'nothing'"),
        ("patch-overhead", "EMP", "expected no --rows for patch-overhead, which has no rows to choose, got 'EMP'"),
    ],
)
def test_an_unknown_row_is_refused_with_the_known_ones(suite, rows, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        run_named(SUITES, flags(tmp_path, name=suite, rows=rows), tmp_path)


def test_names_of_rows_may_have_commas_and_rows_have_labels_too(tmp_path):
    suite = SUITES["rank1-cifar"](Run(root=str(tmp_path)))
    assert _labels("Rank-1 BNN, Gaussian,plain", suite, "rank1-cifar") == ("plain", "rank1-gaussian")
    assert _labels("", suite, "rank1-cifar") == ()


def test_a_row_of_one_network_leaves_out_rows_of_other_networks_with_its_label(tmp_path):
    run = Run(root=str(tmp_path), device="cpu", budget="short")
    suite = SUITES["implicit-complexity"](run)
    assert _labels("iBNN, 42K", suite, "implicit-complexity") == ("implicit-k8 lenet",)
    assert len(_labels("implicit-k8", suite, "implicit-complexity")) == 5  # four LeNets and VGG-16
    parts = [part for study in suite.studies if (part := study.only(("implicit-k8 lenet",))) is not None]
    assert {(spec.name, spec.net) for part in parts for spec in part.specs} == {("implicit-k8", "lenet")}
    assert {row for part in parts for row in part.rows} == {"iBNN, 42K", "implicit-k8"}


def test_compiled_steps_are_asked_for_by_a_flag(tmp_path):
    for compiled in (False, True):
        run = Run(root=str(tmp_path), device="cpu", compile=compiled)
        specs = [spec for make in SUITES.values() for study in make(run).studies for spec in study.rows.values()]
        assert len(specs) > 60
        assert {spec.recipe.compile for spec in specs} == {compiled}
        assert run.recipe(Recipe()).compile == compiled
