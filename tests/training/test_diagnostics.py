"""Wrong arguments are refused before anything is learned; a loss that is not finite stops training and is explained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.training import TrainingError
from leanbayes.training.fit import fit

from .problems import images, network, rank1, same, short


class Exploding(nn.Module):
    """Gives infinity from the n-th training pass on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def forward(self, x):
        self.left -= 1
        return x * (1.0 if self.left >= 0 else float("inf"))


def test_the_layer_whose_output_breaks_is_named_with_epoch_and_step(tmp_path):
    net = nn.Sequential(*network(), nn.ReLU(), Exploding(after=8), nn.Linear(3, 3))
    with pytest.raises(
        TrainingError,
        match=r"the loss is nan at epoch 2, step 3 of 6: the output of layer '6' is the first that is not finite; try "
        r"a lower lr, clip_norm=1.0, .*The state of epoch 1 is kept\.",
    ):
        fit(net, images(), short(), folder=tmp_path)
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_rate_far_too_high_is_found_in_a_stochastic_layer_too():
    bnn = rank1()
    with torch.no_grad():
        bnn[4].base.weight.fill_(3e38)
    with pytest.raises(TrainingError, match=r"at epoch 1, step 1 of 6: the output of layer '4' is the first"):
        fit(bnn, images(), short())


def test_weights_stay_as_they_were_before_the_step():
    class Stop(Exception):
        pass

    def losses(at_the_fifth):
        calls = []

        def loss(outputs, y):
            calls.append(1)
            return at_the_fifth() if len(calls) == 5 else F.cross_entropy(outputs, y)

        return loss

    def stop():
        raise Stop

    broken, stopped = network(), network()
    with pytest.raises(TrainingError, match="step 5 of 6"):
        fit(broken, images(), short(), likelihood=losses(lambda: torch.tensor(float("inf"))))
    with pytest.raises(Stop):
        fit(stopped, images(), short(), likelihood=losses(stop))
    assert all(torch.equal(a, b) for a, b in zip(broken.parameters(), stopped.parameters(), strict=True))


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_data_that_are_not_finite_are_named(what):
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    (x if what == "inputs" else y)[17, 0] = float("nan")
    with pytest.raises(TrainingError, match=f"the {what} of the batch are not finite; look for missing values"):
        fit(nn.Linear(4, 1), (x, y), short(), likelihood=lb.Gaussian())


class Root(nn.Module):
    """The root has an infinite slope at zero: its gradient breaks while its output is fine."""

    def forward(self, x):
        return (x * 0).sqrt() + x


def test_parameters_that_an_update_broke_are_named():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), Root(), nn.Linear(3, 3))
    with pytest.raises(
        TrainingError,
        match=r"step 2 of 6: the parameters of layer '1' are not finite, its update broke; try a lower lr",
    ):
        fit(net, images(), short())


def test_the_kl_and_the_likelihood_are_named():
    bnn = rank1()
    with torch.no_grad():
        centre = next(p for name, p in bnn.named_parameters() if "posterior.input" in name)
        centre.fill_(1e30)
    bnn[0].forward = lambda x: network()[0](x)
    with pytest.raises(TrainingError, match=r"the KL of layer '0' is not finite; lower posterior_lr"):
        fit(bnn, images(), short())

    def loss(outputs, y):
        return outputs.sum() * float("inf")

    with pytest.raises(TrainingError, match="all outputs are finite, their likelihood is not; check the targets"):
        fit(network(), images(), short(), likelihood=loss)


def test_what_does_not_happen_again_is_said(monkeypatch):
    calls = []

    def loss(outputs, y):
        calls.append(1)
        return outputs.square().mean() * (float("nan") if len(calls) == 3 else 1.0)

    with pytest.raises(TrainingError, match=r"step 3 of 6: the same batch is finite when it is run again"):
        fit(network(), images(), short(), likelihood=loss)


