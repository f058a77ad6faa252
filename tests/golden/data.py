"""Loaded data sets, all corruptions of three images, and every kind of attack."""

from __future__ import annotations

import torch
from torch import nn, Tensor

import leanbayes as lb
from tests.golden import digest
from tests.golden.names import ood_inputs

SPLITS = {"digits": 2, "uci-yacht": 3, "uci-boston": 19}
"""Further splits of sets that have several."""
OOD = ("noise", "shuffled", "inverted", "notmnist", "svhn")


def record() -> digest.Records:
    """Return the records of the sets that are here, of corruptions and of attacks."""
    return _sets() | _ood() | _annotated() | _corruptions() | _attacks()


def _sets() -> digest.Records:
    records: digest.Records = {}
    for name in lb.data.names():
        try:
            sets = {0: lb.data.load(name)}
        except FileNotFoundError:
            records[f"set/{name}"] = "not here"
            continue
        except ValueError:  # a set without training rows serves as out-of-distribution inputs
            records[f"set/{name}"] = "refused: ValueError"
            continue
        if name in SPLITS:
            sets[SPLITS[name]] = lb.data.load(name, split=SPLITS[name])
        for split, data in sets.items():
            parts = {"train": data.train, "test": data.test, **data.further}
            key = f"set/{name}/{split}"
            records |= {f"{key}/{part}": digest.tensors([rows.x, rows.y]) for part, rows in parts.items()}
            described = [data.name, data.task, data.sha256, data.augment, data.kind, data.classes, data.vocabulary]
            records[f"{key}/description"] = digest.data(described)
            records[f"{key}/inputs"] = digest.tensors(data.inputs(data.test.x[:3]))
    return records


def _ood() -> digest.Records:
    digits, yacht = lb.data.load("digits"), lb.data.load("uci-yacht")
    records = {f"ood/digits/{name}": digest.tensors(ood_inputs(name, digits)) for name in OOD}
    return records | {f"ood/uci-yacht/{name}": digest.tensors(ood_inputs(name, yacht)) for name in OOD[:3]}


def _annotated() -> digest.Records:
    records: digest.Records = {}
    sets = {"ambiguous": lambda: lb.data.ambiguous_images(train=20, val=5, test=5, seed=3)}
    sets |= {row.name: (lambda name=row.name: lb.data.load_annotated(name)) for row in lb.data.describe_annotated()}
    for name, load in sets.items():
        try:
            data = load()
        except FileNotFoundError:
            records[f"annotated/{name}"] = "not here"
            continue
        records[f"annotated/{name}"] = digest.tensors([data.images, data.annotations, data.annotators])
        records[f"annotated/{name}/inputs"] = digest.tensors(data.inputs(data.images[:3]))
        records[f"annotated/{name}/splits"] = digest.data([data.name, data.classes, dict(data.splits), data.sha256])
    return records


def _corruptions() -> digest.Records:
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(3, 3, 8, 8, generator=generator)
    digits = lb.data.load("digits").test.x[:3]
    images = {
        "digits": lb.shift.enlarge(digits),
        "colours": lb.shift.enlarge(small, 48),
        "bytes": (255 * lb.shift.enlarge(small, 32)).byte(),
    }
    records = {f"corrupt/{kind}": digest.tensors(clean) for kind, clean in images.items()}
    for kind, clean in images.items():
        for name in lb.shift.all_names():
            made = [lb.shift.corrupt(clean, name, severity, seed=4) for severity in range(1, 6)]
            records[f"corrupt/{kind}/{name}"] = digest.tensors(made)
    return records


def _attacks() -> digest.Records:
    x, y = _points()
    units = lb.shift.pixel_units([0.5], [0.25])
    attacks = {
        "fgsm": lb.shift.fgsm(0.1, samples=4),
        "fgsm in pixels": lb.shift.fgsm(8, units=units, bounds=(0, 255), samples=4),
        "fast_sign": lb.shift.fast_sign(3, 0.05, samples=4, noise="activation"),
        "fast_sign through a draw": lb.shift.fast_sign(3, 0.05, through="draw", fresh=False, samples=4),
        "pgd": lb.shift.pgd(0.2, 3, samples=4, seed=1),
        "pgd l2": lb.shift.pgd(0.5, 3, norm="l2", samples=4, batch_size=5),
    }
    methods = {"rank1": lb.Rank1(components=2), "variance": lb.VarianceLayers(init_log_alpha=-1.0), "plain": None}
    records = {}
    for method, how in methods.items():
        model = _network(how)
        for name, attack in attacks.items():
            for target in (None, "random", "least_likely"):
                torch.manual_seed(0)
                found = lb.shift.attack(model, x, y, attack, target=target)
                history = [list(entry) for entry in found.history]
                goal = torch.zeros(0) if found.target is None else found.target
                key = f"attack/{method}/{name}/{target}"
                records[f"{key}/inputs"] = digest.tensors([found.inputs, found.prediction.mean, goal])
                records[f"{key}/history"] = digest.data(history)
    return records


def _points() -> tuple[Tensor, Tensor]:
    x = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(5)) * 2 - 1
    return x, x.flatten(1)[:, :15].unflatten(1, (3, 5)).sum(2).argmax(1)


def _network(method: lb.Rank1 | lb.VarianceLayers | None) -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model = net.eval() if method is None else lb.convert(net, method)
    lb.fit(model, _points(), lb.Recipe(epochs=5, batch_size=6, lr=0.05, accelerator="cpu"), progress=False)
    return model
