"""Training on several processes: the loop of `user_loop`, in which each process takes its rows of every batch.

`torchrun --nproc-per-node 2 -m examples.torchrun` keeps the whole network in each process (DDP), with `--shard` a part
of it (FSDP2). Without torchrun there is one process. The KL and the test figures are the same each time; the first
process prints the nll of its own rows. Noise and components are those of the global batch, the KL counts once, and a
draw is named by its seed alone. The first process writes torchrun.json and .safetensors to runs/examples. Half a
minute.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed, nn, Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import leanbayes as lb

from .user_loop import FOLDER, load_digits

METHOD = lb.Rank1(components=4, prior_std=0.3)


class Block(nn.Module):
    """A residual block; group norms, unlike batch norms, do not depend on who has which rows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x).relu())


class DigitNet(nn.Module):
    """A network of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.ModuleList([Block(32) for _ in range(2)])
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.max_pool2d(x, 2).flatten(1))


@contextmanager
def joined() -> Iterator[tuple[int, int, torch.device]]:
    """Meet the other processes; yield the rank, the number of processes and the device of this one."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    ours = not distributed.is_initialized()
    if ours and "RANK" in os.environ:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    elif ours:
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.get_rank(), distributed.get_world_size(), torch.device(device)
    if ours:
        distributed.destroy_process_group()


def sharded(bnn: nn.Module, device: torch.device) -> nn.Module:
    """Share the parameters out, block by block: whole layers or more, since what lies inside one is read together."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in bnn.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(bnn, mesh=mesh)


def gathered(model: nn.Module, net: nn.Module) -> nn.Module:
    """Return a model that is whole in every process, to predict with, draw from and save."""
    whole = lb.convert(net, METHOD)
    whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    return whole


def main(*, shard: bool = False, epochs: int = 5, folder: Path = FOLDER) -> dict[str, float]:
    x, y, x_test, y_test = load_digits()
    with joined() as (rank, world, device):
        torch.manual_seed(0)  # the same in every process: so are the network, the order of rows, and all noise
        net = DigitNet().to(device)
        bnn = lb.convert(net, METHOD)
        model = sharded(bnn, device) if shard else DistributedDataParallel(bnn)
        opt = torch.optim.Adam(lb.parameter_groups(model, lr=2e-3, posterior_lr=1e-2))
        for epoch in range(epochs):
            for batch in torch.randperm(len(x)).split(64)[:-1]:
                mine = batch[rank::world]  # row i of process r is row i * world + r of the batch
                terms = lb.elbo(model, x[mine].to(device), y[mine].to(device), num_data=len(x))
                opt.zero_grad()
                terms.loss.backward()
                opt.step()
            if rank == 0:
                print(f"epoch {epoch + 1}: nll {terms.nll.item():.3f}, kl {terms.kl.item():.0f} nats", flush=True)

        whole = gathered(model, net) if shard else bnn
        p = lb.predict(whole, x_test.to(device), samples=16)
        first = p.mean.clone()
        distributed.broadcast(first, 0)
        right = p.mean.argmax(1).cpu() == y_test
        figures = {
            "processes": world,
            "accuracy": right.float().mean().item(),
            "nll": -p.log_prob(y_test.to(device)).mean().item(),
            "first_process_is_off_by": (p.mean - first).abs().max().item(),
        }
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            lb.save(whole, folder / "torchrun.safetensors")
            (folder / "torchrun.json").write_text(json.dumps(figures))
            print(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on the processes that torchrun started.")
    parser.add_argument("--shard", action="store_true", help="share the parameters out (FSDP2)")
    main(shard=parser.parse_args().shard)
