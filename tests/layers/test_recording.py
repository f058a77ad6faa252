"""Recording a pass on example inputs: which functions turn channels, which hold them, and what stays out of sight."""

from __future__ import annotations

import pytest
import torch
from torch import nn, Tensor

from leanbayes.layers.channels import follow
from leanbayes.layers.streams import Stream


class Net(nn.Module):
    """A map to four channels, a function, and a map from them."""

    def __init__(self, run, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.run, self.stem, self.first, self.last = run, nn.Linear(3, 3), first, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.first(x)))


def stream(run, last: nn.Module | None = None, shape: tuple[int, ...] = (2, 5, 3)) -> Stream:
    first = nn.Linear(3, 4) if len(shape) == 3 else nn.Conv2d(3, 4, 1)
    found = follow(Net(run, first, last or nn.Linear(4, 2)), example=torch.ones(shape))
    layout = found.outputs["first"]
    assert layout is not None
    assert found.inputs["last"] is None or found.inputs["last"][0].stream == layout[0].stream
    return found.stream(layout[0].stream)


def unseen(x: Tensor) -> Tensor:
    """Compute as code does that torch cannot watch."""
    with torch._C.DisableTorchFunction():
        return x + 1


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[: len(x)] * 2,
        lambda x: x.view(-1, 4),
        lambda x: x.reshape(x.size(0) * x.size(1), -1),
        lambda x: x[:, 0],
        lambda x: x.mean(1),
        lambda x: x.sum(dim=1, keepdim=True),
        lambda x: x.transpose(1, 2).transpose(-1, -2),
        lambda x: x.permute(1, 0, 2),
        lambda x: torch.cat([x, x.relu()], 1),
        lambda x: 2 * x * torch.ones(5, 1),
        lambda x: x.unflatten(1, (5, 1)).flatten(1, 2),
    ],
)
def test_rows_may_be_rearranged(run):
    assert stream(run).held == ""


@pytest.mark.parametrize(
    ("run", "last"),
    [
        (lambda x: x.flatten(2).transpose(1, 2), nn.Linear(4, 2)),
        (lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4), nn.Linear(4, 2)),
        (lambda x: x.reshape(x.shape[0], -1), nn.Linear(4 * 6, 2)),
        (lambda x: x.view(len(x), 4, 6).mean(-1), nn.Linear(4, 2)),
        (lambda x: x[:, :, 1], nn.Conv1d(4, 2, 1)),
    ],
)
def test_images_may_become_tokens(run, last):
    assert stream(run, last, (2, 3, 2, 3)).held == ""


@pytest.mark.parametrize(
    ("run", "last", "reason"),
    [
        (lambda x: x[..., :2].repeat(1, 1, 2), None, "the function getitem reads it"),
        (lambda x: x.flip(-1), None, "the function flip reads it"),
        (lambda x: x.softmax(-1), None, "the function softmax reads it"),
        (lambda x: x.mean(-1, keepdim=True).expand(-1, -1, 4), None, "the function mean reads it"),
        (lambda x: x + 1, None, "a number is added to it"),
        (lambda x: x * torch.ones(4), None, "it is added to something of another layout"),
        (lambda x: x * x.detach().max().item(), None, "the function max reads it"),
        (unseen, None, "code that torch cannot watch"),
        (lambda x: torch.from_numpy(x.detach().numpy()), None, "the function numpy reads it"),
        (lambda x: x.view(2, 5, 2, 2).sum(-1).repeat(1, 1, 2), None, "the function sum reads heads of attention"),
        (lambda x: torch.ops.aten.roll(x, [1], [2]), None, "the function roll reads it"),
        (lambda x: x.view(2, 20), nn.Linear(20, 2), "reads it"),
    ],
)
def test_other_functions_hold_channels(run, last, reason):
    assert reason in stream(run, last).held


def test_channels_that_are_set_in_place_are_held():
    def run(x: Tensor) -> Tensor:
        y = torch.zeros(2, 5, 4)
        y[:, 1:] = x[:, 1:]
        return y

    assert stream(run).held == "the function setitem reads it"


def test_an_example_that_does_not_run_is_refused_with_the_line():
    net = Net(lambda x: x, nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"Net does not run on the example inputs: line \d+ of .*; pass as example="):
        follow(net, example=torch.ones(2, 7))


def test_a_recorded_pass_finds_the_streams_of_a_traced_one():
    from leanbayes import models

    net = models.build("resnet18", num_outputs=5, input_shape=(3, 32, 32))
    traced, recorded = follow(net), follow(net, example=torch.ones(2, 3, 32, 32))
    assert recorded.makers == traced.makers
    assert recorded.normed == traced.normed
    for path in traced.makers:
        one, other = ([p for p in found.makers if _same(found, p, path)] for found in (traced, recorded))
        assert one == other


def _same(found, one: str, other: str) -> bool:
    return found.root(found.outputs[one][0].stream) == found.root(found.outputs[other][0].stream)
