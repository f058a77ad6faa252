"""A rank-1 network that FSDP2 shards over two processes trains as one that is whole in each of them."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import leanbayes as lb

from .problem import batches, network, ROWS, shared, silenced, train
from .together import one_worker, together

pytestmark = [
    one_worker,
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()), reason="needs torch with gloo"
    ),
]

HOW = ("whole", "kept", "fabric", "freed")


def rank1():
    return lb.convert(network(), lb.Rank1(components=3))  # three rows of factors: two processes get unequal shards


def sharded(how):
    """Shard the model as a whole, or layer by layer, with weights that stay whole until backward or do not."""
    if how == "fabric":
        return sharded_by_fabric()
    return shard(rank1(), init_device_mesh("cpu", (distributed.get_world_size(),)), how)


def shard(bnn, mesh, how):
    for _, layer in lb.stochastic_layers(bnn) if how != "whole" else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=how == "freed")
    return fully_shard(bnn, mesh=mesh)


def sharded_by_fabric():
    """Let Lightning Fabric do it."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelise(bnn, mesh):
        return shard(bnn, mesh["data_parallel"], "kept")

    world = distributed.get_world_size()
    strategy = ModelParallelStrategy(parallelise, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric.setup_module(rank1()).module


def full(bnn):
    return get_model_state_dict(bnn, options=StateDictOptions(full_state_dict=True))


def refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def work(rank, world):
    found = {}
    for noise in (False, True):
        replica = rank1()
        with nullcontext() if noise else silenced(replica):
            train(shared(replica, world), rank, world)
        found[f"ddp/{noise}"] = replica.state_dict()
        for how in HOW:
            bnn = sharded(how)
            with nullcontext() if noise else lb.draws(bnn, mean=True):
                train(bnn, rank, world)
            found[f"{how}/{noise}"] = full(bnn)
    x = batches()[0][0]
    found["kl"] = lb.kl(bnn).detach()
    found["stays sharded"] = all(type(p).__name__ == "DTensor" for p in bnn.parameters())
    found["refused"] = [refusal(functools.partial(f, bnn)) for f in (lb.draw, lb.mean)]
    found["refused"].append(refusal(lambda: lb.predict(bnn, x)))
    found["refused"].append(refusal(lambda: lb.save(bnn, "never.safetensors")))
    found["elbo"] = lb.elbo(sharded("kept"), x, batches()[0][1], num_data=ROWS).loss.detach()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return together(2, work, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_shards_train_as_replicas_do(ranks, how, noise):
    for found in ranks:
        for name, tensor in found[f"ddp/{noise}"].items():
            torch.testing.assert_close(found[f"{how}/{noise}"][name], tensor, atol=1e-5, rtol=0)


def test_the_gathered_state_is_an_ordinary_model_that_predicts_and_is_saved(ranks, tmp_path):
    x, whole = batches()[0][0], rank1()
    whole.load_state_dict(ranks[0]["freed/True"])
    torch.testing.assert_close(ranks[1]["kl"], lb.kl(whole).detach())
    replica = rank1()
    replica.load_state_dict(ranks[0]["ddp/True"])
    p = lb.predict(whole, x, samples=6)
    torch.testing.assert_close(p.samples, lb.predict(replica, x, samples=6).samples, atol=1e-4, rtol=0)
    lb.save(whole, tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", network())
    assert torch.equal(lb.predict(loaded, x, samples=6).samples, p.samples)


def test_what_needs_whole_weights_says_how_to_gather_them(ranks):
    for found in ranks:
        assert found["stays sharded"]
        assert found["elbo"].isfinite()
        for sentence in found["refused"]:
            assert sentence.startswith("expected whole parameters, got shards of layer '0' (fully_shard); gather them")
