"""Two processes (gloo): with noise off they equal one process; with noise on they differ; the KL counts once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import leanbayes as lb
from leanbayes.methods import all_methods

STEPS, ROWS, WORLD = 20, 8, 2


def network() -> nn.Module:
    """Make a network without batch statistics; the same one everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 1, 6, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator))
        for _ in range(STEPS)
    ]


def train(name: str, rank: int, world: int, noise: bool) -> dict[str, torch.Tensor]:
    """Train for a few momentum steps on this process's rows of the global batches, dealt out in turn."""
    bnn = lb.convert(network(), all_methods()[name]())
    model = DistributedDataParallel(bnn) if world > 1 else bnn
    optimiser = torch.optim.SGD(lb.parameter_groups(bnn, lr=0.05, posterior_lr=0.1), lr=0.05, momentum=0.9)
    torch.manual_seed(7)  # the same on every process, as most scripts do
    # BatchEnsemble has no noise: its members stay. The others train the network of posterior means.
    off = lb.draws(bnn, mean=True) if not noise and lb.kl(bnn) > 0 else lb.draws(nn.Identity())
    with off:
        for x, y in batches():
            terms = lb.elbo(model, x[rank::world], y[rank::world], num_data=ROWS * STEPS)
            optimiser.zero_grad()
            terms.loss.backward()
            optimiser.step()
    outputs = {"outputs": terms.outputs.detach(), "kl_gradient": kl_gradient(model, bnn)}
    return {name: p.detach() for name, p in bnn.named_parameters()} | outputs


def kl_gradient(model: nn.Module, bnn: nn.Module) -> torch.Tensor:
    """Return the gradient of the KL alone, as an optimiser of this process sees it."""
    bnn.zero_grad()
    (0 * model(batches()[0][0]).sum() + lb.kl(model)).backward()
    return torch.cat([p.grad.flatten() for p in bnn.parameters()])


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    results = {f"{name}/{noise}": train(name, rank, WORLD, noise) for name in all_methods() for noise in (False, True)}
    torch.save(results, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def compare(a, b, **tolerance):
    for name in a:
        if name != "outputs":
            torch.testing.assert_close(a[name], b[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", all_methods())
def test_with_noise_off_two_processes_equal_one_on_the_same_global_batch(ranks, name):
    one = train(name, 0, 1, noise=False)
    for rank in range(WORLD):
        compare(ranks[rank][f"{name}/False"], one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", all_methods())
def test_with_noise_on_processes_agree_in_parameters_and_differ_in_noise(ranks, name):
    first, second = (ranks[rank][f"{name}/True"] for rank in range(WORLD))
    compare(first, second, atol=0, rtol=0)
    assert not torch.allclose(first["outputs"], second["outputs"])


@pytest.mark.parametrize("name", all_methods())
def test_rows_have_the_noise_that_one_process_gives_them(ranks, name):
    one = train(name, 0, 1, noise=True)
    compare(ranks[0][f"{name}/True"], one, atol=1e-5, rtol=1e-4)
