"""Variants of late conversion: shared plain part, resumption, shared work, figures against a computation by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import leanbayes as lb
from leanbayes.compare import row_training
from tests.docs.pages import RESULTS, unsaid
from tools import separation, separation_page
from tools.ruler_scores import read_predictions, Saved

FLAGS = ["--data", "digits", "--net", "small", "--epochs", "10", "--budget", "quick", "--hold-out", "100"]
FLAGS += ["--train-rows", "100", "--device", "cpu", "--precision", "32-true", "--samples", "4", "--seeds", "0,1"]
NAMES = ("implicit", "restart 0.5", "tiled last 2", "plain, restart 0.5")
FOLDER = RESULTS / "separation"


@pytest.fixture(scope="module", autouse=True)
def _short_tiles():
    """Five tiled epochs do not fit after the conversion of a short training."""
    short = separation.Variant(recipe={"tile_last_epochs": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(separation.VARIANTS, "tiled last 2", short)
        yield


def train(out: Path, *names: str) -> int:
    return separation.main(["train", "--out", str(out), *FLAGS, "--variants", ";".join(names)])


def saved(out: Path) -> dict[str, Saved]:
    return {path.stem: read_predictions(path) for path in sorted(out.glob("*.npz"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("separation")
    assert train(out, *NAMES) == 0
    return out


def same(one: Saved, other: Saved) -> bool:
    return one.parts.keys() == other.parts.keys() and all(torch.equal(one.parts[n], other.parts[n]) for n in one.parts)


def test_every_variant_begins_from_the_plain_network_of_its_seed(finished):
    found = saved(finished)
    assert len(found) == 2 * (1 + len(NAMES))
    for seed in (0, 1):
        lines = (finished / "digits" / "small" / "plain" / f"seed{seed}" / "history.jsonl").read_text().splitlines()
        before = sum(json.loads(line)["seconds"] for line in lines[:7])
        for run in found.values():
            if run.about["seed"] == seed:
                assert run.about["recipe"].get("convert_at_epoch") == (
                    7 if run.about["method"]["name"] != "plain" else 0
                )
                assert run.about["seconds"]["before"] == pytest.approx(before)


def test_variants_differ_and_are_trained_on_other_rows_than_they_predict(finished):
    found = saved(finished)
    restarted, default = found["restart-0.5-seed0"], found["implicit-seed0"]
    assert not same(restarted, default)
    assert restarted.about["recipe"]["restart_at_conversion"] == 0.5
    assert restarted.about["data"]["held_out"] == len(restarted.y) == 100
    assert set(default.parts) == {"both", "centre", *(f"member{k}" for k in range(4))}
    assert set(found["plain-restart-0.5-seed0"].parts) == {"both"}


def test_a_stopped_command_continues_to_the_same_numbers(finished, tmp_path, monkeypatch):
    """It stops in the middle of a variant, as a kill would; finished files are not trained again."""
    fit, calls = row_training.fit, []

    def stopping(model, data, recipe, **given):
        calls.append(recipe)

        def stop(state):
            if len(calls) == 3 and state.epoch == 9:
                state.save()
                raise KeyboardInterrupt

        return fit(model, data, recipe, **given | {"callbacks": (*given["callbacks"], stop)})

    monkeypatch.setattr(row_training, "fit", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, *NAMES)
    assert sorted(saved(tmp_path)) == ["plain-seed0", "plain-seed1"]
    written = (tmp_path / "plain-seed0.npz").stat().st_mtime_ns
    assert train(tmp_path, *NAMES) == 0
    assert (tmp_path / "plain-seed0.npz").stat().st_mtime_ns == written
    assert len(calls) == 3 + 2 * len(NAMES)
    for name, run in saved(finished).items():
        assert same(run, read_predictions(tmp_path / f"{name}.npz")), name


def test_a_variant_that_fails_leaves_its_error_and_the_others_continue(tmp_path, monkeypatch):
    """The 10 tiled epochs begin before the conversion."""
    monkeypatch.setitem(separation.VARIANTS, "wrong", separation.Variant(recipe={"tile_last_epochs": 10}))
    assert train(tmp_path, "wrong", "implicit") == 1
    assert "the plain part of wrong is not that of" in (tmp_path / "wrong-seed0.failed").read_text()
    assert (tmp_path / "implicit-seed1.npz").is_file()
    with pytest.raises(ValueError, match=r"expected variants among plain; implicit; .* got wong"):
        train(tmp_path, "wong")


def test_figures_are_those_of_the_files(finished, tmp_path):
    """Disagreement and differences, computed with numpy from the files."""
    separation.main(["score", *map(str, finished.glob("*.npz")), "--out", str(tmp_path / "separation.json")])
    found = json.loads((tmp_path / "separation.json").read_text())
    files = saved(finished)
    assert [each["method"] for each in found["methods"]] == [*NAMES[:2], NAMES[3], NAMES[2]]
    votes = {
        seed: [files[f"implicit-seed{seed}"].parts[f"member{k}"].argmax(1).numpy() for k in range(4)] for seed in "01"
    }
    for seed, each in votes.items():
        wanted = np.mean([(each[i] != each[j]).mean() for i in range(4) for j in range(i)])
        assert found["methods"][0]["disagreement"][seed] == pytest.approx(wanted)
    default, restarted, plain = (found["methods"][number] for number in (0, 1, 2))
    for part in ("both", "members without noise"):
        own, other = (each["parts"][part]["by_seed"] for each in (restarted, default))
        less = [own[seed]["cnll"] - other[seed]["cnll"] for seed in "01"]
        assert restarted["parts"][part]["less_default"]["differences"] == pytest.approx(less)
    assert restarted["recipe"]["restart_at_conversion"] == 0.5
    assert plain["disagreement"] == {}
    assert 0.9 < default["members"]["0"]["correlation"] <= 1


def test_offsets_are_those_of_the_members():
    torch.manual_seed(0)
    start = lb.convert(torch.nn.Linear(50, 3), lb.ImplicitNodes(components=4))
    assert separation.movement(start, start)["correlation"] == pytest.approx(1)
    torch.manual_seed(1)
    other = lb.convert(torch.nn.Linear(50, 3), lb.ImplicitNodes(components=4))
    found = separation.movement(start, other)
    assert abs(found["correlation"]) < 0.4
    loc = start.posterior.loc.detach()
    assert found["spread_before"] == pytest.approx(float((loc - loc.mean(0)).std()), rel=1e-6)
    assert separation.movement(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) == {}


def test_a_training_costs_its_steps():
    prices = {"rows": [{"net": "n", "method": "implicit", "ratio": 1.5}, {"net": "n", "method": "plain", "ratio": 1.0}]}
    one = {"net": "n", "of": "implicit", "fields": {}, "recipe": {"convert_at_epoch": 28}}
    assert separation_page.price(one, 40, prices) == pytest.approx((28 + 12 * 1.5) / 40)
    tiled = one | {"recipe": {"convert_at_epoch": 28, "tile_last_epochs": 5}}
    assert separation_page.price(tiled, 40, prices) == pytest.approx((28 + 7 * 1.5 + 5 * 4 * 1.5) / 40)
    assert separation_page.price(one | {"of": "plain"}, 40, prices) == 1
    assert separation_page.price(one | {"of": "rank1"}, 40, prices) is None


def test_the_page_is_made_of_its_figures(finished, tmp_path):
    folder = tmp_path / "separation"
    separation.main(["score", *map(str, finished.glob("*.npz")), "--out", str(folder / "separation.json")])
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "price.json").write_text((RESULTS / "ruler" / "price.json").read_text())
    text = separation_page.page(folder)
    assert "converted after 7" in " ".join(text.split())
    for made in separation_page.tables(folder).values():
        assert f"\n{made}" in text
    (line,) = [line for line in text.splitlines() if line.startswith("* `restart 0.5` is worth")]
    assert "(2 seeds)" in line
    assert "negative in" in line
    at = 0.5 * (1 + np.cos(np.pi * (7 - 0.25) / (10 - 0.25)))  # of the cosine, after its warm-up
    assert f"rate is at {at:.2f} of its highest value there" in " ".join(text.split())


def test_the_published_page_equals_its_file():
    text = (RESULTS / "separation.md").read_text(encoding="utf-8")
    assert [name for name, made in separation_page.tables(FOLDER).items() if f"\n{made}" not in text] == []
    assert unsaid("docs/results/separation.md", separation_page.sentences(FOLDER)) == []


def test_the_summary_of_the_published_page_follows_from_its_file():
    methods = {one["method"]: one for one in json.loads((FOLDER / "separation.json").read_text())["methods"]}
    cnll = {name: [seed["cnll"] for seed in one["parts"]["both"]["by_seed"].values()] for name, one in methods.items()}
    default = cnll.pop("implicit")
    gaps = {name: np.subtract(values, default) for name, values in cnll.items()}
    assert {name for name, gap in gaps.items() if (gap < 0).all()} == {"posterior rate x 5", "tiled last 5"}
    for worse in ("restart 0.5", "posterior rate x 24", "spread 0.5", "noise 0.05"):
        assert (gaps[worse] > 0).all()
    assert min(methods["spread 0.5"]["disagreement"].values()) > max(methods["implicit"]["disagreement"].values())
    assert all(one["parts"]["both"]["networks"] < 1.5 for one in methods.values())  # the goal was 2.0
    made = {name: one["parts"] for name, one in methods.items() if "members without noise" in one["parts"]}
    better = {
        name for name, parts in made.items() if parts["members without noise"]["cnll"] < parts["both"]["cnll"] - 5e-5
    }
    assert set(made) - better == {"noise 0.05"}
