"""Prices are measured at the end, by one process on one thread, once for each method, and completed after a kill."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import leanbayes as lb
from leanbayes.compare import run_all as running
from leanbayes.compare import workers
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.run_all import complete, has_prices, run_all, run_in_order
from leanbayes.compare.workers import run_on_workers
from leanbayes.evaluation.cost import Cost, COUNTED, measure_answers, PRICES
from tests.compare.test_progress import here

RECIPE = lb.Recipe(epochs=1, batch_size=32, lr=0.05, accelerator="cpu")
EVALUATION = EvaluationSpec(samples=2, shift=False, test_images=20)


def job(method=None, seed=0, source=None, net="small", **changes) -> Job:
    source = source or DataSpec(name="digits", train_rows=100)
    recipe = replace(RECIPE, seed=seed)
    return Job(source=source, net=net, method=method, recipe=recipe, evaluation=EVALUATION, **changes)


JOBS = [job(method, seed) for seed in (0, 1) for method in (None, lb.Rank1())]


@pytest.fixture
def measured(monkeypatch) -> list[tuple[str, int, int]]:
    """Return the names and seeds of measured runs, with the number of threads; the numbers are made up."""
    found = []

    def measure(job, experiment, out):
        found.append((job.name, job.seed, torch.get_num_threads()))
        return dict.fromkeys(PRICES, float(len(found)))

    monkeypatch.setattr(running, "measure", measure)
    return found


def written(out, name):
    return [json.loads((one.folder(out) / "result.json").read_text()) for one in JOBS if one.name == name]


def test_costs_are_counted_or_measured():
    assert set(COUNTED) | set(PRICES) == set(Cost.__dataclass_fields__)
    assert not set(COUNTED) & set(PRICES)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_method_is_measured_once(processes, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "on_processes", here)
    found = run_on_workers(JOBS, tmp_path, workers=processes)
    assert [(name, seed) for name, seed, _ in measured] == [("plain", 0), ("rank1", 0)]
    for name, price in (("plain", 1.0), ("rank1", 2.0)):
        for result in written(tmp_path, name):
            assert result["cost"]["price_seed"] == 0
            assert all(result["cost"][each] == price for each in PRICES)
    assert [result["cost"] for result in found] == [
        json.loads((one.folder(tmp_path) / "result.json").read_text())["cost"] for one in JOBS
    ]


def test_prices_are_measured_on_one_thread(measured, tmp_path):
    found = run_in_order(JOBS[:1], tmp_path, progress=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        complete(JOBS[:1], tmp_path, found, stage="compare", shown=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [threads for _, _, threads in measured] == [1]


def test_nothing_is_measured_while_runs_are_going(measured, tmp_path, monkeypatch):
    done = []
    perform = running.perform
    monkeypatch.setattr(
        running, "perform", lambda job, *a, **how: (done.append(len(measured)), perform(job, *a, **how))[1]
    )
    run_all(JOBS[:2], tmp_path, progress=False)
    assert done == [0, 0]
    assert len(measured) == 2


def test_a_killed_measurement_resumes(measured, tmp_path, monkeypatch):
    found = run_in_order(JOBS, tmp_path, progress=False)
    assert not any(has_prices(result) for result in found)
    write, written_files = running.write_json, []

    def killed(record, path):
        if len(written_files) == 3:
            raise KeyboardInterrupt
        written_files.append(path)
        write(record, path)

    with monkeypatch.context() as patch:
        patch.setattr(running, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            complete(JOBS, tmp_path, found, stage="compare", shown=False)
    again = run_all(JOBS, tmp_path, progress=False)
    assert [name for name, _, _ in measured] == ["plain", "rank1"]  # the other seed of rank1 took its price
    assert all(has_prices(result) for result in again)
    run_all(JOBS, tmp_path, progress=False)
    assert len(measured) == 2


def test_a_price_of_another_machine_is_measured_again(measured, tmp_path):
    run_all(JOBS[:1], tmp_path, progress=False)
    path = JOBS[0].folder(tmp_path) / "result.json"
    there = json.loads(path.read_text())
    there["environment"]["device"] = "cuda (another)"
    path.write_text(json.dumps(there))
    run_all([JOBS[0], JOBS[2]], tmp_path, progress=False)
    assert [(name, seed) for name, seed, _ in measured] == [("plain", 0), ("plain", 1)]
    assert json.loads(path.read_text())["cost"]["answer_ms"] == 1.0  # kept


def test_training_measures_nothing_and_evaluation_does(measured, tmp_path):
    run_all(JOBS[:1], tmp_path, stage="train", progress=False)
    assert measured == []
    (result,) = run_all(JOBS[:1], tmp_path, stage="evaluate", progress=False)
    assert has_prices(result)
    (result,) = run_all(JOBS[:1], tmp_path, stage="evaluate", fresh=True, progress=False)
    assert result["cost"]["answer_ms"] == 2.0


def test_a_price_that_cannot_be_measured_is_named_and_tried_again(tmp_path, monkeypatch, capsys):
    def broken(*arguments):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(running, "measure", broken)
        (result,) = run_all(JOBS[:1], tmp_path)
    assert result["status"] == "done"
    assert not has_prices(result)
    assert "the cost of plain could not be measured (out of memory)" in capsys.readouterr().err
    assert has_prices(run_all(JOBS[:1], tmp_path, progress=False)[0])


@pytest.mark.parametrize(
    "method", [lb.Rank1(), lb.NestedDropout(), lb.LastLayerLaplace(), lb.DeepEnsemble(components=2)]
)
def test_prices_of_a_trained_model(method, tmp_path):
    one = job(method)
    (result,) = run_all([one], tmp_path, progress=False)
    cost = result["cost"]
    for value, quartiles in (
        ("train_step_ratio", "train_quartiles"),
        ("predict_ratio", "predict_quartiles"),
        ("answer_ms", "answer_quartiles"),
        ("answer_ms_one", "answer_one_quartiles"),
    ):
        low, high = cost[quartiles]
        assert 0 < low <= cost[value] <= high


def test_a_row_without_a_network_has_the_time_of_an_answer(tmp_path):
    rows = "\n".join(f"{x},{x % 7},{2 * x + x % 3}" for x in range(60))
    (tmp_path / "table.csv").write_text(f"a,b,y\n{rows}\n")
    source = DataSpec(name=str(tmp_path / "table.csv"))
    (result,) = run_all([job(source=source, net="mlp", baseline="linear")], tmp_path / "out", progress=False)
    low, high = result["cost"]["answer_quartiles"]
    assert 0 < low <= result["cost"]["answer_ms"] <= high


def test_the_time_of_an_answer_is_that_of_a_row():
    calls = []
    found = measure_answers(lambda: calls.append(sum(range(200_000))), 10, turns=3)
    assert len(calls) == 4  # one to warm up
    one = measure_answers(lambda: calls.append(sum(range(200_000))), 1, turns=3)
    assert found["answer_ms"] < one["answer_ms"]
