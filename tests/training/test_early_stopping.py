"""Early stopping: when it stops, which state it keeps, and that kills and conversions do not change either."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.training.early_stopping import best_epoch, is_over, split_rows
from leanbayes.training.progress import History
from leanbayes.training.recipe import Recipe
from leanbayes.training.state import Checkpoint
from tests.training.problems import images, network, same, short


class Killed(Exception):
    pass


fit_module = importlib.import_module("leanbayes.training.fit")


def rows(*scores):
    return History({"epoch": number, "valid_nll": score} for number, score in enumerate(scores, 1))


def noisy_problem():
    """Few rows, every third label random: the validation NLL falls, then rises."""
    generator = torch.Generator().manual_seed(0)
    x, random = torch.randn(90, 8, generator=generator), torch.randint(3, (90,), generator=generator)
    return x, torch.where(torch.arange(90) % 3 == 0, random, x[:, :3].argmax(1))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def stopping(**fields):
    return short(**({"epochs": 60, "schedule": "constant", "optimizer": "adam", "lr": 0.02, "patience": 4} | fields))


def test_the_best_epoch_is_the_first_of_the_lowest_after_the_conversion():
    recipe = stopping()
    assert best_epoch(rows(3.0, 1.0, 2.0, 1.0), recipe) == 2
    assert best_epoch(rows(3.0, 1.0, 2.0, 1.5), stopping(convert_at_epoch=2)) == 4
    assert best_epoch(rows(3.0, 1.0), stopping(convert_at_epoch=2)) is None
    assert best_epoch(rows(None, 1.0, None), recipe) == 2


def test_a_training_is_over_after_the_patience_and_not_before():
    recipe = stopping(patience=2)
    assert not is_over(rows(3.0, 1.0, 2.0), recipe)
    assert is_over(rows(3.0, 1.0, 2.0, 2.0), recipe)
    assert not is_over(rows(3.0, 1.0, 2.0, 2.0), stopping(patience=2, convert_at_epoch=4))
    assert not is_over(rows(3.0, 1.0, 2.0, 2.0), short())


@pytest.mark.parametrize("method", [None, lb.Rank1(components=2)])
def test_the_best_state_is_kept(method):
    x, y = noisy_problem()
    model = mlp() if method is None else lb.convert(mlp(), method)
    states = []

    def keep(state):
        states.append({name: tensor.clone() for name, tensor in state.model.state_dict().items()})

    history = lb.fit(model, (x, y), stopping(), validation=0.3, callbacks=[keep], progress=False)
    best = best_epoch(history, stopping())
    assert len(history) == best + 4 < 60
    kept = model.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in states[best - 1].items())
    assert any(not torch.equal(kept[name], tensor) for name, tensor in states[-1].items())


def test_a_late_conversion_chooses_among_the_epochs_after_it():
    x, y = noisy_problem()
    model = lb.convert(mlp(), lb.Rank1(components=2))
    recipe = stopping(convert_at_epoch=20)
    history = lb.fit(model, (x, y), recipe, validation=0.3, progress=False)
    assert min(row["valid_nll"] for row in history[:20]) < min(row["valid_nll"] for row in history[20:])
    assert best_epoch(history, recipe) > 20
    assert len(history) == best_epoch(history, recipe) + 4


def test_a_killed_training_stops_at_the_same_epoch_with_the_same_weights(tmp_path):
    x, y = noisy_problem()
    whole = mlp()
    expected = lb.fit(whole, (x, y), stopping(), validation=0.3, folder=tmp_path / "whole", progress=False)

    def kill_at(epoch):
        def callback(state):
            if state.epoch == epoch:
                raise Killed

        return callback

    best = best_epoch(expected, stopping())
    assert best > 1
    for epoch in (1, best, len(expected) - 1):  # before, at and after the best state
        with pytest.raises(Killed):
            lb.fit(mlp(), (x, y), stopping(), validation=0.3, folder=tmp_path / "cut", resume=True,
                   callbacks=[kill_at(epoch)], progress=False)  # fmt: skip
    resumed = mlp()
    found = lb.fit(resumed, (x, y), stopping(), validation=0.3, folder=tmp_path / "cut", resume=True, progress=False)
    assert [row["valid_nll"] for row in found] == [row["valid_nll"] for row in expected]
    assert same(resumed, whole)
    again = mlp()  # a finished training trains no further
    assert len(lb.fit(again, (x, y), stopping(), validation=0.3, folder=tmp_path / "cut", resume=True,
                      progress=False)) == len(expected)  # fmt: skip
    assert same(again, whole)


def test_a_finished_training_without_its_best_state_is_refused(tmp_path):
    x, y = noisy_problem()
    lb.fit(mlp(), (x, y), stopping(), validation=0.3, folder=tmp_path, progress=False)
    (best,) = (tmp_path / "checkpoint").glob("best*.safetensors")
    best.unlink()
    with pytest.raises(ValueError, match="got no file; begin again"):
        lb.fit(mlp(), (x, y), stopping(), validation=0.3, folder=tmp_path, resume=True, progress=False)


def test_a_kill_between_the_best_and_the_last_state_leaves_a_training_that_resumes(tmp_path, monkeypatch):
    x, y = noisy_problem()
    whole = mlp()
    expected = lb.fit(whole, (x, y), stopping(), validation=0.3, progress=False)
    monkeypatch.setattr(fit_module, "SAVING", math.inf)  # a state after every epoch
    saved, write = [], Checkpoint.save

    def kill(checkpoint, module, optimizer, history):
        if len(saved) == 3:
            raise Killed
        saved.append(len(history))
        write(checkpoint, module, optimizer, history)

    monkeypatch.setattr(Checkpoint, "save", kill)
    with pytest.raises(Killed):
        lb.fit(mlp(), (x, y), stopping(), validation=0.3, folder=tmp_path, progress=False)
    monkeypatch.setattr(Checkpoint, "save", write)
    resumed = mlp()
    found = lb.fit(resumed, (x, y), stopping(), validation=0.3, folder=tmp_path, resume=True, progress=False)
    assert saved == [1, 2, 3]
    assert [row["valid_nll"] for row in found] == [row["valid_nll"] for row in expected]
    assert same(resumed, whole)


def test_states_are_written_rarely_at_the_end_and_when_a_callback_asks(tmp_path, monkeypatch):
    x, y = noisy_problem()
    monkeypatch.setattr(fit_module, "SAVING", 1e-9)
    saved, write = [], Checkpoint.save
    monkeypatch.setattr(Checkpoint, "save", lambda *given: (saved.append(len(given[3])), write(*given))[0])
    asked = [lambda state: state.save() if state.epoch == 2 else None]
    lb.fit(mlp(), (x, y), Recipe(epochs=5), folder=tmp_path, progress=False, callbacks=asked)
    assert saved == [1, 2, 5]


def test_a_share_of_the_rows_is_held_out_and_not_trained_on():
    x, y = images(90)
    train, held = split_rows((x, y), 0.2, seed=0)
    assert len(held[1]) == 18
    assert len(train[1]) == 72
    together = torch.cat([train[0], held[0]]).flatten(1)
    assert torch.equal(together.sum(1).sort().values, x.flatten(1).sum(1).sort().values)
    history = lb.fit(network(), (x, y), short(), validation=0.2, progress=False)
    assert all("valid_nll" in row for row in history)


def test_rows_of_nested_inputs_and_datasets_are_held_out():
    x, y = images(40)
    train, held = split_rows(((x, {"again": x}), y), 0.25, seed=0)
    assert torch.equal(held[0][0], held[0][1]["again"])
    assert len(train[0][0]) == 30
    train, held = split_rows(TensorDataset(x, y), 0.25, seed=0)
    assert (len(train), len(held)) == (30, 10)


def test_wrong_arguments_are_explained():
    x, y = images(40)
    with pytest.raises(TypeError, match="got DataLoader; give validation data"):
        lb.fit(network(), DataLoader(TensorDataset(x, y)), short(), validation=0.1, progress=False)
    with pytest.raises(ValueError, match="patience needs rows to validate on"):
        lb.fit(network(), (x, y), stopping(), progress=False)
    with pytest.raises(ValueError, match="expected schedule='constant'"):
        short(patience=3)
