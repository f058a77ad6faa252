"""A loss that is not finite stops training before it ruins the weights, and names the layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from leanbayes.training import TrainingError
from leanbayes.training.fit import fit

from .problems import images, network, rank1, short


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
