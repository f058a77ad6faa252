"""Rows that convert late or after the training begin from the plain one, to the same bits as separate trainings."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import leanbayes as lb
from leanbayes.cli.compare import comparison_options, plan_of
from leanbayes.cli.main import main, parse
from leanbayes.compare import plain_state, row_training
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, recipe_for
from leanbayes.compare.plain_state import FOLDER, keeping, waits
from leanbayes.compare.run_all import complete, run_all, run_in_order
from leanbayes.compare.workers import phases
from leanbayes.runtime._files import read_tensors
from tests.golden.compare import without_machine

IMAGES = DataSpec(name="digits", train_rows=100, validation=0.1)
COSINE = lb.Recipe(epochs=4, batch_size=32, lr=0.05, warmup_epochs=1, accelerator="cpu", seed=3)
STOPPING = replace(COSINE, epochs=12, warmup_epochs=0, schedule="constant", patience=2, optimizer="adam", lr=0.005)
EVALUATION = EvaluationSpec(samples=2, shift=False, test_images=20)
LATE = {"rank1": lb.Rank1(components=2), "implicit": lb.ImplicitNodes()}
AFTER = {"laplace": lb.LastLayerLaplace(), "swag": lb.SWAG(components=2)}


def jobs(source: DataSpec, net: str, recipe: lb.Recipe, *names: str) -> list[Job]:
    methods = [None, *((LATE | AFTER)[name] for name in names)]
    return keeping(
        [
            Job(source=source, net=net, method=method, recipe=recipe_for(method, recipe), evaluation=EVALUATION)
            for method in methods
        ]
    )


@pytest.fixture
def table(tmp_path) -> DataSpec:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x[:, 0] + 0.3 * torch.randn(60, generator=generator)
    rows = "\n".join(",".join(f"{value:.5f}" for value in (*row, target)) for row, target in zip(x, y, strict=True))
    (tmp_path / "table.csv").write_text(f"a,b,c,y\n{rows}\n")
    return DataSpec(name=str(tmp_path / "table.csv"), validation=0.2)


def same(one: Path, other: Path) -> bool:
    """Return whether two runs have the same result, but for times, and the same tensors in all files."""
    first, second = (without_machine(json.loads((run / "result.json").read_text())) for run in (one, other))
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    pairs = [[read_tensors(run / file)[1] for run in (one, other)] for file in files]
    return first == second and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


def seconds(run: Path) -> list[float]:
    return [json.loads(line)["seconds"] for line in (run / "history.jsonl").read_text().splitlines()]


def shared_epochs(plain: Path, row: Path) -> int:
    """Return the epochs that a row took from the plain training: their times are the same."""
    return sum(mine == theirs for mine, theirs in zip(seconds(row), seconds(plain), strict=False))


def test_a_row_from_a_kept_state_is_the_whole_training_bit_for_bit(tmp_path):
    plain, *late = jobs(IMAGES, "small", COSINE, *LATE)
    together, apart = tmp_path / "together", tmp_path / "apart"
    run_in_order([plain, *late], together, progress=False)
    run_in_order(late, apart, progress=False)
    for job in late:
        assert shared_epochs(plain.folder(together), job.folder(together)) == job.recipe.convert_at_epoch == 3
        assert same(job.folder(together), job.folder(apart))
        result = json.loads((job.folder(together) / "result.json").read_text())
        assert result["cost"]["train_seconds"] == sum(row["seconds"] for row in result["history"])
        assert result["cost"]["train_seconds"] > sum(seconds(plain.folder(together))[:3])  # as if trained apart


def test_a_row_may_restart_the_rate_where_it_begins(tmp_path):
    """The plain row of another comparison, without a restart, keeps the state of the same training."""
    plain, late = jobs(IMAGES, "small", COSINE, "rank1")
    own = replace(late, recipe=replace(late.recipe, restart_at_conversion=0.5, posterior_lr=0.2))
    other, together, apart = tmp_path / "other", tmp_path / "together", tmp_path / "apart"
    run_in_order([plain], other, progress=False)
    shutil.copytree(plain.folder(other) / FOLDER, plain.folder(together) / FOLDER)
    run_in_order([own], together, progress=False)
    run_in_order([own], apart, progress=False)
    assert shared_epochs(plain.folder(other), own.folder(together)) == 3
    assert same(own.folder(together), own.folder(apart))


def test_recipes_begin_alike_if_they_differ_in_what_comes_after_the_conversion():
    late = replace(COSINE, convert_at_epoch=3)
    for own in ({"restart_at_conversion": 0.5}, {"posterior_lr": 1.0}, {"tile_last_epochs": 1}):
        assert plain_state._begins_alike(COSINE, replace(late, **own), ended=False), own
    for own in ({"tile_last_epochs": 2}, {"lr": 0.1}, {"posterior_schedule": "constant"}):
        assert not plain_state._begins_alike(COSINE, replace(late, **own), ended=False), own
    restarted = replace(late, restart_at_conversion=0.5)
    assert not plain_state._begins_alike(restarted, replace(late, convert_at_epoch=2), ended=False)
    assert not plain_state._begins_alike(COSINE, restarted, ended=True)


@pytest.mark.parametrize(("few", "states"), [(2000, 6), (10, 1)])
def test_rows_with_early_stopping_begin_where_the_plain_network_was_best(table, few, states, tmp_path, monkeypatch):
    monkeypatch.setattr(row_training, "FEW", few)
    monkeypatch.setattr(plain_state, "EVERY", 2)
    plain, row = jobs(table, "mlp", STOPPING, "rank1")
    together, apart = tmp_path / "together", tmp_path / "apart"
    _, result = run_in_order([plain, row], together, progress=False)
    run_in_order([row], apart, progress=False)
    assert result["status"] == "done", result["error"]
    kept = plain.folder(together) / FOLDER
    assert len(list(kept.rglob("epoch*/checkpoint/last.safetensors"))) == states  # of five folds and the final training
    here, there = plain.folder(together), row.folder(together)
    assert shared_epochs(here, there) == result["validation"]["convert_at_epoch"]
    for fold in range(5) if states > 1 else ():
        last, best = len(seconds(here / f"fold{fold}")), result["validation"]["convert_at_epoch"]
        expected = last if last <= best else best - best % 2
        assert shared_epochs(here / f"fold{fold}", there / f"fold{fold}") == expected
    assert same(there, row.folder(apart))


@pytest.mark.parametrize("few", [2000, 10])
def test_posteriors_of_a_trained_network_begin_at_the_end_of_the_plain_training(table, few, tmp_path, monkeypatch):
    """With early stopping, on folds and on one split: the last state, and the best one, are those of the plain row."""
    monkeypatch.setattr(row_training, "FEW", few)
    plain, *after = jobs(table, "mlp", STOPPING, *AFTER)
    together, apart = tmp_path / "together", tmp_path / "apart"
    found = run_in_order([plain, *after], together, progress=False)
    run_in_order(after, apart, progress=False)
    assert [result["status"] for result in found] == ["done"] * 3
    folds = [Path(), *(Path(f"fold{number}") for number in range(5 * (few > 10)))]
    for job in after:
        for part in folds:
            here, there = plain.folder(together) / part, job.folder(together) / part
            # The time of the last epoch has that of the posterior.
            assert shared_epochs(here, there) >= len(seconds(here)) - 1
        assert same(job.folder(together), job.folder(apart))


def test_posteriors_of_a_trained_network_follow_a_schedule_to_its_end(tmp_path):
    plain, *after = jobs(IMAGES, "small", COSINE, *AFTER)
    run_in_order([plain, *after], tmp_path / "together", progress=False)
    run_in_order(after, tmp_path / "apart", progress=False)
    for job in after:
        assert shared_epochs(plain.folder(tmp_path / "together"), job.folder(tmp_path / "together")) >= 3
        assert same(job.folder(tmp_path / "together"), job.folder(tmp_path / "apart"))


def test_a_learned_noise_with_a_rate_of_its_own_is_trained_apart(table, tmp_path, monkeypatch):
    """The noise of real targets learns at the rate of the posterior, also before the conversion."""
    monkeypatch.setattr(row_training, "FEW", 10)
    plain, row = jobs(table, "mlp", STOPPING, "rank1")
    slower = replace(row, recipe=replace(row.recipe, posterior_lr=0.01))
    run_in_order([plain, slower], tmp_path / "together", progress=False)
    run_in_order([slower], tmp_path / "apart", progress=False)
    assert shared_epochs(plain.folder(tmp_path / "together"), slower.folder(tmp_path / "together")) == 0
    assert same(slower.folder(tmp_path / "together"), slower.folder(tmp_path / "apart"))


def test_a_state_of_other_settings_or_data_is_not_used(tmp_path):
    plain, row = jobs(IMAGES, "small", COSINE, "rank1")
    run_in_order([plain], tmp_path, progress=False)
    other = replace(row, recipe=replace(row.recipe, lr=0.01), label="other")
    run_in_order([other], tmp_path, progress=False)
    assert shared_epochs(plain.folder(tmp_path), other.folder(tmp_path)) == 0
    key = plain.folder(tmp_path) / FOLDER / "key.json"
    key.write_text(key.read_text().replace('"sha256": "', '"sha256": "0'))
    run_in_order([row], tmp_path, progress=False)
    assert shared_epochs(plain.folder(tmp_path), row.folder(tmp_path)) == 0


def test_a_damaged_state_is_not_used(tmp_path):
    plain, row = jobs(IMAGES, "small", COSINE, "rank1")
    run_in_order([plain], tmp_path, progress=False)
    (state,) = (plain.folder(tmp_path) / FOLDER).rglob("last.safetensors")
    state.unlink()
    state.write_bytes(b"cut off")
    (result,) = run_in_order([row], tmp_path, progress=False)
    assert result["status"] == "done"
    assert shared_epochs(plain.folder(tmp_path), row.folder(tmp_path)) == 0


def test_a_damaged_best_state_is_not_used(table, tmp_path, monkeypatch):
    monkeypatch.setattr(row_training, "FEW", 10)
    plain, row = jobs(table, "mlp", STOPPING, "laplace")
    run_in_order([plain], tmp_path, progress=False)
    (state,) = (plain.folder(tmp_path) / FOLDER / "end").rglob("best*.safetensors")
    state.unlink()
    (result,) = run_in_order([row], tmp_path, progress=False)
    assert result["status"] == "done", result["error"]
    assert shared_epochs(plain.folder(tmp_path), row.folder(tmp_path)) == 0


def test_a_state_is_kept_also_where_the_training_was_killed_before(tmp_path, monkeypatch):
    """Between the checkpoint of the third epoch and the link to it."""
    plain, row = jobs(IMAGES, "small", COSINE, "rank1")

    def killed(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plain_state, "_link", killed)
        with pytest.raises(KeyboardInterrupt):
            run_in_order([plain], tmp_path, progress=False)
    assert not list((plain.folder(tmp_path) / FOLDER).rglob("last.safetensors"))
    run_in_order([plain, row], tmp_path, progress=False)
    assert shared_epochs(plain.folder(tmp_path), row.folder(tmp_path)) == 3


def test_states_stay_until_the_last_row_that_needs_them_is_done(tmp_path):
    plain, first, second = jobs(IMAGES, "small", COSINE, "rank1", "implicit")
    found = run_in_order([plain, first], tmp_path, progress=False)
    kept = plain.folder(tmp_path) / FOLDER
    complete([plain, first, second], tmp_path, [*found, {"status": "failed"}], stage="train")
    assert kept.exists()
    run_all([plain, first, second], tmp_path, stage="train", progress=False)
    assert not kept.exists()


def test_rows_wait_for_the_plain_one_of_their_seed_alone():
    plain, row = jobs(IMAGES, "small", COSINE, "rank1")
    other = replace(plain, recipe=replace(plain.recipe, seed=4))
    assert plain.keeps == (3,)
    assert keeping([other, row])[0].keeps == ()
    assert waits(row, [plain, row])
    assert not waits(row, [other, row])
    assert not waits(plain, [plain, row])
    assert phases([row, plain]) == [[plain], [row]]
    assert phases([row, other]) == [[row, other]]
    assert replace(plain, keeps=()).id == plain.id


def test_the_command_line_runs_plain_rows_first(tmp_path, monkeypatch, capsys):
    flags = "--data digits --train-rows 100 --recipe.epochs 4 --recipe.warmup-epochs 1 --device cpu --seeds 0,1"
    options = parse(comparison_options(), [*flags.split(), "--methods", "rank1,laplace,plain,dropconnect"], "compare")
    found = plan_of(options).jobs
    assert [(job.name, job.seed, job.keeps) for job in found] == [
        ("plain", 0, (3, 4)), ("dropconnect", 0, ()), ("rank1", 0, ()), ("laplace", 0, ()),
        ("plain", 1, (3, 4)), ("dropconnect", 1, ()), ("rank1", 1, ()), ("laplace", 1, ()),
    ]  # fmt: skip
    assert main(["train", *flags.split(), "--methods", "rank1,plain", "--seeds", "0", "--out", str(tmp_path)]) == 0
    runs = [tmp_path / "digits" / "small" / name / "seed0" for name in ("plain", "rank1")]
    assert shared_epochs(*runs) == 3
    assert not list(tmp_path.rglob(FOLDER))
