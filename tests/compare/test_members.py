"""The members of a deep ensemble are plain networks: the first one is the plain row of its seed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import leanbayes as lb
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import DataSpec, EvaluationSpec, from_plain, Job, recipe_for
from leanbayes.compare.row_training import Validation
from leanbayes.compare.run import perform

SOURCE = DataSpec(name="digits", train_rows=200, validation=0.2)
SHIFT = {"shift_images": 20, "shift_corruptions": ("gaussian_noise",), "shift_severities": (3,)}
EVALUATION = EvaluationSpec(samples=4, ood=("noise",), test_images=60, **SHIFT)
RECIPE = lb.Recipe(epochs=3, batch_size=64, lr=0.05, seed=2)


def job(method=None, **fields) -> Job:
    return Job(
        source=SOURCE, net="small", method=method, recipe=recipe_for(method, RECIPE), evaluation=EVALUATION, **fields
    )


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(SOURCE, "small", EVALUATION)


def test_the_first_member_is_the_plain_row_at_its_temperature(experiment, tmp_path):
    plain, ensemble = (perform(job(method), experiment, tmp_path) for method in (None, lb.DeepEnsemble(components=3)))
    own, members = plain["metrics"]["tempered"], ensemble["metrics"]["members"]
    assert [member["seed"] for member in members] == [2, 1002, 2002]
    assert members[0]["temperature"] == pytest.approx(own["temperature"], rel=1e-4)
    assert members[0]["test"]["nll"] == pytest.approx(own["test"]["nll"], rel=1e-4)
    assert members[0]["ood"]["noise"]["auroc"] == pytest.approx(own["ood"]["noise"]["auroc"], abs=1e-3)
    assert [row["nll"] for row in members[0]["shift"]] == pytest.approx([row["nll"] for row in own["shift"]], rel=1e-4)
    assert members[1]["test"]["nll"] != pytest.approx(own["test"]["nll"], rel=1e-3)
    assert [plain["from_plain"], ensemble["from_plain"]] == [True, False]
    assert "members" not in plain["metrics"]
    json.dumps(ensemble, allow_nan=False)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (None, True), (lb.Rank1(), True), (lb.SWAG(), True), (lb.LastLayerLaplace(), True),
        (lb.MCDropout(), False), (lb.ModelPatch(), False), (lb.DeepEnsemble(), False), (lb.NestedDropout(), False),
    ],
)  # fmt: skip
def test_rows_that_convert_late_or_at_the_end_are_of_the_plain_training(method, expected):
    one = replace(job(method), recipe=recipe_for(method, replace(RECIPE, epochs=20)))
    assert from_plain(one) is expected


def test_rows_without_a_network_are_not_of_the_plain_training():
    assert from_plain(job(baseline="linear")) is False


def test_a_validation_without_members_is_written_as_before():
    written = Validation("split", 10, 3, 0, 1.0, 1.0, 0.5).to_json()
    assert not {"members", "scale"} & written.keys()
