"""Converted models under Lightning's Trainer: a mixin with the steps, and a callback that anneals the KL.

The mixin imports nothing, so it works with `lightning.pytorch` and `pytorch_lightning`:

    class Classifier(ElboSteps, LightningModule):
        def __init__(self, net):
            super().__init__()
            self.model = lb.convert(net, lb.Rank1(components=4))

    Trainer(max_epochs=10, callbacks=[anneal_beta(1000)]).fit(Classifier(net), train_loader, valid_loader)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import own_likelihood
from leanbayes.core.objective import elbo, linear_beta, parameter_groups, targets_per_row
from leanbayes.core.predictor import predict
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.runtime.batches import Inputs
from leanbayes.training.data import rows_of
from leanbayes.training.devices import first_installed

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Names of the library. The two do not mix, so a package that is already imported comes first."""


class ElboSteps:
    """Steps of a `LightningModule`; name it before `LightningModule` among the bases.

    The training loss is that of `lb.elbo`, nll + beta * KL / N, with the likelihood given to `lb.convert`. Override a
    method for another optimiser or another kind of batch.

    Attributes:
        model: a converted model, set in `__init__`.
        num_data: rows of the data of all processes; None counts those of the training loader. N is the number of
            targets: rows, times labels or pixels if the likelihood averages over these.
        beta: weight of the KL; see `anneal_beta`.
        lr: learning rate of the shared weights.
        posterior_lr: learning rate of the posterior; None is `lr`.
        weight_decay: of the shared weights alone.
        samples: draws per validation step.
    """

    model: nn.Module
    trainer: Any
    log_dict: Callable[..., None]

    num_data: int | None = None
    beta: float = 1.0
    lr: float = 1e-3
    posterior_lr: float | None = None
    weight_decay: float = 0.0
    samples: int = 4

    def split(self, batch: Any) -> tuple[Inputs, Tensor]:
        """Return inputs and target of a batch; a list of several inputs becomes a tuple."""
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise TypeError(f"expected batches (inputs, target), got {type(batch).__name__}; override split(batch)")
        x, y = batch
        return (tuple(x) if isinstance(x, list) else x), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.split(batch)
        likelihood = own_likelihood(self.model) or Categorical()
        num_data = (self.num_data or self._count()) * targets_per_row(likelihood, y)
        terms = elbo(self.model, x, y, likelihood, num_data=num_data, beta=self.beta)
        self.log_dict({"train_nll": terms.nll.detach(), "train_kl": terms.kl.detach()}, batch_size=len(y))
        return terms.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log valid_nll, valid_epistemic and, for classes, valid_accuracy."""
        x, y = self.split(batch)
        p = predict(self.model, x, samples=self.samples)
        figures = {"valid_nll": -p.likelihood.average(p.log_prob(y), y), "valid_epistemic": p.epistemic.mean()}
        if isinstance(p.likelihood, Categorical):
            counted = y.long() != p.likelihood.ignore_index
            figures["valid_accuracy"] = p.mean.argmax(1).eq(y)[counted].float().mean()
        self.log_dict(figures, batch_size=len(y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW over `lb.parameter_groups`: the posterior has its own rate and no decay."""
        groups = parameter_groups(
            self.model, lr=self.lr, posterior_lr=self.posterior_lr, weight_decay=self.weight_decay
        )
        return torch.optim.AdamW(groups, lr=self.lr)

    def _count(self) -> int:
        loader = self.trainer.train_dataloader
        data = getattr(loader, "dataset", None)
        if not isinstance(data, Sized):
            raise ValueError(
                f"expected a training loader whose data set has a length, got {type(data).__name__}; set num_data to "
                "the number of data points"
            )
        return rows_of(loader) if isinstance(loader, DataLoader) else len(data)


def anneal_beta(steps: int, *, start: float = 0.0, end: float = 1.0) -> Any:
    """Return a Lightning callback that raises `beta` linearly over a number of optimiser steps.

    It works with `ElboSteps`, and with any module whose loss reads `self.beta`.
    """

    def set_beta(trainer: Any, module: Any, *batch: Any) -> None:
        module.beta = linear_beta(trainer.global_step, steps, start=start, end=end)

    packages = sorted(PACKAGES, key=lambda name: name not in sys.modules)
    library = first_installed(packages, "anneal_beta needs Lightning: pip install lightning")
    return library.callbacks.LambdaCallback(on_train_batch_start=set_beta)
