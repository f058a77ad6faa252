"""Comparisons on tables with text, gaps and weights, and predictions for new rows and new images."""

from __future__ import annotations

import csv
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from leanbayes import data
from leanbayes.cli.compare import comparison_options, plan_of
from leanbayes.cli.main import main, parse
from leanbayes.compare.baselines import BASELINES
from leanbayes.compare.experiment import Experiment, load
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.load_run import load_run
from leanbayes.compare.row_training import weighted
from leanbayes.compare.run import fit_baseline, row_of
from leanbayes.core.conversion import stochastic_layers
from leanbayes.data.holdout import held_out
from leanbayes.data.table import TablePreparation
from leanbayes.training import Recipe

FLAGS = ["--recipe.epochs", "3", "--samples", "4", "--device", "cpu", "--backend", "local"]
OPTIONS = ["--methods", "plain,rank1", "--weight", "weight", "--types", "region=category", *FLAGS]


def write(path, columns):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def columns(rows=160):
    random = np.random.default_rng(0)
    x = random.normal(size=rows)
    label = np.where(x + 0.1 * random.normal(size=rows) > 0, "high", "low")
    return {
        "id": [f"a{i}" for i in range(rows)],
        "x": ["" if i % 20 == 0 else value for i, value in enumerate(x)],
        "city": [f"c{i % 40}" for i in range(rows)],
        "region": ["north", "south"] * (rows // 2),
        "day": [f"2024-{1 + i % 12:02}-{1 + i % 28:02}" for i in range(rows)],
        "weight": [1 + i % 3 for i in range(rows)],
        "label": label.tolist(),
    }


def lines(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_default_rows_leave_out_a_method_that_cannot_convert_the_network(tmp_path):
    """The network of a small table has one hidden layer, whose channels nested dropout cannot order."""
    flags = ["--data", str(write(tmp_path / "t.csv", columns())), "--weight", "weight"]
    plan = plan_of(parse(comparison_options(), flags, "compare"))
    assert "\n  nested is left out: expected a network from which NestedDropout can cut 10% of" in plan.sentence
    assert {"plain", "rank1", "deep_ensemble", "linear"} < {job.name for job in plan.jobs}
    assert "nested" not in {job.name for job in plan.jobs}
    named = plan_of(parse(comparison_options(), [*flags, "--methods", "nested"], "compare"))
    assert {job.name for job in named.jobs} == {"nested"}  # asked for, it says why it fails


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A comparison on a table with codes, gaps, dates and weights."""
    folder = tmp_path_factory.mktemp("table")
    path = write(folder / "t.csv", columns())
    assert main(["compare", "--data", str(path), *OPTIONS, "--out", str(folder / "out")]) == 0
    return folder


def test_a_comparison_says_what_it_did_with_the_columns(table, capsys):
    result = json.loads((table / "out" / "t" / "mlp" / "rank1" / "seed0" / "result.json").read_text())
    notes = " ".join(result["data"]["notes"])
    for said in (
        "numbers (1): x",
        "region (2 values)",
        "learned vectors (1): city",
        "dates (1): day",
    ):
        assert said in notes
    largest = result["data"]["largest_class"]
    assert largest["name"] in ("high", "low")
    assert 0 < largest["share"] < 1
    assert main(["compare", "--data", str(table / "t.csv"), *OPTIONS, "--out", str(table / "out")]) == 0  # kept
    said = capsys.readouterr().err
    assert "inputs from 4 columns" in said
    assert "left out: weight (weights of the rows), id (143 of 143 values differ)" in said
    assert "always predicting the largest class" in said


def test_the_preparation_is_stored_with_the_run(table):
    run = table / "out" / "t" / "mlp" / "rank1" / "seed0"
    stored = TablePreparation.from_json(json.loads((run / "preparation.json").read_text()))
    assert stored == load_run(run).data.table
    changed = stored.to_json()
    changed["columns"][0]["fill"] = 7.0
    kept = (run / "preparation.json").read_text()
    try:
        (run / "preparation.json").write_text(json.dumps(changed))
        found = load_run(run).data
        filled = found.train.x[found.train.x[:, 1] == 1, 0]
        assert (filled == 7).all()
        assert len(filled)
        (run / "preparation.json").write_text('{"schema": 1}')
        with pytest.raises(ValueError, match=r"preparation\.json' is damaged"):
            load_run(run)
    finally:
        (run / "preparation.json").write_text(kept)


def test_new_rows_with_other_columns_and_values(table, tmp_path, capsys):
    run = table / "out" / "t" / "mlp" / "rank1" / "seed0"
    new = {name: cells[:30] for name, cells in columns().items() if name not in ("id", "weight", "label")}
    new["city"] = ["Rome", *new["city"][1:]]
    path = write(tmp_path / "new.csv", {name: new[name] for name in reversed(new)} | {"more": [1] * 30})
    assert main(["predict", str(run), "--data", str(path), "--out", str(tmp_path / "p"), "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert "columns that training had not are ignored: more" in said
    assert "city 1 ('Rome')" in said
    assert "x 2" in said
    found = lines(tmp_path / "p" / "predictions.csv")
    assert list(found[0])[:6] == ["row", "predicted", "probability", "total", "aleatoric", "epistemic"]
    for row in found:
        assert float(row["p(high)"]) + float(row["p(low)"]) == pytest.approx(1, abs=1e-4)
        assert row["predicted"] == max(("high", "low"), key=lambda name: float(row[f"p({name})"]))


def test_rows_with_targets_are_scored(table, tmp_path, capsys):
    run = table / "out" / "t" / "mlp" / "plain" / "seed0"
    path = write(tmp_path / "again.csv", columns())
    assert main(["predict", str(run), "--data", str(path), "--out", str(tmp_path / "p"), "--device", "cpu"]) == 0
    found = lines(tmp_path / "p" / "predictions.csv")
    right = np.mean([row["predicted"] == label for row, label in zip(found, columns()["label"], strict=True)])
    said = capsys.readouterr()
    assert f"accuracy {100 * right:.2f} %" in said.out
    assert "no scores" not in said.err
    path = write(tmp_path / "again.csv", columns() | {"label": ["", *columns()["label"][1:]]})
    assert main(["predict", str(run), "--data", str(path), "--out", str(tmp_path / "q"), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "no scores: column 'label' has gaps" in said.err
    assert "accuracy" not in said.out


def test_a_missing_column_is_one_sentence(table, tmp_path, capsys):
    run = table / "out" / "t" / "mlp" / "plain" / "seed0"
    path = write(tmp_path / "new.csv", {name: columns()[name] for name in ("x", "region")})
    assert main(["predict", str(run), "--data", str(path), "--out", str(tmp_path / "p")]) == 2
    assert "has no column 'city', 'day', which the training data had" in capsys.readouterr().err


def test_few_rows_are_one_sentence(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("region,x,y\nnorth,1,2\nsouth,,3\n")
    command = ["compare", "--data", str(tmp_path / "t.csv"), "--methods", "plain", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "has 2 rows with a target; expected at least 3" in capsys.readouterr().err
    (tmp_path / "t.csv").write_text("region,x,y\nnorth,1,2\nsouth,,3\nwest,3,2\n")
    assert main(command) == 2
    assert "at least 5 rows of each of the 2 classes" in capsys.readouterr().err


def test_rows_are_drawn_in_proportion_to_their_weights(tmp_path):
    mine = data.load(write(tmp_path / "t.csv", columns() | {"weight": [i % 3 for i in range(160)]}), weight="weight")
    mine.train.x[:, 0] = torch.arange(len(mine.train))
    mine.train.weight[:] = torch.arange(len(mine.train)) % 3
    torch.manual_seed(0)
    loader = weighted((*mine.prepared(mine.train), mine.train.weight), Recipe(epochs=1, batch_size=32))
    loader.generator.manual_seed(0)
    numbers = mine.inputs(mine.train.x)[:, 0]
    drawn = torch.cat([x[:, 0] for _ in range(200) for x, _ in loader])
    counts = torch.zeros(3).index_add(0, torch.arange(len(numbers)) % 3, (drawn[:, None] == numbers).sum(0).float())
    assert counts[0] == 0
    share = float(counts[2] / counts.sum())
    expected = 2 * 47 / (2 * 47 + 48)  # of 143 rows, 48 have weight 1 and 47 weight 2
    assert share == pytest.approx(expected, abs=4 * (2 / 9 / len(drawn)) ** 0.5)


def test_rows_to_evaluate_on_are_whole_groups_or_the_latest(tmp_path):
    path = str(write(tmp_path / "t.csv", columns() | {"patient": [f"p{i // 8}" for i in range(160)]}))
    options = {"name": path, "target": "label", "hold_out": 20}
    grouped = load(DataSpec(**options, group="patient"))
    assert not set(grouped.train.group.tolist()) & set(grouped.test.group.tolist())
    assert len(grouped.test) >= 16
    timed = load(DataSpec(**options, time="day"))
    assert timed.train.time.max() <= timed.test.time.min()
    plain = load(DataSpec(**options))
    assert len(plain.test) == 20
    assert plain.train.x.shape[1] == len(plain.table.inputs)


def test_rows_that_validate_are_whole_groups(tmp_path, monkeypatch):
    path = str(write(tmp_path / "t.csv", columns() | {"patient": [f"p{i // 8}" for i in range(160)]}))
    source = DataSpec(name=path, target="label", group="patient", weight="weight", validation=0.1)
    recipe = Recipe(epochs=1)
    job = Job(source=source, net="mlp", method=None, recipe=recipe, evaluation=EvaluationSpec())
    row = row_of(job, Experiment(source, "mlp", job.evaluation), tmp_path)
    inputs, targets, weights = row.data
    assert len(inputs) == len(targets) == len(weights) == len(row.held.groups)
    seen = {}
    monkeypatch.setitem(BASELINES, "linear", lambda *given: seen.update(held=given[-1]))
    experiment = Experiment(source, "mlp", job.evaluation)
    fit_baseline(replace(job, baseline="linear"), experiment)
    assert torch.equal(seen["held"].groups, experiment.data.train.group)
    held = held_out(targets, row.held.share, 0, groups=row.held.groups, time=row.held.time)
    assert not set(row.held.groups[held].tolist()) & set(row.held.groups[~held].tolist())


def test_options_of_tables_leave_older_ids_unchanged():
    def of(**options):
        source = DataSpec(name="digits", **options)
        return Job(source=source, net="small", method=None, recipe=Recipe(epochs=1), evaluation=EvaluationSpec())

    assert set(of().settings()["data"]) == {"name", "root", "split", "target", "task", "train_rows", "hold_out"}
    assert of().id != of(drop="a").id
    assert of(types="a=date").settings()["data"]["types"] == "a=date"
    assert "drop" not in repr(DataSpec(name="digits", drop="a"))


@pytest.mark.slow
def test_wine_with_text_and_gaps_is_above_95_percent(tmp_path):
    from sklearn.datasets import load_wine

    bunch, random = load_wine(), np.random.default_rng(0)
    table = {name: column.tolist() for name, column in zip(bunch.feature_names, bunch.data.T, strict=True)}
    table["region"] = random.choice(["north", "south", "west"], len(bunch.target)).tolist()
    gappy = {name: ["" if random.random() < 0.05 else cell for cell in cells] for name, cells in table.items()}
    path = write(tmp_path / "wine.csv", gappy | {"cultivar": bunch.target_names[bunch.target].tolist()})
    flags = ["--data", str(path), "--methods", "plain,rank1", "--device", "cpu", "--backend", "local"]
    for split in (0, 1, 2):
        assert main(["compare", *flags, "--split", str(split), "--out", str(tmp_path / f"out{split}")]) == 0
    for method in ("plain", "rank1"):
        found = [tmp_path / f"out{split}" / "wine" / "mlp" / method / "seed0" / "result.json" for split in (0, 1, 2)]
        accuracy = [json.loads(path.read_text())["metrics"]["test"]["accuracy"] for path in found]
        assert np.mean(accuracy) > 0.95


# ---------------------------------------------------------------- images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A comparison on images of several sizes and modes, and a flat folder of new ones."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)

    def picture(name, number):
        height, width = random.integers(10, 16, 2)
        pixels = random.integers(0, 60, (height, width)).astype(np.uint8)
        if name == "bar":
            pixels[:, width // 2 - 1 : width // 2 + 2] = 230
        colour = np.stack([pixels, pixels // 2, pixels], 2)
        deep = pixels.astype(np.uint16) * 257
        return Image.fromarray((pixels, colour, deep)[number % 3])

    for split, count in (("train", 20), ("test", 6)):
        for name in ("bar", "none"):
            (folder / "set" / split / name).mkdir(parents=True)
            for i in range(count):
                picture(name, i).save(folder / "set" / split / name / f"{i}.png")
    (folder / "new").mkdir()
    for i in range(6):
        picture("bar", i).save(folder / "new" / f"photo {i}.png")
    flags = ["--data", str(folder / "set"), "--methods", "plain", "--no-shift", "--ood", "none", *FLAGS]
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # sizes and depths differ
        assert main(["compare", *flags, "--out", str(folder / "out")]) == 0
    return folder


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("new", [f"photo {i}.png" for i in range(6)]),
        ("new/photo 3.png", ["photo 3.png"]),
        ("new/*[24].png", ["photo 2.png", "photo 4.png"]),
    ],
)
def test_new_images_are_predicted_by_name(pictures, tmp_path, given, names):
    run = pictures / "out" / "set" / "small" / "plain" / "seed0"
    data_flag = str(pictures / given)
    assert main(["predict", str(run), "--data", data_flag, "--out", str(tmp_path), "--device", "cpu"]) == 0
    found = lines(tmp_path / "predictions.csv")
    assert [row["file"].rpartition("/")[2] for row in found] == names
    header = ["row", "file", "predicted", "probability", "total", "aleatoric", "epistemic", "p(bar)", "p(none)"]
    assert list(found[0]) == header


def test_new_images_that_a_shell_has_listed(pictures, tmp_path, monkeypatch):
    run = pictures / "out" / "set" / "small" / "plain" / "seed0"
    monkeypatch.chdir(tmp_path)
    listed = [str(pictures / "new" / f"photo {i}.png") for i in (1, 5)]
    assert main(["predict", "--samples", "2", "--data", *listed, str(run), "--device", "cpu"]) == 0
    found = lines(tmp_path / "predictions" / "new" / "predictions.csv")
    assert [row["file"] for row in found] == listed


def test_images_are_predicted_alike_alone_and_among_others(pictures, tmp_path):
    run = pictures / "out" / "set" / "small" / "plain" / "seed0"
    for given, out in (("new", "all"), ("new/photo 4.png", "one")):
        command = ["predict", str(run), "--data", str(pictures / given), "--out", str(tmp_path / out)]
        assert main([*command, "--part-rows", "2", "--device", "cpu"]) == 0
    together, alone = (lines(tmp_path / out / "predictions.csv") for out in ("all", "one"))
    assert float(together[4]["p(bar)"]) == pytest.approx(float(alone[0]["p(bar)"]), abs=1e-5)


def test_images_that_changed_are_not_mixed_with_finished_parts(pictures, tmp_path, capsys):
    run = pictures / "out" / "set" / "small" / "plain" / "seed0"
    image = tmp_path / "a.png"
    image.write_bytes((pictures / "new" / "photo 0.png").read_bytes())
    command = ["predict", str(run), "--data", str(image), "--out", str(tmp_path / "p"), "--device", "cpu"]
    assert main(command) == 0
    image.write_bytes((pictures / "new" / "photo 1.png").read_bytes())
    assert main(command) == 2
    assert "holds predictions of something else" in capsys.readouterr().err


def test_images_for_a_network_of_tables_are_one_sentence(table, pictures, tmp_path, capsys):
    run = table / "out" / "t" / "mlp" / "plain" / "seed0"
    assert main(["predict", str(run), "--data", str(pictures / "new"), "--out", str(tmp_path / "p")]) == 2
    assert "got image files, which are grey or have three colours" in capsys.readouterr().err


def test_a_row_with_less_initial_noise_is_recorded_and_loaded(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=60)
    path = write(tmp_path / "line.csv", {"x": x, "y": 2 * x})
    flags = ["--data", str(path), "--target", "y", "--methods", "plain,rank1", "--seeds", "0", "--device", "cpu"]
    flags += ["--recipe.epochs", "60", "--recipe.patience", "10", "--recipe.lr", "0.01", "--samples", "2"]
    assert main(["compare", *flags, "--out", str(tmp_path / "out")]) == 0
    folder = tmp_path / "out" / "line" / "mlp" / "rank1" / "seed0"
    result = json.loads((folder / "result.json").read_text())
    scale = result["validation"]["scale"]
    assert scale == json.loads((folder / "validation.json").read_text())["scale"]
    assert 0 < scale < 0.5
    run = load_run(folder)
    (first, *_) = [layer for _, layer in stochastic_layers(run.model)]
    assert first.method.init_std == pytest.approx(0.1 * scale)
    assert first.method.init_spread == pytest.approx(0.1 * scale)
    plain = json.loads((folder.parents[1] / "plain" / "seed0" / "result.json").read_text())
    assert "scale" not in plain["validation"]
