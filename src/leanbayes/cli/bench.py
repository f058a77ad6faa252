"""`leanbayes bench`: measure the cost of each method on one network."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from leanbayes.cli.main import parse
from leanbayes.compare.experiment import maker
from leanbayes.compare.job import PLAIN
from leanbayes.core.conversion import convert
from leanbayes.evaluation import result as results
from leanbayes.evaluation.cost import measure_cost
from leanbayes.methods import all_methods, closest, method_name
from leanbayes.report.text import Table
from leanbayes.runtime._files import write_text
from leanbayes.training.devices import pick_device


@dataclass(frozen=True)
class Bench:
    """Measure the cost of each method, relative to the plain network in the same process.

    Attributes:
        net: a known name (leanbayes list nets), or your own as package.module:function.
        methods: separated by commas; "all" for every one.
        shape: of one input.
        classes: number of outputs.
        batch: rows of a batch.
        samples: draws per prediction.
        turns: number of measurements; medians are reported.
        device: auto, cpu, cuda or mps.
        out: a JSON file to write.
        json: print JSON instead of a table.
    """

    net: str = "wrn-16-2"
    methods: str = "all"
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    batch: int = 64
    samples: int = 16
    turns: int = 7
    device: str = "auto"
    out: Path | None = None
    json: bool = False


def bench(arguments: list[str]) -> int:
    """Measure costs and print them."""
    options = parse(Bench, arguments, "bench")
    found = measure(options)
    text = json.dumps(found, indent=2) + "\n"
    if options.out is not None:
        write_text(text, options.out)
    if options.json:
        sys.stdout.write(text)
        return 0
    ratios = ("extra_percent", "train_step_ratio", "predict_ratio")
    rows = []
    for name, cost in found["methods"].items():
        answer = f"{cost['passes'] * cost['predict_ratio']:.1f}"
        rows.append((name, *(f"{cost[ratio]:.2f}" for ratio in ratios), str(cost["passes"]), answer))
    heads = ("method", "extra parameters %", "training step x", "one pass x", "passes", "answer passes")
    Table(heads=heads, rows=rows).print()
    return 0


def measure(options: Bench) -> dict[str, Any]:
    """Measure the methods against the plain network on random inputs, and return a record for JSON."""
    device = pick_device(options.device)
    torch.manual_seed(0)
    plain = maker(options.net, num_outputs=options.classes, input_shape=tuple(options.shape))().to(device)
    x = torch.randn(options.batch, *options.shape, device=device)
    y = torch.randint(options.classes, (options.batch,), device=device)
    kinds = all_methods()
    given = list(kinds) if options.methods == "all" else [n for n in options.methods.split(",") if n != PLAIN]
    wanted = [method_name(name) or name for name in given]
    for name in wanted:
        if name not in kinds:
            raise ValueError(f"expected methods among {', '.join(kinds)}, got {name!r}{closest(name, kinds)}")
    counts: dict[str, Any] = {"samples": options.samples, "turns": options.turns}
    costs: dict[str, Any] = {}
    for name in wanted:
        method = kinds[name]()
        model = convert(plain, method)
        if method.targets:  # the copies of a whole network cost the same before
            method.after_training(model, (x, y))
        costs[name] = asdict(measure_cost(model, plain, x, y, **counts))
    return {
        "net": options.net,
        "batch": options.batch,
        **counts,
        "commit": results.commit(),
        "environment": results.environment(device),
        "methods": costs,
    }
