"""Stays in intensive care: quantile bins, the tokens of the cache, the published records, and the real set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leanbayes import data
from leanbayes.cli.compare import comparison_options, parse, plan_of
from leanbayes.data.upstream import (
    binned,
    BINS,
    HOURS,
    OUTCOMES,
    physionet2012,
    quantile_edges,
    read_stay,
    SERIES,
    SETS,
    SHAPE,
    STATIC,
)
from leanbayes.data.upstream import (
    PHYSIONET_FILE as FILE,
)
from tests.data import upstream

DEATH = OUTCOMES.index("In-hospital_death")


def write_cache(path, rows=12, **changes):
    """Write stays of the three sets in turn, a fifth of the values measured, one stay without any series."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, HOURS, len(SERIES))).astype(np.float32)
    x[random.random(x.shape) > 0.2] = np.nan
    x[1] = np.nan
    static = random.normal(size=(rows, len(STATIC))).astype(np.float32)
    static[2, 1] = np.nan
    outcomes = np.full((rows, len(OUTCOMES)), -1, np.int32)
    outcomes[:, DEATH] = np.arange(rows) // 3 % 2
    arrays = {
        "x": x,
        "static": static,
        "outcomes": outcomes,
        "set_id": (np.arange(rows) % 3).astype(np.uint8),
        "ts_names": np.array(SERIES),
        "static_names": np.array(STATIC),
        "outcome_names": np.array(OUTCOMES),
    } | changes
    np.savez(path / FILE, **arrays)
    return arrays


# -------------------------------------------------------------------------------------------- bins


def test_bins_hold_equal_shares_of_the_training_values():
    x = np.random.default_rng(0).permutation(1000).astype(np.float32).reshape(100, 5, 2)
    for column in np.moveaxis(binned(x, quantile_edges(x)), -1, 0):
        assert np.bincount(column.ravel()).tolist() == [0] + [50] * BINS


def test_the_bin_is_one_and_the_number_of_edges_below():
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3, 4)).astype(np.float32)
    x[random.random(x.shape) < 0.3] = np.nan
    edges = quantile_edges(x)
    found = binned(x, edges)
    for index in np.ndindex(x.shape):
        expected = 0 if np.isnan(x[index]) else 1 + sum(edge < x[index] for edge in edges[index[-1]])
        assert found[index] == expected


def test_edges_are_the_smallest_values_with_their_share_below():
    values = np.random.default_rng(0).integers(0, 30, 97).astype(np.float32)
    (edges,) = quantile_edges(values[:, None], bins=4)
    expected = {min(v for v in values if np.mean(values <= v) >= share) for share in (0.25, 0.5, 0.75)}
    assert edges.tolist() == sorted(expected)


def test_outliers_fall_into_the_open_bins():
    train = np.linspace(7, 8, 101, dtype=np.float32)[:, None]
    edges = quantile_edges(train)
    assert binned(np.array([[735.0], [-735.0], [np.inf], [np.nan]]), edges).ravel().tolist() == [BINS, 1, BINS, 0]


@pytest.mark.parametrize(
    ("values", "bins"),
    [([0, 1, 0, 1, 1], [1, 2, 1, 2, 2]), ([1, 1, 1], [1, 1, 1]), ([1, 2, 3, 4], [1, 2, 3, 4])],
)
def test_variables_of_few_values_have_a_bin_for_each(values, bins):
    x = np.array(values, np.float32)[:, None]
    assert binned(x, quantile_edges(x)).ravel().tolist() == bins


def test_a_variable_that_training_never_measured_has_one_bin():
    edges = quantile_edges(np.full((3, 1), np.nan, np.float32))
    assert binned(np.array([[1.0], [np.nan]]), edges).ravel().tolist() == [1, 0]


# ------------------------------------------------------------------------------------------- cache


def test_tokens_are_bins_of_the_hours_and_of_what_is_static(tmp_path):
    arrays = write_cache(tmp_path)
    loaded = data.load("physionet2012", tmp_path)
    rows = arrays["set_id"] == 1
    x = loaded.test.x.numpy()
    assert x.shape == (4, *SHAPE)
    assert np.array_equal(x[:, :, : len(SERIES)] == 0, np.isnan(arrays["x"][rows]))
    series, static = (binned(arrays[name][rows], quantile_edges(arrays[name][~rows][::2])) for name in ("x", "static"))
    assert np.array_equal(x[:, :, : len(SERIES)], series)
    for hour in range(HOURS):
        assert np.array_equal(x[:, hour, len(SERIES) :], static)


