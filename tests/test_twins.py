"""Twins: copies of the structure of a model with the same tensors, whatever its modules hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import leanbayes as lb
from leanbayes.runtime.twins import twin


class Holds(nn.Module):
    """Refers to its modules also outside the registry, and keeps settings that a call may change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.order = [self.b, self.a]
        self.settings = {"scale": [1.0, 2.0]}
        self.norm = parametrizations.weight_norm(nn.Linear(4, 4))
        self.again = self.a
        self.table = torch.ones(4)
        self.double = self.twice

    def twice(self, x):
        return 2 * x + self.table

    def forward(self, x):
        for layer in self.order:
            x = layer(x).relu()
        return self.norm(self.double(x)) * self.settings["scale"][1]


class CopiesItself(nn.Linear):
    """Counts its copies."""

    copies = 0

    def __deepcopy__(self, memo):
        made = copy.copy(self)
        made.copies = self.copies + 1
        return made


@pytest.mark.parametrize("share", [False, True])
def test_a_twin_has_its_own_structure_and_the_same_tensors(share):
    model = lb.convert(Holds(), lb.Rank1(), where=["a", "b"])
    model.order = [model.b, model.a]  # a list is no registry: `convert` does not replace its modules
    found = twin(model, share_plain=share)
    assert found.order[0] is found.b
    assert found.order[1] is found.a is found.again
    assert found.a is not model.a
    assert found.a.state is found.b.state
    assert found.a.state is not model.a.state
    assert found.settings == model.settings
    assert found.settings["scale"] is not model.settings["scale"]
    assert found.double.__self__ is found
    assert found.table is model.table
    assert [id(p) for p in found.parameters()] == [id(p) for p in model.parameters()]
    x = torch.randn(5, 4)
    with lb.draws(model, seed=1), lb.draws(found, seed=1):
        assert torch.equal(found(x), model(x))


def test_a_class_that_copies_itself_is_asked_to():
    found = twin(nn.Sequential(CopiesItself(3, 3), nn.ReLU()))
    assert found[0].copies == 1


def test_hooks_of_the_caller_are_kept_and_do_not_move():
    net, seen = nn.Sequential(nn.Linear(3, 3)), []
    net.register_forward_hook(lambda module, args, y: seen.append(module))
    found = twin(net)
    found(torch.ones(1, 3))
    assert seen == [found]
    found._forward_hooks.clear()
    assert len(net._forward_hooks) == 1
