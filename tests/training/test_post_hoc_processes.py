"""Posteriors that come after the training: two processes compute those of one, from their own rows each."""

from __future__ import annotations

import torch

import leanbayes as lb
from leanbayes.training.fit import fit
from tests.distributed.together import one_worker, together

from .problems import images, network, short

METHODS = {
    "laplace": lb.LastLayerLaplace(prior_precision=1.0),
    "kronecker": lb.LastLayerLaplace(full_up_to=0),
    "swag": lb.SWAG(components=2, rank=2),
}


def train(devices):
    """Return the trained state of every method, with and without batch norms."""
    states = {}
    for norm in (False, True):
        for name, method in METHODS.items():
            model = lb.convert(network(norm=norm), method)
            fit(model, images(90), short(devices=devices), progress=False)
            states[f"{name} {norm}"] = dict(model.state_dict())
    return states


def work(rank, world):
    return train(world)


@one_worker
def test_two_processes_compute_the_posterior_of_one(tmp_path):
    alone, ranks = train(1), together(2, work, tmp_path)
    for label, state in alone.items():
        for name, tensor in state.items():
            assert torch.equal(ranks[0][label][name], ranks[1][label][name]), f"{label}: {name}"
            if label.endswith("False") and "left" not in name and "right" not in name:  # signs of eigenvectors are free
                torch.testing.assert_close(ranks[0][label][name], tensor, atol=1e-4, rtol=1e-3)
