"""Training on a GPU: the flag that saves the weights, exact books, resumption with fused optimisers."""

from __future__ import annotations

import pytest
import torch

from leanbayes.training import diagnostics, TrainingError
from leanbayes.training.fit import fit

from .problems import images, network, rank1, short
from .test_state import Stop, stop_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # inductor comments on its own choices
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "lr": 0.01}])
@pytest.mark.parametrize("step", [1, 7, 60])
def test_the_weights_before_the_bad_step_are_kept_although_nobody_looked(monkeypatch, optimizer, step):
    recipe = short(epochs=1, batch_size=4, accelerator="cuda", **optimizer)
    (x, y), calls = images(400), []

    def loss(stops):
        calls.clear()

        def one(outputs, y):
            calls.append(1)
            bad = torch.where(torch.tensor(len(calls) == step, device=y.device), float("inf"), 0.0)
            if stops and len(calls) == step:
                raise Stop
            return torch.nn.functional.cross_entropy(outputs, y) + bad

        return one

    broken, stopped = network(norm=False), network(norm=False)
    with pytest.raises(TrainingError, match=rf"epoch 1, step {step} of 100: the same batch is finite when it is run"):
        fit(broken, (x, y), recipe, likelihood=loss(False))
    assert len(calls) == 1 + -(-step // diagnostics.LOOK_EVERY) * diagnostics.LOOK_EVERY  # a look, and one repetition
    with pytest.raises(Stop):
        fit(stopped, (x, y), recipe, likelihood=loss(True))
    for a, b in zip(broken.parameters(), stopped.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_layer_is_named():
    bnn = rank1()
    with torch.no_grad():
        bnn[4].base.weight.fill_(3e38)
    with pytest.raises(TrainingError, match=r"at epoch 1, step 1 of 6: the output of layer '4' is the first"):
        fit(bnn, images(), short(accelerator="cuda"))
    assert next(bnn.parameters()).device.type == "cpu"
    assert all(p.isfinite().all() for p in bnn.parameters())


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "lr": 0.01}])
@pytest.mark.parametrize("kind", [{}, {"channels_last": True, "precision": "bf16-mixed"}, {"compile": True}])
def test_a_resumed_training_equals_an_unbroken_one(tmp_path, kind, optimizer):
    fields = {"epochs": 6, "convert_at_epoch": 2, "tile_last_epochs": 2, "augment": "crop_flip", "anneal_epochs": 3}
    recipe = short(**fields | kind | optimizer | {"accelerator": "cuda"})
    unbroken, fresh = rank1(), rank1()
    held = torch.cuda.memory_allocated() / 2**20  # by other tests
    history = fit(unbroken, images(90), recipe, validation=images(33))
    with pytest.raises(Stop):
        fit(rank1(), images(90), recipe, folder=tmp_path, callbacks=[stop_after(3)])
    resumed = fit(fresh, images(90), recipe, folder=tmp_path, resume=True)
    for (name, a), b in zip(unbroken.state_dict().items(), fresh.state_dict().values(), strict=True):
        # Not to the last bit: sums on a GPU have no fixed order.
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert resumed[-1]["loss"] == pytest.approx(history[-1]["loss"], rel=1e-3)
    assert history.peak_memory_mb < held + 1000
