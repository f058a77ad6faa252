"""`leanbayes bench`: the cost of every method on one network, as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from leanbayes.compare.experiment import maker
from leanbayes.compare.job import PLAIN
from leanbayes.compare.run import device_of
from leanbayes.core.conversion import convert
from leanbayes.evaluation import result as results
from leanbayes.evaluation.cost import measure_cost
from leanbayes.methods import all_methods


def measure(  # noqa: PLR0913
    *,
    net: str,
    methods: str,
    shape: tuple[int, ...],
    classes: int,
    batch: int,
    samples: int,
    turns: int,
    device: str,
) -> dict[str, Any]:
    """Measure the methods against the plain network on random inputs, as JSON holds it."""
    place = device_of(device)
    torch.manual_seed(0)
    plain = maker(net, num_outputs=classes, input_shape=tuple(shape))().to(place)
    x, y = torch.randn(batch, *shape, device=place), torch.randint(classes, (batch,), device=place)
    kinds = all_methods()
    wanted = list(kinds) if methods == "all" else [name for name in methods.split(",") if name != PLAIN]
    for name in wanted:
        if name not in kinds:
            raise ValueError(f"expected methods among {', '.join(kinds)}, got {name!r}")
    costs = {
        name: asdict(measure_cost(convert(plain, kinds[name]()), plain, x, y, samples=samples, turns=turns))
        for name in wanted
    }
    return {
        "net": net,
        "batch": batch,
        "samples": samples,
        "turns": turns,
        "commit": results.commit(),
        "environment": results.environment(place),
        "methods": costs,
    }
