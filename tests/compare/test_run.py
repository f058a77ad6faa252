"""One job from nothing to result.json: every field, kept when finished, refused when different."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch

import leanbayes as lb
from leanbayes.compare.experiment import Experiment, load, maker
from leanbayes.compare.job import BUDGETS, DataSpec, EvaluationSpec, Job, method_of, recipe, recipe_for
from leanbayes.compare.run import MODEL, perform
from leanbayes.compare.run_all import run_all
from leanbayes.methods import all_methods
from leanbayes.report import load_results, markdown

JUDGING = EvaluationSpec(samples=4, ood=("noise",), shift=False, test_images=60)
SOURCE = DataSpec(name="digits", train_rows=200)
RECIPE = lb.Recipe(epochs=2, batch_size=64, lr=0.05)


def job(method=None, **changes) -> Job:
    return Job(source=SOURCE, net="small", method=method, recipe=replace(RECIPE, **changes), evaluation=JUDGING)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(SOURCE, "small", JUDGING)


def test_a_result_has_every_promised_field(experiment, tmp_path):
    one = job(lb.Rank1(), convert_at_epoch=1)
    (result,) = run_all([one], tmp_path, progress=False)
    folder = one.folder(tmp_path)
    assert folder == tmp_path / "digits" / "small" / "rank1" / "seed0"
    written = json.loads((folder / "result.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert written["schema"] == 1
    assert written["status"] == "done"
    for name in ("id", "error", "command", "created", "commit", "seed", "method", "network", "data", "recipe"):
        assert name in written
    assert set(written["metrics"]) == {"test", "ood", "shift"}
    promised = {"accuracy", "nll", "brier", "ece", "mce", "cnll", "temperature", "aurc", "disagreement"}
    assert promised <= set(written["metrics"]["test"])
    assert {"auroc", "aupr", "fpr95", "by"} <= set(written["metrics"]["ood"]["noise"])
    cost = {"parameters", "extra_parameters", "extra_percent", "train_step_ratio", "predict_ratio", "train_seconds"}
    assert cost | {"peak_memory_mb"} <= set(written["cost"])
    assert {"reliability", "histograms", "examples", "losses"} <= set(written["figures"])
    assert len(written["history"]) == 2
    assert {"python", "torch", "leanbayes", "device", "threads"} <= set(written["environment"])
    assert written["method"]["fields"]["components"] == 4
    assert written["data"]["test"] == JUDGING.test_images  # the evaluated rows, not all rows
    loaded = lb.load(folder / MODEL, experiment.plain(0))
    _, x, y = experiment.test
    again = lb.evaluate(loaded, (x, y), samples=4).metrics["test"]
    assert again["nll"] == pytest.approx(written["metrics"]["test"]["nll"], rel=1e-6)


def test_a_finished_run_is_kept_and_other_settings_are_refused(experiment, tmp_path):
    first = perform(job(), experiment, tmp_path)
    assert perform(job(), experiment, tmp_path)["created"] == first["created"]
    other = job(lr=0.01)
    with pytest.raises(ValueError, match=r"recipe.lr: 0.05 there, 0.01 now.*--fresh"):
        perform(other, experiment, tmp_path)
    assert perform(other, experiment, tmp_path, fresh=True)["recipe"]["lr"] == 0.01


def test_the_design_of_the_draws_is_a_setting_and_a_field_of_the_result(experiment, tmp_path):
    one = job(lb.Rank1(init_std=0.3), epochs=1)
    paired = replace(one, evaluation=replace(JUDGING, design="paired"))
    assert "design" not in one.settings()["judging"]  # ids from before this field stay valid
    assert paired.id != one.id
    first = perform(one, experiment, tmp_path)
    assert first["prediction"] == {"samples": 4, "design": "independent"}
    with pytest.raises(ValueError, match=r"judging.design: 'independent' there, 'paired' now"):
        perform(paired, experiment, tmp_path)
    again = perform(paired, experiment, tmp_path, stage="evaluate", fresh=True)
    assert again["prediction"] == {"samples": 4, "design": "paired"}
    model = lb.load(one.folder(tmp_path) / MODEL, experiment.plain(0))
    _, x, y = experiment.test
    expected = lb.evaluate(model, (x, y), samples=4, design="paired").metrics["test"]["nll"]
    assert again["metrics"]["test"]["nll"] == pytest.approx(expected, rel=1e-6)
    assert first["metrics"]["test"]["nll"] != pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"judging.design: 'paired' there, 'independent' now"):
        perform(one, experiment, tmp_path)
    with pytest.raises(ValueError, match="expected design to be one of"):
        EvaluationSpec(design="latin")


def test_files_that_a_killed_run_left_half_written_are_removed(tmp_path):
    one = job(epochs=1)
    left = [".model.safetensors.0e04.tmp", ".result.json.0e05.tmp", "checkpoint/.best3.safetensors.0e06.tmp"]
    for _ in range(2):  # of a run that is not finished, and of one that is
        for name in left:
            (one.folder(tmp_path) / name).parent.mkdir(parents=True, exist_ok=True)
            (one.folder(tmp_path) / name).write_bytes(b"half")
        run_all([one], tmp_path, progress=False)
        assert not list(tmp_path.rglob("*.tmp"))


def test_a_single_test_row_is_judged_as_far_as_it_goes(tmp_path):
    judging = replace(JUDGING, test_images=1, ood=())
    one = replace(job(lb.MCDropout(), epochs=1), evaluation=judging)
    result = perform(one, Experiment(SOURCE, "small", judging), tmp_path)
    assert result["status"] == "done", result["error"]
    assert result["metrics"]["test"]["cnll"] is None
    assert result["metrics"]["test"]["nll"] > 0
    assert result["data"]["test"] == 1
    assert "| mc\\_dropout" in markdown(load_results(tmp_path))


def test_a_run_that_fails_is_written_down_and_tried_again(experiment, tmp_path):
    results = run_all([job(lr=1e6), job(seed=1)], tmp_path, progress=False)
    assert [r["status"] for r in results] == ["failed", "done"]
    assert "not finite" in results[0]["error"] or "finite" in results[0]["error"]
    written = json.loads((job().folder(tmp_path) / "result.json").read_text())
    assert written["status"] == "failed"
    assert run_all([job()], tmp_path, fresh=True, progress=False)[0]["status"] == "done"


def test_training_and_evaluating_in_two_steps_is_the_same_as_in_one(experiment, tmp_path):
    method = lb.ImplicitNodes()
    with_both = perform(job(method), experiment, tmp_path / "a")
    with pytest.raises(ValueError, match="leanbayes train"):
        run_all([job(method)], tmp_path / "b", stage="evaluate")
    assert not (tmp_path / "b").exists()
    perform(job(method), experiment, tmp_path / "b", stage="train")
    later = perform(job(method), experiment, tmp_path / "b", stage="evaluate")
    assert later["metrics"] == with_both["metrics"]


@pytest.mark.parametrize("name", [name for name in all_methods() if name not in ("rank1", "implicit")])
def test_every_method_runs(name, experiment, tmp_path):
    method = method_of(name)
    one = replace(job(method), recipe=recipe_for(method, replace(RECIPE, epochs=3)))
    result = perform(one, experiment, tmp_path)
    assert result["status"] == "done", result["error"]


def test_members_of_an_ensemble_start_apart(experiment):
    ensemble = experiment.model(lb.DeepEnsemble(components=2), 0)
    first, second = (member.state_dict() for member in ensemble.members)
    plain = experiment.plain(0).state_dict()
    assert all(torch.equal(first[name], plain[name]) for name in plain)
    assert not torch.equal(first["0.weight"] if "0.weight" in first else next(iter(first.values())),
                           second["0.weight"] if "0.weight" in second else next(iter(second.values())))  # fmt: skip


def test_recipes_follow_the_method_unless_they_say_otherwise():
    base = lb.Recipe(epochs=40, lr=0.2)
    assert recipe_for(None, base).convert_at_epoch == 0
    rank1 = recipe_for(lb.Rank1(), base)
    assert rank1.convert_at_epoch == round(lb.Rank1.late * 40)
    assert rank1.posterior_lr == pytest.approx(0.2 * lb.Rank1.posterior_rate)
    assert recipe_for(lb.Rank1(), base, late=0.0).convert_at_epoch == 0
    assert recipe_for(lb.Rank1(), replace(base, convert_at_epoch=7)).convert_at_epoch == 7


def test_a_restart_is_left_to_rows_that_convert_late():
    """The others keep the recipe, and with it the id, that they have without one."""
    base = lb.Recipe(epochs=40, lr=0.2)
    restarted = replace(base, restart_at_conversion=0.5)
    assert recipe_for(lb.Rank1(), restarted).restart_at_conversion == 0.5
    for method, late in ((None, None), (lb.ModelPatch(), None), (lb.Rank1(), 0.0)):
        assert recipe_for(method, restarted, late) == recipe_for(method, base, late)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("kind", "rows", "augment"), [
    ("image", 1000, "none"), ("image", 60_000, "none"), ("image", 50_000, "crop_flip"), ("table", 300, "none"),
])  # fmt: skip
def test_budgets_are_valid_recipes_that_grow(budget, kind, rows, augment):
    found = recipe(budget, kind=kind, rows=rows, augment=augment)
    quick = recipe("quick", kind=kind, rows=rows, augment=augment)
    assert found.epochs >= quick.epochs


def test_own_networks_are_found_and_get_what_they_accept(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(
        "from torch import nn\n"
        "def whole(num_outputs, input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs))\n"
        "def bare(): return nn.Linear(2, 2)\n"
        "def wrong(): return 3\n"
        "thing = 5\n"
        "net = nn.Linear(2, 2)\n"
        "def broken(): raise RuntimeError('no luck')\n"
        "def greedy(more): return nn.Linear(2, 2)\n"
        "def lazy(num_outputs): return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    make = maker("mine_for_test:whole", num_outputs=3, input_shape=(1, 8, 8))
    assert make()(torch.zeros(1, 1, 8, 8)).shape == (1, 3)
    assert maker("mine_for_test:bare", num_outputs=3, input_shape=(2,))() is not None
    with pytest.raises(ValueError, match=r"return a torch.nn.Module, got int"):
        maker("mine_for_test:wrong", num_outputs=3, input_shape=(2,))()
    assert maker("mine_for_test:lazy", num_outputs=3, input_shape=(1, 8, 8))()[1].in_features == 64
    for name, said in (("broken", "RuntimeError: no luck"), ("greedy", "missing 1 required")):
        with pytest.raises(ValueError, match=f"failed to make a network: .*{said}"):
            maker(f"mine_for_test:{name}", num_outputs=3, input_shape=(2,))()
    for name in ("mine_for_test:absent", "no_such_module:f", "mine_for_test:thing", "mine_for_test:net"):
        with pytest.raises(ValueError, match=r"network|function"):
            maker(name, num_outputs=3, input_shape=(2,))
    with pytest.raises(ValueError, match=r"mine_for_test:bare cannot take inputs of shape \(2, 1, 8, 8\)"):
        Experiment(SOURCE, "mine_for_test:bare", JUDGING)


def test_outputs_that_are_no_logits_are_told(tmp_path, monkeypatch):
    (tmp_path / "outputs_for_test.py").write_text(
        "from torch import nn\n"
        "def sure(num_outputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs), nn.Softmax(1))\n"
        "def logits(num_outputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs), nn.LogSoftmax(1))\n"
        "def few(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
        "class Named(nn.Linear):\n"
        "    def forward(self, x): return {'logits': super().forward(x.flatten(1))}\n"
        "def named(num_outputs): return Named(64, num_outputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"outputs_for_test:sure seems to end in a softmax: .*taken for logits"):
        Experiment(SOURCE, "outputs_for_test:sure", JUDGING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Experiment(SOURCE, "outputs_for_test:logits", JUDGING)
    for name, got in (("few", r"\(2, 3\)"), ("named", "dict")):
        with pytest.raises(ValueError, match=rf"shape \(rows, 10\) for digits, got {got}\. Return one tensor"):
            Experiment(SOURCE, f"outputs_for_test:{name}", JUDGING)


def test_held_out_rows_take_the_place_of_the_test_set():
    whole, held = load(DataSpec(name="digits")), load(DataSpec(name="digits", hold_out=100))
    assert len(held.test) == 100
    assert len(held.train) == len(whole.train) - 100
    rows = [tuple(x.flatten().tolist()) for x in torch.cat([held.train.x, held.test.x])]
    assert sorted(rows) == sorted(tuple(x.flatten().tolist()) for x in whole.train.x)
    assert len(load(DataSpec(name="digits", hold_out=100, train_rows=200)).train) == 200


def test_held_out_rows_must_leave_some():
    with pytest.raises(ValueError, match="expected --hold-out to be below the 1,000 training rows, got 9,999"):
        load(DataSpec(name="digits", hold_out=9999))


def test_held_out_runs_are_not_mixed_with_test_runs(tmp_path):
    for name, source in (("test", SOURCE), ("held", replace(SOURCE, hold_out=100))):
        one = replace(job(epochs=1), source=source)
        perform(one, Experiment(source, "small", JUDGING), tmp_path / name)
    titles = [group.data for group in load_results(tmp_path).groups]
    assert titles == ["digits", "digits (held-out training rows)"]


def test_named_layers_alone_are_converted(experiment, tmp_path):
    one = replace(job(lb.Rank1(), epochs=1), where=("features.3", "head"))
    result = perform(one, experiment, tmp_path)
    assert result["cost"]["layers"]["converted"] == 2
    assert result["settings"]["where"] == ["features.3", "head"]
    assert one.id != replace(one, where=()).id
    assert "where" not in replace(one, method=None).settings()


def test_a_nested_network_is_judged_at_its_full_width(experiment, tmp_path):
    one = job(lb.NestedDropout(groups=4), epochs=3)
    result = perform(one, experiment, tmp_path)
    model = lb.load(one.folder(tmp_path) / MODEL, experiment.plain(0))
    x, _ = experiment.data.prepared(experiment.data.train)
    _, test, y = experiment.test
    full = lb.evaluate(lb.slim.narrow(model, 1.0, data=x[:1024]), (test, y), samples=4)
    assert result["metrics"]["test"]["nll"] == pytest.approx(full.metrics["test"]["nll"], rel=1e-4)
