"""The row student[of=METHOD]: it learns from the trained row of its seed, and answers in one pass."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import leanbayes as lb
from leanbayes.compare import run_all
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, parse_methods, student_recipe
from leanbayes.compare.load_run import load_run
from leanbayes.compare.run import MODEL, perform
from leanbayes.compare.workers import phases
from leanbayes.core.student import Student
from leanbayes.evaluation.cost import PRICES
from leanbayes.report import load_results, markdown
from leanbayes.report.load import Run
from leanbayes.report.table import training_ratio

JUDGING = EvaluationSpec(samples=4, ood=("noise",), shift=False, test_images=60)
SOURCE = DataSpec(name="digits", train_rows=200)
TEACHER = Job(
    source=SOURCE,
    net="small",
    method=lb.ImplicitNodes(),
    recipe=lb.Recipe(epochs=2, batch_size=64, lr=0.05, convert_at_epoch=1),
    evaluation=JUDGING,
)
STUDENT = replace(TEACHER, label="student[of=implicit]", student=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Run the teacher and its student."""
    folder = tmp_path_factory.mktemp("runs")
    experiment = Experiment(SOURCE, "small", JUDGING)
    for job in (TEACHER, STUDENT):
        assert perform(job, experiment, folder)["status"] == "done"
    return folder


def result(job, folder):
    return json.loads((job.folder(folder) / "result.json").read_text())


def test_the_methods_of_the_command_line_name_the_teacher():
    (spec,) = parse_methods("student[of=ImplicitNodes]")
    assert (spec.name, spec.fields, spec.label) == ("student", {"of": "implicit"}, "student[of=implicit]")
    with pytest.raises(ValueError, match=r"such as student\[of=rank1\].*got none"):
        parse_methods("student")
    with pytest.raises(ValueError, match="got rank; did you mean 'rank1'"):
        parse_methods("student[of=rank]")
    with pytest.raises(ValueError, match="a field among of of student"):
        parse_methods("student[from=rank1]")


def test_ids_of_other_rows_stay_and_a_student_has_its_own():
    assert "student" not in json.dumps(TEACHER.settings())
    assert STUDENT.settings()["method"] == {"name": "student", "fields": {"of": "implicit", **TEACHER.method.fields()}}
    assert STUDENT.teacher.id == TEACHER.id != STUDENT.id


def test_students_run_after_their_teachers():
    assert phases([STUDENT, TEACHER]) == [[TEACHER], [STUDENT]]


def test_a_student_takes_no_more_steps_than_its_teacher():
    for epochs, rows in ((1, 100), (40, 1438), (500, 300), (15, 60_000)):
        recipe = replace(TEACHER.recipe, epochs=epochs, convert_at_epoch=0, seed=3)
        own = student_recipe(recipe, rows)
        assert own.seed == 3
        assert own.epochs == 1 or own.epochs * 2 <= epochs + 1


def test_a_student_learns_from_the_network_of_the_teacher(out):
    found, teacher = load_run(STUDENT.folder(out)), load_run(TEACHER.folder(out))
    assert isinstance(found.model, Student)
    x = found.data.inputs(found.data.test.x[:60])
    p, q = lb.predict(teacher.model, x, samples=4), lb.predict(found.model, x)
    apart = (lb.mean(teacher.model).eval()(x).softmax(1) - p.mean).abs().mean()
    assert (p.mean - q.mean).abs().mean() < 0.02 + apart
    assert result(STUDENT, out)["agreement"] == found.model.report
    with torch.no_grad():
        torch.testing.assert_close(found.model.eval()(x).softmax(1), q.mean)


def test_the_price_of_a_student_includes_its_teacher(out):
    student, teacher = result(STUDENT, out), result(TEACHER, out)
    cost = student["cost"]
    assert cost["passes"] == 1
    assert cost["extra_parameters"] == load_run(STUDENT.folder(out)).model.extra_parameters
    seconds = sum(row["seconds"] for row in teacher["history"])
    assert cost["train_seconds"] == pytest.approx(seconds * (1 + cost["distillation"]))
    priced = cost | {"train_step_ratio": 1.5}  # prices are measured when all rows have ended
    without, whole = (
        training_ratio(Run("", student | {"cost": priced | more})) for more in ({"distillation": 0.0}, {})
    )
    assert whole == pytest.approx(without * (1 + cost["distillation"]))


def test_the_step_of_a_student_is_that_of_its_teacher(out, monkeypatch):
    steps = []

    def measured(network, job, experiment, samples=None):
        steps.append(type(network).__name__)
        ratio = 1.0 if isinstance(network, Student) else 3.0
        return SimpleNamespace(**dict.fromkeys(PRICES, ratio))

    monkeypatch.setattr(run_all, "_cost_of", measured)
    found = run_all.measure(STUDENT, Experiment(STUDENT.source, STUDENT.net, STUDENT.evaluation), out)
    assert len(steps) == 2
    assert (found["predict_ratio"], found["train_step_ratio"]) == (1.0, 3.0)


def test_a_student_is_a_row_of_the_report(out):
    assert "student" in markdown(load_results(out))
    assert (STUDENT.folder(out) / MODEL).is_file()


def test_a_student_of_real_targets_runs(tmp_path):
    evaluation = replace(JUDGING, ood=())
    rows = ["a,b,target", *(f"{i % 7},{i % 11},{i % 7 + 0.1 * (i % 3)}" for i in range(120))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    source = DataSpec(name=str(tmp_path / "table.csv"), task="regression")
    job = replace(STUDENT, source=source, net="mlp", evaluation=evaluation, method=lb.MCDropout())
    found = perform(job, Experiment(source, "mlp", evaluation), tmp_path)
    assert found["status"] == "done", found["error"]
    assert {"rmse", "lpd", "crps", "coverage"} <= set(found["metrics"]["test"])
