"""Batches of one step are one large batch: their gradients are averaged by rows, and the KL counts once."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.cli.compare import comparison_options
from leanbayes.cli.main import parse
from leanbayes.training import Recipe, TrainingError
from leanbayes.training.fit import fit
from tests.training.problems import images, network, rank1, same, short

from .together import one_worker, together

ROWS = 90  # the last step of an epoch has fewer batches, and its last batch fewer rows
TOGETHER = {"batch_size": 32, "anneal_epochs": 1, "warmup_epochs": 0, "clip_norm": 1.0, "posterior_lr": 0.2}


def means(**fields):
    """Train posterior means, with their KL, and return the model."""
    bnn = rank1(norm=False)
    with lb.draws(bnn, mean=True):
        fit(bnn, images(ROWS), short(**fields), progress=False)
    return bnn


def close(one, other, tolerance=1e-5):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=tolerance, rtol=0) for a, b in pairs)


@pytest.mark.parametrize("batches", [2, 4])
@pytest.mark.parametrize("fields", [TOGETHER, TOGETHER | {"optimizer": "adam", "lr": 0.01, "clip_norm": None}])
def test_accumulated_batches_equal_one_of_all_their_rows(batches, fields):
    """The rates of both trainings are the same if an epoch is a whole number of steps, hence `schedule` constant."""
    fields = fields | {"schedule": "constant", "anneal_epochs": 0}
    large = means(**fields)
    small = means(**fields | {"batch_size": 32 // batches, "accumulate": batches})
    assert close(small, large)
    assert not close(means(**fields | {"batch_size": 32 // batches}), large, 1e-3)


def test_rates_and_annealing_change_from_step_to_step_not_from_batch_to_batch():
    bnn = [rank1(norm=False) for _ in range(2)]
    recipes = short(**TOGETHER), short(**TOGETHER | {"batch_size": 8, "accumulate": 4})
    for model, recipe in zip(bnn, recipes, strict=True):
        with lb.draws(model, mean=True):
            fit(model, images(96), recipe, progress=False)
    assert close(*bnn)


def test_a_plain_network_from_a_loader_accumulates_alike():
    ours, theirs = network(norm=False), network(norm=False)
    data = TensorDataset(*images(ROWS))
    fit(ours, DataLoader(data, 16), short(accumulate=2, schedule="constant"), progress=False)
    fit(theirs, DataLoader(data, 32), short(schedule="constant"), progress=False)
    assert close(ours, theirs)


class Stop(Exception):
    pass


def test_a_resumed_training_equals_an_unbroken_one_to_the_last_bit(tmp_path):
    def stop(state):
        raise Stop

    recipe = short(accumulate=3)
    unbroken, resumed = rank1(), rank1()
    fit(unbroken, images(ROWS), recipe, progress=False)
    with pytest.raises(Stop):
        fit(rank1(), images(ROWS), recipe, folder=tmp_path, callbacks=[stop], progress=False)
    fit(resumed, images(ROWS), recipe, folder=tmp_path, resume=True, progress=False)
    assert same(resumed, unbroken)
    with pytest.raises(ValueError, match="another recipe: accumulate was 3 and is 2"):
        fit(resumed, images(ROWS), short(accumulate=2), folder=tmp_path, resume=True, progress=False)


def test_the_batch_that_breaks_is_found_inside_its_step_which_is_not_taken():
    x, y = images(96)
    x[40] = float("nan")
    model = network(norm=False)
    with pytest.raises(TrainingError, match=r"at epoch 1, step [1-6] of 6: the inputs of the batch are not finite"):
        fit(model, (x, y), short(accumulate=6), progress=False)
    assert same(model, network(norm=False))


def test_the_field_is_checked_is_a_flag_and_leaves_kept_results_alone():
    with pytest.raises(ValueError, match="expected accumulate to be a whole number of at least 1, got 0"):
        Recipe(accumulate=0)
    assert parse(comparison_options(), ["--recipe.accumulate", "4"], "train").recipe.accumulate == 4
    assert "accumulate" not in Recipe().fields()
    assert Recipe(**Recipe(accumulate=4).fields()) == Recipe(accumulate=4)


def work(rank, world):
    """Accumulate in processes that torchrun knows of; then pretend that it does not."""
    recipe = short(**TOGETHER | {"batch_size": 8, "accumulate": 4, "devices": world})
    bnn = rank1(norm=False)
    with lb.draws(bnn, mean=True):
        fit(bnn, images(96), recipe, progress=False)
    found = {name: p.detach() for name, p in bnn.named_parameters()}
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        del os.environ[name]
    for devices in (1, 2):
        with pytest.raises(
            ValueError, match="processes that torchrun, Slurm or fit itself started, got 2 that have joined"
        ):
            fit(bnn, images(96), short(devices=devices), progress=False)
    return found


@one_worker
def test_two_processes_accumulate_as_one_and_must_be_known_to_fabric(tmp_path):
    one = rank1(norm=False)
    with lb.draws(one, mean=True):
        fit(one, images(96), short(**TOGETHER), progress=False)
    for found in together(2, work, tmp_path):
        for name, p in one.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), atol=1e-5, rtol=0)