def test_the_batch_and_the_noise_of_the_step_are_repeated():
    seen = []

    def keep(module, args, result):
        seen.append(result.detach().clone())

    model = rank1()
    model[4].register_forward_hook(keep)

    def loss(outputs, y):
        return outputs.mean() * (float("nan") if len(seen) in (4, 5) else 1.0)

    with pytest.raises(TrainingError, match="step 4 of 6"):
        fit(model, images(), short(augment="crop_flip"), likelihood=loss)
    assert len(seen) == 5
    assert torch.equal(seen[3], seen[4])


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
    fit(b, images(), short(), likelihood=nn.CrossEntropyLoss())  # which has no check of classes
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


class Breaks(nn.Module):
    """A network whose n-th gradient is not finite, while its loss is."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(16, 3), at
        self.unused = nn.Parameter(torch.full((3,), torch.nan))  # as torch.empty leaves it

    def forward(self, x):
        out = self.layer(x.flatten(1))
        if out.requires_grad:
            out.register_hook(self.break_one)
        return out

    def break_one(self, gradient):
        self.left -= 1
        return gradient * torch.nan if self.left == 0 else gradient


@pytest.mark.parametrize(("at", "epoch", "kept"), [(18, 3, r" The state of epoch 2 is kept\."), (6, 1, "")])
def test_an_update_that_breaks_in_the_last_step_of_an_epoch_is_found(tmp_path, at, epoch, kept):
    heard = []
    with pytest.raises(
        TrainingError,
        match=rf"the parameters of layer 'layer' are not finite after epoch {epoch}, .*precision='32-true'\.{kept}$",
    ):
        fit(Breaks(at), images(), short(), folder=tmp_path, callbacks=[lambda state: heard.append(state.save())])
    assert len(heard) == epoch - 1
    fit(Breaks(0), images(), short(), folder=tmp_path, resume=True)


@pytest.mark.parametrize("wrong", [-1, 2])
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), TensorDataset])
def test_yes_or_no_is_from_zero_to_one(wrong, kind):
    x, y = torch.randn(32, 4), torch.randint(2, (32, 1)).float()
    net = lb.convert(nn.Linear(4, 1), lb.Rank1())
    fit(net, kind(x, y), short(epochs=1), likelihood=lb.Bernoulli())
    fit(net, kind(x, y * 0.5), short(epochs=1), likelihood=lb.Bernoulli())  # a share of annotators
    message = rf"expected targets of lb\.Bernoulli\(\) from 0 .no. to 1 .yes., got {wrong}; "
    with pytest.raises(ValueError, match=message):
        fit(net, kind(x, torch.where(y > 0, 1.0, wrong)), short(), likelihood=lb.Bernoulli())
    p = lb.predict(net, x, lb.Bernoulli())
    with pytest.raises(ValueError, match=message):
        p.log_prob(torch.where(y > 0, 1.0, wrong))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.bool, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [network, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))])
def test_inputs_of_any_type_have_their_remedy(make, dtype):
    x, y = images()
    with pytest.raises(TypeError, match=rf"got {dtype} \(.*\); convert them: x\.float\(\)$"):
        fit(make(), (x.to(dtype), y), short())


def test_arguments_of_another_kind_are_refused_before_training():
    for options, message in (
        ({"likelihood": lb.Categorical}, r"expected a likelihood such as lb\.Categorical\(\), or a function"),
        ({"likelihood": "gaussian"}, "expected a likelihood such as .* got 'gaussian'"),
        ({"callbacks": print}, "expected callbacks to be a list of functions of an EpochState, got <built-in"),
        ({"callbacks": [None]}, "expected callbacks to be a list of functions of an EpochState, got .None."),
    ):
        with pytest.raises(TypeError, match=message):
            fit(network(), images(), short(), **options)
    with pytest.raises(TypeError, match=r"expected a model, a torch\.nn\.Module, got 'wrn'"):
        fit("wrn", images(), short())
    with pytest.raises(
        ValueError, match=r"expected at least two classes on axis 1, .* for one logit lb\.Bernoulli\(\)"
    ):
        fit(nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), images(), short())


def test_a_batch_whose_targets_are_all_ignored_is_named():
    x, y = images()
    with pytest.raises(
        TrainingError, match="at epoch 1, step 1 of 6: all targets of the batch are ignored, so they have"
    ):
        fit(rank1(), (x, torch.full_like(y, -100)), short())
