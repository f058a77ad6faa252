"""What is wrong with the arguments of `fit` is said in a sentence before anything is learned."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.training import fit

from .problems import images, network, rank1, same, short


def test_a_recipe_is_a_recipe():
    with pytest.raises(TypeError, match=r"expected a recipe such as lb\.Recipe\(epochs=30\), got 'quick'"):
        fit(network(), images(), "quick")


def test_resuming_needs_a_folder():
    with pytest.raises(ValueError, match="resume=True has nothing to resume from; give the folder"):
        fit(network(), images(), short(), resume=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32])
def test_classes_may_be_whole_numbers_of_any_type(dtype):
    x, y = images()
    y, likely, same_likely = y > 0, network(), network()
    valid = fit(likely, (x, y.long()), short(epochs=1), validation=(x, y.long()))[0]
    again = fit(same_likely, (x, y.to(dtype)), short(epochs=1), validation=(x, y.to(dtype)))[0]
    assert (again["valid_nll"], again["valid_accuracy"]) == (valid["valid_nll"], valid["valid_accuracy"])
    assert same(likely, same_likely)


def test_bytes_name_the_classes_of_a_network_with_more_than_a_byte_holds():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 300))
    fit(net, (images()[0], torch.full((96,), 200, dtype=torch.uint8)), short(epochs=1))


def hooks(model):
    return [len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("make", [network, rank1, lambda: lb.Ensemble([network(), network()])])
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), TensorDataset])
@pytest.mark.parametrize(("shift", "found"), [(3, "[345]"), (-1, "-1")])
def test_targets_that_the_network_cannot_name_are_refused_before_training(make, kind, shift, found):
    model = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = images()
    with pytest.raises(
        ValueError, match=rf"expected targets from 0 to 2, since the network has 3 outputs, got {found};"
    ):
        fit(model, kind(x, y + shift), short())
    assert all(map(torch.equal, before, model.parameters()))
    assert hooks(model) == hooks(make())


def test_a_rare_target_is_found_in_the_first_step():
    x, y = images()
    y[50] = 9
    heard = []
    with pytest.raises(ValueError, match="since the network has 3 outputs, got 9"):
        fit(network(), (x, y), short(batch_size=2), likelihood=lb.Categorical(), callbacks=[heard.append])
    y[50] = -100  # what the likelihood ignores
    fit(network(), (x, y), short(epochs=1))


class Record(nn.Module):
    """A network that returns more than its logits."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        return {"scores": self.network(x), "rows": len(x)}


def test_targets_are_compared_with_the_picked_output():
    x, y = images()
    model = Record()
    fit(model, (x, y), short(epochs=1), output=lambda result: result["scores"])
    with pytest.raises(ValueError, match="since the network has 3 outputs, got"):
        fit(model, (x, y + 3), short(epochs=1), output=lambda result: result["scores"])


def test_the_look_changes_nothing():
    a, b = rank1(), rank1()
    fit(a, images(), short())
    fit(b, images(), short(), likelihood=nn.CrossEntropyLoss())  # which nobody watches
    assert same(a, b)


@pytest.mark.parametrize("make", [network, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))])
def test_inputs_of_another_type_are_refused_with_the_remedy(make):
    x, y = images()
    with pytest.raises(
        TypeError, match=r"got torch\.uint8 \(.*\); convert them: x\.float\(\), for pixels x\.float\(\) / 255"
    ):
        fit(make(), (x.byte(), y), short())
    with pytest.raises(TypeError, match=r"got torch\.float64 \(.*\); convert them: x\.float\(\)"):
        fit(make(), (x.double(), y), short())


class Pixels(nn.Module):
    """A network that converts pixels itself."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        return self.network(x / 255)


def test_a_network_may_take_pixels_and_fail_for_other_reasons():
    x, y = images()
    pixels = x.clamp(0, 1).mul(255).byte()
    fit(Pixels(), (pixels, y), short(epochs=1))
    with pytest.raises(RuntimeError, match="expected input"):
        fit(Pixels(), (pixels.repeat(1, 2, 1, 1), y), short(epochs=1))
