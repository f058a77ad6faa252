"""Cooling: the temperatures of a nested network during training."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.slim.distillation import ordering_units

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def nested() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return lb.convert(net, lb.NestedDropout(groups=4, temperature=2.0, hard=False, first=True))


def temperatures(model: nn.Module) -> list[float]:
    units = ordering_units(model)
    assert len(units) == 2
    return [float(unit.temperature) for unit in units]


@pytest.mark.parametrize(("epoch", "expected"), [(0, 2.0), (1, 2.0**0.5), (2, 1.0), (4, 0.5), (9, 0.5)])
def test_temperature_falls_by_equal_factors_and_then_stays(epoch, expected):
    model = nested()
    lb.slim.Cooling(2.0, 0.5, epochs=4)(SimpleNamespace(epoch=epoch, model=model))
    assert temperatures(model) == pytest.approx([expected] * 2)


class Stopped(Exception):
    """Stands for a killed process."""


def train(model: nn.Module, *callbacks: Callable[[Any], None], **options: Any) -> None:
    recipe = lb.Recipe(epochs=4, batch_size=8, lr=0.1)
    cooling = lb.slim.Cooling(2.0, 0.5, epochs=4)
    lb.fit(model, (X, Y), recipe, callbacks=[cooling, *callbacks], progress=False, **options)


def test_each_epoch_of_a_training_is_cooler():
    model, seen = nested(), []
    train(model, lambda state: seen.append(temperatures(state.model)[0]))
    assert seen == pytest.approx([2.0 * 0.25 ** (k / 4) for k in (1, 2, 3, 4)])
    assert temperatures(model) == pytest.approx([0.5, 0.5])


def test_a_resumed_training_continues_at_its_temperature(tmp_path):
    def stop(state):
        if state.epoch == 2:
            raise Stopped

    with pytest.raises(Stopped):
        train(nested(), stop, folder=tmp_path)
    during, after, resumed = [], [], nested()
    resumed.register_forward_pre_hook(lambda module, _: during.append(temperatures(module)[0]))
    train(resumed, lambda state: after.append(temperatures(state.model)[0]), folder=tmp_path, resume=True)
    tau = [2.0 * 0.25 ** (k / 4) for k in range(5)]
    assert list(dict.fromkeys(during)) == pytest.approx([tau[2], tau[3]])
    assert after == pytest.approx(tau[3:])


@pytest.mark.parametrize("wrong", [(0.0, 0.5, 4), (2.0, -1.0, 4), (2.0, 0.5, 0)])
def test_wrong_temperatures_are_refused(wrong):
    start, end, epochs = wrong
    with pytest.raises(ValueError, match="expected positive temperatures and epochs"):
        lb.slim.Cooling(start, end, epochs=epochs)