def test_the_sets_are_for_training_testing_and_testing_again(tmp_path):
    arrays = write_cache(tmp_path)
    loaded = data.load("PhysioNet-2012", tmp_path)
    parts = (loaded.train, loaded.test, loaded.further["set-c"])
    for number, split in enumerate(parts):
        rows = arrays["set_id"] == number
        assert split.y.tolist() == arrays["outcomes"][rows, DEATH].tolist()
        assert split.x.dtype == split.y.dtype == torch.int64
    assert not parts[1].x[0, :, : len(SERIES)].any()  # the stay without any series is there
    assert parts[1].x[0, :, len(SERIES) :].all()
    assert (loaded.kind, loaded.task, loaded.classes) == ("series", "classification", ("survived", "died"))
    assert (loaded.input_shape, loaded.num_outputs, loaded.augment) == (SHAPE, 2, "none")


def test_bins_come_from_set_a_alone(tmp_path):
    arrays = write_cache(tmp_path)
    before = data.load("physionet2012", tmp_path)
    others = arrays["set_id"] != 0
    x = np.where(others[:, None, None], 3 * arrays["x"] + 100, arrays["x"])
    write_cache(tmp_path, x=x)
    after = data.load("physionet2012", tmp_path)
    assert torch.equal(before.train.x, after.train.x)
    seen = after.test.x[..., : len(SERIES)]
    assert set(seen.unique().tolist()) <= {0, *range(2, BINS + 1)}  # far above: never the lowest bin


def test_networks_see_tokens_as_they_are(tmp_path):
    write_cache(tmp_path)
    loaded = data.load("physionet2012", tmp_path)
    inputs, targets = loaded.prepared(loaded.train)
    assert torch.equal(inputs, loaded.train.x)
    assert torch.equal(targets, loaded.train.y)
    with pytest.raises(ValueError, match="physionet2012 has tokens; only images and features have a mean"):
        _ = loaded.mean
    with pytest.raises(ValueError, match=r"expected rows of shape \(48, 42\), got \(48, 41\)"):
        loaded.inputs(loaded.test.x[..., :-1])


