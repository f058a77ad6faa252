"""Lightning's Trainer against `lb.elbo` and `lb.predict` by hand: the same losses, the same figures."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import leanbayes as lb
from leanbayes.core.objective import linear_beta
from leanbayes.integrations import lightning as bridge

library = pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning, of the dev extra")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning")

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
LABELS = X[:, 0].gt(0).long()
LOADER = DataLoader(TensorDataset(X, LABELS), batch_size=8)


class Classifier(bridge.ElboSteps, library.LightningModule):
    weight_decay = 0.1
    posterior_lr = 0.01

    def __init__(self, method=None, **keywords):
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.model = lb.convert(net, method or lb.Rank1(components=2), **keywords)
        self.seen = []

    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)  # the noise of this step
        loss = super().training_step(batch, batch_idx)
        self.seen.append((self.beta, loss.item()))
        return loss


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return library.Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **options)


def by_hand(module, betas):
    """Train as the Trainer does, with a loop of one's own."""
    opt, losses = module.configure_optimizers(), []
    for step, (beta, (x, y)) in enumerate(zip(betas, LOADER, strict=True)):
        torch.manual_seed(step)
        terms = lb.elbo(module.model, x, y, num_data=len(X), beta=beta)
        opt.zero_grad()
        terms.loss.backward()
        opt.step()
        losses.append(terms.loss.item())
    return losses


@pytest.mark.parametrize("anneal", [False, True])
def test_three_steps_are_those_of_a_loop_by_hand(anneal):
    module, twin = Classifier(), Classifier()
    betas = [linear_beta(step, 4, start=0.2) if anneal else 1.0 for step in range(3)]
    callbacks = [bridge.anneal_beta(4, start=0.2)] if anneal else []
    trainer(max_steps=3, callbacks=callbacks).fit(module, LOADER)
    losses = by_hand(twin, betas)
    assert module.seen == list(zip(betas, losses, strict=True))
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(tensor, twin.model.state_dict()[name]), name


def test_the_posterior_has_its_own_rate_and_no_decay():
    groups = {group["name"]: group for group in Classifier().configure_optimizers().param_groups}
    assert (groups["weights"]["lr"], groups["weights"]["weight_decay"]) == (1e-3, 0.1)
    assert (groups["posterior"]["lr"], groups["posterior"]["weight_decay"]) == (0.01, 0.0)


def test_validation_logs_what_predict_says_and_training_goes_on():
    module, fitting = Classifier(), trainer(max_epochs=2, num_sanity_val_steps=1)
    fitting.fit(module, LOADER, LOADER)
    p = lb.predict(module.model, X, samples=module.samples)
    figures = fitting.callback_metrics
    assert figures["valid_nll"].item() == pytest.approx(-p.log_prob(LABELS).mean().item(), rel=1e-5)
    assert figures["valid_epistemic"].item() == pytest.approx(p.epistemic.mean().item(), rel=1e-5)
    assert figures["valid_accuracy"].item() == pytest.approx(lb.metrics.accuracy(p.mean, LABELS).item())
    assert figures["train_kl"].item() > 0
    assert len(module.seen) == 6


def test_regression_takes_the_likelihood_of_the_model():
    module, fitting = Classifier(likelihood=lb.Gaussian(0.5)), trainer(max_steps=2)
    loader = DataLoader(TensorDataset(X, X[:, :2]), batch_size=8)
    fitting.fit(module, loader, loader)
    (figures,) = fitting.validate(module, loader, verbose=False)
    p = lb.predict(module.model, X, samples=module.samples)
    assert figures["valid_nll"] == pytest.approx(-p.log_prob(X[:, :2]).mean().item(), rel=1e-5)
    assert "valid_accuracy" not in figures


def test_ignored_targets_do_not_count():
    module, fitting = Classifier(), trainer()
    some = torch.where(torch.arange(24) < 6, -100, LABELS)
    (figures,) = fitting.validate(module, DataLoader(TensorDataset(X, some), batch_size=24), verbose=False)
    p = lb.predict(module.model, X[6:], samples=module.samples)
    assert figures["valid_nll"] == pytest.approx(-p.log_prob(LABELS[6:]).mean().item(), rel=1e-5)
    assert figures["valid_accuracy"] == pytest.approx(lb.metrics.accuracy(p.mean, LABELS[6:]).item())


def test_labels_are_targets_each():
    labels, module = torch.stack((LABELS, 1 - LABELS), 1).float(), Classifier(likelihood=lb.Bernoulli())
    twin = Classifier(likelihood=lb.Bernoulli())
    trainer(max_steps=1).fit(module, DataLoader(TensorDataset(X, labels), batch_size=8))
    torch.manual_seed(0)
    terms = lb.elbo(twin.model, X[:8], labels[:8], num_data=2 * len(X))
    assert module.seen == [(1.0, terms.loss.item())]


class Endless(IterableDataset):
    def __iter__(self):
        return zip(X, LABELS, strict=True)


def test_a_stream_needs_num_data():
    loader = DataLoader(Endless(), batch_size=8)
    with pytest.raises(ValueError, match="got Endless; set num_data"):
        trainer(max_steps=1).fit(Classifier(), loader)
    module, twin = Classifier(), Classifier()
    module.num_data = 1000
    trainer(max_steps=1).fit(module, loader)
    torch.manual_seed(0)
    terms = lb.elbo(twin.model, X[:8], LABELS[:8], num_data=1000)
    assert module.seen == [(1.0, terms.loss.item())]


def test_the_rows_of_a_sampler_are_counted():
    module, twin = Classifier(), Classifier()
    trainer(max_steps=1).fit(module, DataLoader(TensorDataset(X, LABELS), batch_size=8, sampler=range(8)))
    torch.manual_seed(0)
    terms = lb.elbo(twin.model, X[:8], LABELS[:8], num_data=8)
    assert module.seen == [(1.0, terms.loss.item())]


def test_batches_of_another_kind_are_refused():
    with pytest.raises(TypeError, match=r"got dict; override split\(batch\)"):
        Classifier().split({"x": X})
    inputs, _ = Classifier().split([[X, X], LABELS])
    assert isinstance(inputs, tuple)


def test_a_missing_library_is_one_sentence(monkeypatch):
    for name in (*bridge.PACKAGES, "lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning"):
        bridge.anneal_beta(10)
