"""Held-out rows and folds: strata, groups, time, and the same choice for the same seed."""

from __future__ import annotations

import pytest
import torch

from leanbayes.data.holdout import fold_of, held_out


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_every_class_has_its_share_of_held_out_rows(share):
    y = torch.cat([torch.full((count,), label) for label, count in enumerate((400, 90, 30, 480))])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    held = held_out(y, share, seed=3)
    assert held.sum() == round(share * len(y))
    for label in range(4):
        mine = y == label
        assert abs(int(held[mine].sum()) - share * int(mine.sum())) <= 1


def test_real_targets_are_held_out_by_quantile():
    y = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1)).exp()
    held = held_out(y, 0.1, seed=0)
    rank = y[:, 0].argsort().argsort() // 100
    assert [int(held[rank == decile].sum()) for decile in range(10)] == [10] * 10


def test_the_choice_depends_on_the_seed_and_on_nothing_random():
    y = torch.arange(300) % 3
    first, again = held_out(y, 0.2, seed=5), held_out(y, 0.2, seed=5)
    assert torch.equal(first, again)
    assert not torch.equal(first, held_out(y, 0.2, seed=6))


def test_groups_are_held_out_whole():
    groups = torch.arange(600) // 7
    held = held_out(torch.arange(600) % 2, 0.1, seed=0, groups=groups)
    for group in groups.unique():
        assert held[groups == group].unique().numel() == 1
    assert 50 <= int(held.sum()) <= 70


def test_the_latest_rows_are_held_out():
    time = torch.randperm(200, generator=torch.Generator().manual_seed(0)).double()
    held = held_out(torch.zeros(200), 0.1, seed=0, time=time)
    assert int(held.sum()) == 20
    assert time[held].min() > time[~held].max()


def test_rows_of_one_time_are_not_separated():
    time = torch.arange(100) // 30
    held = held_out(torch.zeros(100), 0.05, seed=0, time=time)
    assert torch.equal(held, time == 3)


def test_folds_are_disjoint_stratified_and_cover_all_rows():
    y = torch.arange(503) % 4
    fold = fold_of(y, 5, seed=0)
    assert sorted(fold.unique().tolist()) == [0, 1, 2, 3, 4]
    for label in range(4):
        counts = torch.bincount(fold[y == label], minlength=5)
        assert int(counts.max() - counts.min()) <= 1


def test_folds_keep_groups_whole_and_are_even():
    groups = torch.arange(400) // 8
    fold = fold_of(torch.zeros(400), 5, seed=0, groups=groups)
    for group in groups.unique():
        assert fold[groups == group].unique().numel() == 1
    assert torch.bincount(fold).tolist() == [80] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": torch.zeros(10), "share": 1.5}, "between 0 and 1, got 1.5"),
        ({"y": torch.zeros(3), "share": 0.5}, "at least 2 held-out and 2 training rows, got 3"),
        ({"y": torch.zeros(20), "share": 0.2, "groups": torch.zeros(20)}, "at least two groups"),
        ({"y": torch.zeros(20), "share": 0.2, "time": torch.zeros(20)}, "at least 2 rows before"),
    ],
)
def test_impossible_splits_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        held_out(**arguments, seed=0)


def test_too_few_rows_for_folds_are_explained():
    with pytest.raises(ValueError, match="at least 10 rows for 5 folds, got 7"):
        fold_of(torch.zeros(7), 5, seed=0)
    with pytest.raises(ValueError, match="at least 5 groups for 5 folds, got 2"):
        fold_of(torch.zeros(20), 5, seed=0, groups=torch.arange(20) % 2)
