"""Studies against oracles, and one small suite run for real."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

import leanbayes as lb
from leanbayes import models
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.data import DataSet, Split
from leanbayes.training import Recipe
from leanbayes_papers import checkpoints, components, growth, noise, run_suite, SUITES, x_cubed
from leanbayes_papers.runner import present, run_named
from leanbayes_papers.study import Study
from leanbayes_papers.suite import printed, Row, Setting, Suite, Table

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
    plane, oracle = components.plane_of(points), PCA(2).fit(points.numpy())
    assert np.allclose(plane.explained, oracle.explained_variance_ratio_)
    assert np.allclose(plane.coordinates(points).abs(), np.abs(oracle.transform(points.numpy())))
    inside = plane.point(torch.tensor([0.3, -2.0], dtype=torch.float64))
    assert torch.allclose(plane.coordinates(inside), torch.tensor([0.3, -2.0], dtype=torch.float64))


def test_a_checkpoint_is_looked_at_component_by_component():
    torch.manual_seed(0)
    model = lb.convert(models.MLP(4, 3), lb.Rank1(components=3, init_spread=1.0))
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    with torch.no_grad():
        outputs = [lb.draw(model, seed=0, index=k)(x) for k in range(3)]
    each = torch.stack([logits.softmax(1) for logits in outputs]).double()
    found = checkpoints.look(model, x, y)
    rows = torch.arange(40)
    assert found["components"] == pytest.approx([-p[rows, y].log().mean().item() for p in each], rel=1e-5)
    assert found["nll"] == pytest.approx(-each.mean(0)[rows, y].log().mean().item(), rel=1e-5)
    assert found["accuracy"] == (each.mean(0).argmax(1) == y).double().mean().item()
    votes = each.argmax(2)
    pairs = [(votes[i] != votes[j]).double().mean() for i in range(3) for j in range(i)]
    errors = (votes != y).double().mean()
    assert found["disagreement"] == pytest.approx((sum(pairs) / 3 / errors).item())
    assert checkpoints.look(models.MLP(4, 3), x, y)["disagreement"] is None


def test_growth_is_told_by_size():
    numbers = {"implicit": {"0": {"42000": 0.2, "165000": 0.1}, "1": {"42000": 0.4, "165000": 0.1}}}
    assert growth.say_growth(numbers) == ["implicit: error 30.00 % at 42K, 10.00 % at 165K"]


def test_the_regression_fits_and_spreads():
    torch.manual_seed(0)
    x = torch.linspace(-4, 4, 30)[:, None]
    grid = torch.linspace(-6, 6, 25)[:, None]
    found = x_cubed.fitted(x_cubed.METHODS["implicit nodes"], 1, (x, x**3), grid, steps=150)
    assert found["rmse"] < 15 < x_cubed.Y_UNIT
    assert 0 < found["inside"] < found["outside"]


@pytest.mark.slow
def test_mean_field_misses_the_curve_where_implicit_nodes_do_not():
    """Figure 1 of the implicit-nodes paper at five hidden layers: mean field is no better than a constant."""
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.rand(30, 1, generator=generator) - 1) * 4
    y = x**3 + 3 * torch.randn(30, 1, generator=generator)
    grid = torch.linspace(-6, 6, 121)[:, None]
    found = {name: x_cubed.fitted(m, 5, (x, y), grid, steps=1200)["rmse"] for name, m in x_cubed.METHODS.items()}
    assert found["implicit nodes"] < 6
    assert found["mean field"] > 15


# ------------------------------------------------------------------------------------ a suite run for real


def tiny(setting: Setting) -> Suite:
    """Run a suite on digits in seconds: every kind of study, and rows whose data set does not exist."""
    recipe = setting.recipe(Recipe(epochs=2, batch_size=64, lr=0.05))
    judging = EvaluationSpec(samples=4, shift=False, test_images=60)
    plain = Job(
        source=DataSpec(name="digits", train_rows=200),
        net="small",
        method=None,
        label="plain",
        recipe=recipe,
        evaluation=judging,
    )
    nodes = replace(plain, method=lb.ImplicitNodes(components=3), label="implicit-k3")
    elsewhere = replace(plain, source=DataSpec(name="cifar100", root=setting.root))
    rows = (
        Row(name="SGD", job=plain, paper=printed(("error", "nll"), "3.53±0.11 0.1280")),
        Row(name="iBNN", job=nodes, paper={}),
        Row(name="SGD, CIFAR-100", job=elsewhere, paper={}),
    )
    both = {"jobs": (plain, nodes), "claim": "it is so."}
    return Suite(
        paper="No paper",
        tables=(Table(title="Table 9", measures=("error", "nll"), rows=rows, claim="it is so."),),
        studies=(
            Study(
                name="curves",
                title="Figure 1",
                measure=checkpoints.curves,
                draw=checkpoints.draw_components,
                say=checkpoints.say_components,
                **both,
            ),
            Study(
                name="diversity",
                title="Figure 2",
                measure=checkpoints.curves,
                draw=checkpoints.draw_disagreement,
                say=checkpoints.say_disagreement,
                **both,
            ),
            Study(
                name="noise",
                title="Figure 3",
                measure=noise.noise_curves,
                draw=noise.draw_noise,
                say=noise.say_noise,
                **both,
            ),
            Study(
                name="growth",
                title="Figure 4",
                measure=growth.errors_by_size,
                draw=growth.draw_growth,
                say=growth.say_growth,
                **both,
            ),
            Study(
                name="map",
                title="Figure 5",
                claim="it is so.",
                jobs=(nodes,),
                measure=components.map_components,
                draw=components.draw_map,
                say=components.say_map,
            ),
        ),
        watched=frozenset({"plain", "implicit-k3"}),
    )


def flags(root, **changes) -> SimpleNamespace:
    given = {"name": "tiny", "budget": "quick", "seeds": "0,1", "device": "cpu", "precision": "32-true"}
    return SimpleNamespace(**given | {"root": str(root), "data": "", "fresh": False} | changes)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite")
    assert run_named({"tiny": tiny}, flags(out), out) == 0
    return out


def test_a_suite_leaves_tables_studies_and_a_report(out):
    record = json.loads((out / "reproduce.json").read_text())
    assert (record["suite"], record["budget"], record["seeds"]) == ("tiny", "quick", [0, 1])
    rows = record["tables"][0]["rows"]
    assert [row["name"] for row in rows] == ["SGD", "iBNN"]
    results = [json.loads((out / f"digits/small/plain/seed{seed}/result.json").read_text()) for seed in (0, 1)]
    errors = [100 - 100 * result["metrics"]["test"]["accuracy"] for result in results]
    assert rows[0]["ours"]["error"]["mean"] == pytest.approx(sum(errors) / 2)
    assert rows[0]["ours"]["error"]["sem"] == pytest.approx(np.std(errors, ddof=1) / math.sqrt(2))
    assert record["remarks"] == [
        "cifar100 is not here, so what needs it is left out; `leanbayes data prepare cifar100` fetches it."
    ]
    page = (out / "reproduce.md").read_text()
    assert "paper | 3.53 ± 0.11 | 0.1280 |" in page
    assert len(record["studies"]) == 5
    for study in record["studies"]:
        assert study["says"]
        assert (out / study["file"]).is_file()
        assert (out / study["file"]).with_suffix(".svg").read_text().rstrip().endswith("</svg>")
    assert (out / "report.html").is_file()
    assert not list(out.rglob("*.tmp"))


def test_checkpoints_are_kept_epoch_by_epoch(out):
    rows = checkpoints.read(out / "digits/small/implicit-k3/seed1" / checkpoints.FILE)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert len(rows[-1]["test"]["components"]) == 3


def test_the_map_has_every_component_and_every_point(out):
    numbers = json.loads((out / "studies/map.json").read_text())["numbers"]
    assert len(numbers["components"]) == len(numbers["at_components"]) == 3
    assert np.array(numbers["maps"]["test"]["error"]).shape == (7, 7)
    assert sum(numbers["explained"]) == pytest.approx(1)  # three points lie in a plane


def test_pure_noise_is_the_last_point_of_every_curve(out):
    curves = json.loads((out / "studies/noise.json").read_text())["numbers"]["digits"]
    assert set(curves) == {"gaussian", "salt and pepper"}
    rows = curves["gaussian"]["implicit-k3"]["0"]
    assert [row["strength"] for row in rows] == [0, 0.25, 0.5, 0.75, 1]
    for row in rows:
        assert row["total"] == pytest.approx(row["aleatoric"] + row["epistemic"], abs=1e-5)
    assert all(row["epistemic"] == pytest.approx(0, abs=1e-6) for row in curves["gaussian"]["plain"]["0"])


def test_a_second_run_keeps_what_is_there(out, capsys):
    kept = [*out.rglob("result.json"), *out.rglob("checkpoints.json"), *(out / "studies").iterdir()]
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert run_named({"tiny": tiny}, flags(out), out) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert "SGD" in capsys.readouterr().out


def test_other_seeds_measure_the_studies_anew(out, tmp_path):
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    assert run_named({"tiny": tiny}, flags(out, seeds="1"), copy) == 0
    seeds = [set(json.loads((f / "studies/growth.json").read_text())["numbers"]["plain"]) for f in (out, copy)]
    assert seeds == [{"0", "1"}, {"1"}]


def test_a_failed_run_is_told_and_its_studies_are_left_out(tmp_path):
    def broken(setting: Setting) -> Suite:
        suite = tiny(setting)
        job = replace(suite.tables[0].rows[0].job, recipe=replace(suite.tables[0].rows[0].job.recipe, lr=1e30))
        table = replace(suite.tables[0], rows=(replace(suite.tables[0].rows[0], job=job),))
        return replace(suite, tables=(table,), studies=(replace(suite.studies[3], jobs=(job,)),), watched=frozenset())

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
    setting = Setting(root=str(tmp_path))
    with pytest.raises(ValueError, match=f"nothing to run: {said}"):
        present(SUITES[name](setting), setting)


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
