"""The same for one, two and four processes: a network, global batches, and a training loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.methods import all_methods

STEPS, ROWS = 5, 16
"""Four rows for each of four processes: one for each of four components, which DDP wants to have seen all."""


def network() -> nn.Sequential:
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


class Checkpointed(nn.Module):
    """The same network with dropout, whose middle is computed again in backward instead of being kept."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        layers = list(network())
        self.net, self.reentrant = nn.Sequential(*layers[:3], nn.Dropout(0.3), *layers[3:]), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.net(x)
        middle = checkpoint(self.net[1:7], self.net[0](x), use_reentrant=self.reentrant)
        return self.net[7](middle)


def converted(name: str) -> nn.Module:
    """Make the network stochastic; doubles leave no room for rounding."""
    return lb.convert(network().double(), all_methods()[name]())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return the global batches."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 1, 6, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator))
        for _ in range(STEPS)
    ]


def silenced(bnn: nn.Module) -> AbstractContextManager[Any]:
    """Turn noise off: passes use the means of the posteriors. Ensembles have neither noise nor KL: they stay."""
    return lb.draws(bnn, mean=True) if lb.kl(bnn) > 0 else nullcontext()


def train(model: nn.Module, rank: int, world: int) -> lb.ElboTerms:
    """Make a momentum step on this process's rows of each global batch; rows are assigned in turn."""
    groups = lb.parameter_groups(model, lr=0.05, posterior_lr=0.1, weight_decay=1e-3)
    optimiser = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    torch.manual_seed(7)  # the same in every process, as most scripts do
    dtype = next(model.parameters()).dtype
    for x, y in batches():
        terms = lb.elbo(model, x[rank::world].to(dtype), y[rank::world], num_data=ROWS * STEPS)
        optimiser.zero_grad()
        terms.loss.backward()
        optimiser.step()
    return terms


def shared(bnn: nn.Module, world: int, **options: Any) -> nn.Module:
    """Return what averages the gradients of several processes."""
    return DistributedDataParallel(bnn, **options) if world > 1 else bnn


def trained(name: str, rank: int, world: int, *, noise: bool) -> dict[str, Tensor]:
    """Train a method, and return its parameters, its last outputs, the gradient of the KL alone, and named draws."""
    bnn = converted(name)
    model = shared(bnn, world)
    with nullcontext() if noise else silenced(bnn):
        outputs = train(model, rank, world).outputs.detach()
        found = {"outputs": outputs, "kl_gradient": kl_gradient(model, bnn)}
    found |= {f"parameter/{path}": p.detach() for path, p in bnn.named_parameters()}
    return found | (drawn(model) if noise else {})


def kl_gradient(model: nn.Module, bnn: nn.Module) -> Tensor:
    """Return the gradient of the KL alone, as an optimiser of this process sees it."""
    bnn.zero_grad()
    (0 * model(batches()[0][0].double()).sum() + lb.kl(model)).backward()
    return torch.cat([p.grad.flatten() for p in bnn.parameters()])


def drawn(model: nn.Module) -> dict[str, Tensor]:
    """Return draws of one name: a network's weights, and samples of a prediction."""
    x = batches()[0][0].double()
    plain = lb.draw(model, seed=3, index=1).state_dict()
    samples = lb.predict(model, x, samples=5, seed=3).samples
    return {"draw/samples": samples} | {f"draw/{path}": tensor for path, tensor in plain.items()}


def gradients(name: str, rank: int, world: int, *, count: int, seed: int) -> Tensor:
    """Return the gradients of many draws (count, parameters), each parameter's projected on a fixed direction."""
    bnn = lb.convert(network(), all_methods()[name]())
    model = shared(bnn, world)
    generator = torch.Generator().manual_seed(4)
    directions = [torch.randn(p.shape, generator=generator) for p in bnn.parameters()]
    x, y = batches()[0]
    torch.manual_seed(seed)
    rows = []
    for _ in range(count):
        bnn.zero_grad()
        lb.elbo(model, x[rank::world], y[rank::world], num_data=ROWS).loss.backward()
        rows.append([(p.grad * d).sum().item() for p, d in zip(bnn.parameters(), directions, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)
