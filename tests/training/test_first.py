"""What is wrong with the arguments of `fit` is said in a sentence before anything is learned."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.training.fit import fit

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


@pytest.mark.parametrize("steps", [5, 12])  # as many as rows: nothing else would tell time from rows
def test_rows_on_the_second_axis_need_a_loader(steps):
    torch.manual_seed(0)
    x, y = torch.randn(steps, 12, 4), torch.randint(3, (12,))
    model = lb.convert(nn.LSTM(4, 3), lb.Rank1())
    for data in ((x, y), TensorDataset(x.transpose(0, 1), y)):
        with pytest.raises(ValueError, match="got one with batch_first=False; put it into a module"):
            fit(model, data, short(), output=lambda result: result[0][-1])
    pairs = TensorDataset(x.transpose(0, 1), y)

    def along_second(rows):
        return torch.stack([row for row, _ in rows], 1), torch.stack([target for _, target in rows])

    loader = DataLoader(pairs, batch_size=12, collate_fn=along_second, generator=torch.Generator())
    twin = lb.convert(nn.LSTM(4, 3), lb.Rank1())
    twin.load_state_dict(model.state_dict())
    history = fit(model, loader, short(epochs=1), output=lambda result: result[0][-1])
    torch.manual_seed(short().seed)
    loss = lb.elbo(twin.train(), x, y, num_data=12, output=lambda result: result[0][-1]).loss
    assert history[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("kind", [lambda *data: data, TensorDataset, lambda *data: DataLoader(TensorDataset(*data), 8)])
def test_several_inputs_are_to_be_nested(kind):
    x, y = images()
    with pytest.raises(TypeError, match=r"of 3: Tensor, Tensor, Tensor; nest several inputs, as in \(\(a, b\), y\)"):
        fit(network(), kind(x, x, y), short())


@pytest.mark.parametrize("epochs", [{}, {"convert_at_epoch": 2}])
def test_a_loss_that_has_no_mixture_is_refused_before_training(epochs):
    recipe = short(tile_last_epochs=1, aggregate="mixture", **epochs)
    for loss, error in ((lb.Categorical(label_smoothing=0.1), ValueError), (nn.CrossEntropyLoss(), TypeError)):
        seen = []
        with pytest.raises(error, match="aggregate='mixture'"):
            fit(rank1(), images(), recipe, likelihood=loss, callbacks=[seen.append])
        assert not seen


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
    with pytest.raises(ValueError, match=r"layer 'network\.0' expected an input with 1 features on axis 1, got"):
        fit(Pixels(), (pixels.repeat(1, 2, 1, 1), y), short(epochs=1))