def test_a_missing_file_says_where_to_get_it(tmp_path):
    expected = r"physionet2012 is not in .*`leanbayes data prepare physionet2012`; .*set-a\.tar\.gz from https://physio"
    with pytest.raises(FileNotFoundError, match=expected):
        data.load("physionet2012", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": np.zeros((12, 24, 37), np.float32)},
            r"not the cache of physionet2012: expected .* got \(\(12, 24, 37\)",
        ),
        ({"ts_names": np.array(SERIES[::-1])}, "with the published names of the variables"),
        ({"outcomes": np.zeros((12, 6), np.int32)}, r"survivors \(0\) and deaths \(1\) .* got others in set-a"),
    ],
)
def test_another_file_of_that_name_is_refused(tmp_path, changes, message):
    write_cache(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        data.load("physionet2012", tmp_path)


def test_it_has_one_split_and_no_out_of_distribution_inputs(tmp_path):
    write_cache(tmp_path)
    with pytest.raises(ValueError, match="physionet2012 has one split, its own; got split=1"):
        data.load("physionet2012", tmp_path, split=1)
    loaded = data.load("physionet2012", tmp_path)
    with pytest.raises(
        ValueError, match="physionet2012 is a series of tokens; out-of-distribution inputs are for images"
    ):
        data.ood("noise", loaded, tmp_path)
    with pytest.raises(ValueError, match="physionet2012 has tokens, neither images nor features"):
        data.ood("physionet2012", data.load("digits"), tmp_path)


def test_a_comparison_takes_the_lstm(tmp_path):
    write_cache(tmp_path)
    flags = parse(comparison_options(), ["--data", "physionet2012", "--root", str(tmp_path)], "compare")
    plan = plan_of(flags)
    assert "series 48x42; network lstm-ehr" in plan.sentence
    assert {job.evaluation.ood for job in plan.jobs} == {()}
    assert {job.recipe.optimizer for job in plan.jobs} == {"adam"}


# ----------------------------------------------------------------------------------------- records


STAY = """Time,Parameter,Value
00:00,RecordID,{record}
00:00,Age,54
00:00,Gender,0
00:00,Height,-1
00:00,ICUType,4
00:00,Weight,80.5
00:07,HR,73
00:37,HR,78
00:37,Weight,81.5
01:37,Temp,-1
27:37,Urine,400
27:59,Urine,0
47:10,HR,60
48:00,HR,61
"""


def test_a_published_record_becomes_hourly_means():
    x, static = read_stay(STAY.format(record=132539))
    hour = {name: x[:, SERIES.index(name)] for name in SERIES}
    np.testing.assert_array_equal(static, np.array([54, 0, np.nan, 4, 80.5], np.float32))
    measured = {("HR", 0): 75.5, ("HR", 47): 60.5, ("Weight", 0): 81, ("Urine", 27): 200}
    assert {place: hour[place[0]][place[1]] for place in measured} == measured
    assert (~np.isnan(x)).sum() == len(measured)


def write_published(folder, packed):
    """Write two stays of each set in the published format."""
    for number, name in enumerate(SETS):
        records = [10 * number + 2, 10 * number + 1]
        texts = {f"{name}/{record}.txt": STAY.format(record=record).encode() for record in records}
        if packed:
            upstream.write_tar(folder / f"{name}.tar.gz", texts)
        else:
            (folder / name).mkdir()
            for path, text in texts.items():
                (folder / path).write_bytes(text)
        lines = [",".join(OUTCOMES), *(f"{record},6,1,5,-1,{record % 10 - 1}" for record in records)]
        (folder / f"Outcomes-{name[-1]}.txt").write_text("\r\n".join(lines) + "\r\n")


@pytest.mark.parametrize("packed", [True, False])
def test_the_published_files_become_a_data_set(tmp_path, packed):
    write_published(tmp_path, packed)
    said = []
    data.prepare("physionet2012", tmp_path, tmp_path, say=said.append)
    assert FILE in said[-1]
    loaded = data.load("physionet2012", tmp_path)
    for split in (loaded.train, loaded.test, loaded.further["set-c"]):
        assert split.y.tolist() == [0, 1]  # in the order of the records' numbers
    with np.load(tmp_path / FILE) as cached:
        assert cached["outcomes"][:, 0].tolist() == [1, 2, 11, 12, 21, 22]
        assert cached["x"].shape == (6, HOURS, len(SERIES))


def test_outcomes_of_other_stays_are_refused(tmp_path):
    write_published(tmp_path, packed=False)
    (tmp_path / "set-b" / "11.txt").unlink()
    with pytest.raises(ValueError, match="set-b has 1 records and 2 outcomes"):
        physionet2012(tmp_path)
    (tmp_path / "Outcomes-a.txt").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"Outcomes-a\.txt has the columns a,b, expected RecordID,"):
        physionet2012(tmp_path)


# -------------------------------------------------------------------------------------------- real


def test_the_real_stays(data_root):
    if not (data_root / FILE).is_file():
        pytest.skip(f"needs {FILE} in the data folder")
    loaded = data.load("physionet2012", data_root)
    parts = (loaded.train, loaded.test, loaded.further["set-c"])
    assert [len(split) for split in parts] == [4000] * 3
    assert [int(split.y.sum()) for split in parts] == [554, 568, 585]
    every = torch.cat([split.x for split in parts])
    assert every.shape == (12_000, *SHAPE)
    assert (every.min(), every.max()) == (0, BINS)
    measured = every[..., : len(SERIES)] > 0
    assert measured.float().mean().item() == pytest.approx(0.203, abs=5e-4)
    assert int((~measured).flatten(1).all(1).sum()) == 10
    heart = loaded.train.x[..., SERIES.index("HR")]
    counts = heart[heart > 0].bincount(minlength=BINS + 1)[1:] / (heart > 0).sum()
    assert counts.min() > 0.08  # tenths of set a, but for values that many hours share
    assert counts.max() < 0.12
    row = next(row for row in data.describe(data_root) if row.name == "physionet2012")
    assert row[1:5] == ("classification", 4000, 4000, SHAPE)
