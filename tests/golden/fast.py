"""The fast part: every example of every method on six networks, from conversion to twenty steps of training."""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn, Tensor

import leanbayes as lb
from tests.golden import digest
from tests.golden.problems import batch, converted, EXAMPLES, NETWORKS

STEPS = 20

Record = Callable[[nn.Module, Tensor, Tensor], digest.Records]


def record(networks: Iterable[str] = NETWORKS, methods: Iterable[str] = EXAMPLES) -> digest.Records:
    """Return the records of every pair of a network and a method."""
    records: digest.Records = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small networks: no streams, no norms
        for name in networks:
            for method in methods:
                records |= {f"{name}/{method}/{key}": value for key, value in _pair(name, method).items()}
    return records


def _pair(name: str, method: str) -> digest.Records:
    try:
        model = converted(name, method)
    except ValueError as error:
        return {"convert": f"refused: {type(error).__name__}"}
    x, y = batch(name)
    parts: dict[str, Record] = {
        "structure": _structure, "file": _file, "posterior": _posterior, "predict": _predict,
        "pass": _pass, "objective": _objective, "training": _training,
    }  # fmt: skip
    records: digest.Records = {}
    for part, function in parts.items():
        found = function(copy.deepcopy(model), x, y)  # no part changes what another one sees
        records |= {f"{part}/{key}": value for key, value in found.items()}
    return records


def _structure(model: nn.Module, x: Tensor, y: Tensor) -> digest.Records:
    groups = lb.parameter_groups(model, lr=0.1, posterior_lr=0.2, weight_decay=0.01, no_decay="*bias")
    names = {id(p): name for name, p in model.named_parameters()}
    plain = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in groups]
    return {
        "class": type(model).__name__,
        "state_dict_keys": digest.text("\n".join(model.state_dict())),
        "state_dict": digest.tensors(model.state_dict()),
        "stochastic_layers": digest.text("\n".join(name for name, _ in lb.stochastic_layers(model))),
        "summary": digest.text(str(lb.summary(model))),
        "parameter_groups": digest.data(plain),
    }


def _file(model: nn.Module, x: Tensor, y: Tensor) -> digest.Records:
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for only in ("all", "posterior"):
            try:
                lb.save(model, path, only=only, extra={"note": "golden"})
            except ValueError as error:  # a deep ensemble has no posterior apart from its weights
                records[only] = f"refused: {type(error).__name__}"
                continue
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                metadata = dict(file.metadata())
            header = json.loads(metadata.pop("leanbayes"))
            header.pop("versions")
            records |= {only: digest.tensors(tensors), f"{only} header": digest.data([header, metadata])}
    return records


def _posterior(model: nn.Module, x: Tensor, y: Tensor) -> digest.Records:
    draws = ((0, 0), (0, 3), (7, 1))
    records = {f"draw {seed} {i}": digest.tensors(lb.draw(model, seed=seed, index=i).state_dict()) for seed, i in draws}
    records["mean"] = digest.refused(lambda: digest.tensors(lb.mean(model).state_dict()))
    records["mean of component 1"] = digest.refused(lambda: digest.tensors(lb.mean(model, component=1).state_dict()))
    records["kl"] = digest.tensors(lb.kl(model))
    return records


def _predict(model: nn.Module, x: Tensor, y: Tensor) -> digest.Records:
    records = {}
    for size in (None, 4):
        p = lb.predict(model, x, samples=6, seed=5, chunk_size=size)
        assert p.samples is not None
        records[f"chunks of {size}"] = digest.tensors([p.samples, p.mean, p.total, p.aleatoric, p.epistemic])
    torch.manual_seed(11)
    p = lb.predict(model, x, samples=3, noise="activation", keep_samples=False)
    records["activation"] = digest.tensors([p.mean, p.total, p.aleatoric, p.epistemic])
    records["generator"] = digest.tensors(torch.get_rng_state())
    return records


def _pass(model: nn.Module, x: Tensor, y: Tensor) -> digest.Records:
    torch.manual_seed(4)
    output = model(x)
    records = {"generator": digest.tensors(torch.get_rng_state()), "output": digest.tensors(output)}
    (nn.functional.cross_entropy(output, y) + lb.kl(model) / 100).backward()
    records["gradients"] = digest.tensors({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    with torch.no_grad(), lb.draws(model.eval(), seed=9, index=2, shared=False):
        records["rows of a seed"] = digest.tensors(model(x))
    records["mean"] = digest.refused(lambda: _of_means(model, x))
    return records


def _of_means(model: nn.Module, x: Tensor) -> str:
    with torch.no_grad(), lb.draws(model, mean=True):
        return digest.tensors(model(x))


def _objective(model: nn.Module, x: Tensor, y: Tensor) -> digest.Records:
    records = {}
    ways = {"tile": {"tile": True}, "mixture of 2": {"samples": 2, "aggregate": "mixture"}, "2": {"samples": 2}}
    for label, way in ways.items():
        torch.manual_seed(6)
        terms = lb.elbo(model, x, y, lb.Categorical(), num_data=100, beta=0.5, **way)
        records[label] = digest.tensors([terms.nll, terms.kl, terms.loss, terms.outputs])
    return records


def _training(model: nn.Module, x: Tensor, y: Tensor) -> digest.Records:
    torch.manual_seed(8)
    optimizer = torch.optim.Adam(lb.parameter_groups(model, lr=0.01, posterior_lr=0.02), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = lb.elbo(model, x, y, num_data=100).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    generator = torch.get_rng_state()
    prediction = lb.predict(model, x, samples=4, seed=1)  # the posterior has left its start
    return {
        "losses": digest.tensors(torch.stack(losses)),
        "weights": digest.tensors(model.state_dict()),
        "generator": digest.tensors(generator),
        "kl": digest.tensors(lb.kl(model)),
        "draw": digest.tensors(lb.draw(model, seed=2, index=1).state_dict()),
        "predict": digest.tensors([prediction.mean, prediction.epistemic]),
    }
