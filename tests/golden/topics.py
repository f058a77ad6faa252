"""The topic packages, in seconds: networks, recalibration, narrow networks, the phase transition, generative models.

The suites use them for longer; this part shows within a minute whether a topic changed.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn, Tensor

import leanbayes as lb
from tests.golden import digest

LARGE = 3_000_000
"""Parameters of networks of which only the shapes are recorded."""
SHAPES = {"lstm-ehr": (48, 28), "regression": (6,), "mlp": (6,), "mlp-100-100": (6,)}
"""Shapes of a row for networks that do not read images."""


def record() -> digest.Records:
    """Return the records of every topic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _models() | _recalibrate() | _evaluate() | _slim() | _phase() | _generative()


def _points(rows: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return x, x[:, :6].unflatten(1, (3, 2)).sum(2).argmax(1)


def _trained(method: object, epochs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model = lb.convert(net, method)
    recipe = lb.Recipe(epochs=epochs, batch_size=20, lr=0.05, accelerator="cpu")
    lb.fit(model, _points(), recipe, progress=False)
    return model


def _models() -> digest.Records:
    records = {}
    for name in lb.models.names():
        shape = SHAPES.get(name, (3, 32, 32))
        with torch.device("meta"):
            empty = digest.refused(
                lambda name=name, shape=shape: _shapes(lb.models.build(name, num_outputs=10, input_shape=shape))
            )
        records[f"models/{name}/shapes"] = empty
        if empty.startswith("refused") or int(empty.split()[1]) > LARGE or len(shape) == 2:
            continue
        torch.manual_seed(0)
        net = lb.models.build(name, num_outputs=10, input_shape=shape).eval()
        records[f"models/{name}/weights"] = digest.tensors(net.state_dict())
        with torch.no_grad():
            records[f"models/{name}/output"] = digest.tensors(net(torch.randn(2, *shape)))
    return records


def _shapes(net: nn.Module) -> str:
    sizes = {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
    count = sum(p.numel() for p in net.parameters())
    return f"{digest.text(str(list(sizes.items())))} {count} {count}"


def _recalibrate() -> digest.Records:
    x, y = _points()
    model = _trained(lb.Rank1(components=3))
    held, new = (lb.predict(model, x[:40], samples=6), y[:40]), lb.predict(model, x[40:], samples=6)
    records = {}
    for name, method in {"temperature": lb.recalibrate.Temperature(), "stacking": lb.recalibrate.Stacking()}.items():
        mended = method.fit(*held)(new)
        records[f"recalibrate/{name}"] = digest.tensors([mended.mean, mended.total, mended.epistemic])
    records["recalibrate/conformal"] = digest.tensors(lb.recalibrate.Conformal(level=0.8).fit(*held)(new))
    return records


def _evaluate() -> digest.Records:
    x, y = _points()
    records = {}
    for name, method in {"patch": lb.ModelPatch(components=3), "deep_ensemble": lb.DeepEnsemble(components=2)}.items():
        model = _trained(method)
        result = lb.evaluate(model, (x, y), ood={"far": (3 * x, y)}, samples=4)
        records[f"evaluate/{name}/metrics"] = digest.data(result.metrics)
        records[f"evaluate/{name}/figures"] = digest.data(result.figures)
        lb.update_norm(model, x + 1)
        records[f"update_norm/{name}"] = digest.tensors(model.state_dict())
    return records


def _slim() -> digest.Records:
    x, y = _points()
    model = _trained(lb.NestedDropout(groups=4, first=True))
    records = {}
    for width in (0.25, 3, 1.0):
        narrow = lb.slim.extract(model, width, data=x)
        records[f"slim/extract {width}"] = digest.tensors(narrow.state_dict())
        records[f"slim/narrow {width}"] = digest.tensors(lb.slim.narrow(model, width, data=x).state_dict())
    results = lb.slim.widths(model, (x, y), (0.5, 1.0), data=x, samples=3)
    records["slim/widths"] = digest.data([result.metrics for result in results])
    records["slim/usage"] = digest.data([lb.slim.usage(model, index=i) for i in range(4)])
    found = lb.slim.correlate(model, x, (0.25, 0.5, 1.0), data=x)
    records["slim/correlate"] = digest.tensors([found.uncertainty, found.matrix])
    recipe = lb.Recipe(epochs=2, batch_size=20, lr=0.05, accelerator="cpu")
    student = lb.slim.distill(model, (x, y), width=0.5, recipe=recipe, samples=2, progress=False)
    return records | {"slim/distill": digest.tensors(student.state_dict())}


def _phase() -> digest.Records:
    x, y = _points()
    model = _trained(lb.VarianceLayers(parameterization="neuron", init_log_alpha=-1.0))
    each = _trained(lb.VarianceLayers(parameterization="weight", init_log_alpha=-1.0))
    scores = lb.phase.kappa(model, (x, y))
    records = {"phase/kappa": digest.tensors(scores)}
    records["phase/accuracies"] = digest.data(lb.phase.accuracies(model, (x, y), samples=4))
    records["phase/zero_means"] = digest.tensors(lb.phase.zero_means(model).state_dict())
    records["phase/permute_scales"] = digest.tensors(lb.phase.permute_scales(model, seed=2).state_dict())
    records["phase/sparsify"] = digest.tensors(lb.phase.sparsify(model, scores, 1.0).model.state_dict())
    records["phase/prune"] = digest.tensors(lb.phase.prune(each, -1.0).model.state_dict())
    return records


def _generative() -> digest.Records:
    shape = (1, 8, 8)
    images = torch.rand(24, *shape, generator=torch.Generator().manual_seed(3))
    kinds = {
        "VAE": lambda: lb.generative.VAE(shape, beta=2.0, dimensions=6),
        "VNDAutoencoder": lambda: lb.generative.VNDAutoencoder(shape, dimensions=6),
        "JointVAE": lambda: lb.generative.JointVAE(shape, dimensions=6, categories=3),
        "SlicedWassersteinAutoencoder": lambda: lb.generative.SlicedWassersteinAutoencoder(shape, dimensions=6),
    }
    records = {}
    recipe = lb.Recipe(epochs=2, batch_size=8, lr=1e-3, optimizer="adam", accelerator="cpu")
    for name, make in kinds.items():
        torch.manual_seed(0)
        model = make()
        lb.generative.fit(model, images, recipe, progress=False)
        torch.manual_seed(1)
        records[f"generative/{name}/weights"] = digest.tensors(model.state_dict())
        records[f"generative/{name}/loss"] = digest.tensors(model(images))
        records[f"generative/{name}/explained"] = digest.data(lb.generative.explained(model, images, (2, 6)))
    return records | _masks()


def _masks() -> digest.Records:
    images = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    masks = (images[:, 0] > 0.5).long()
    records = {}
    for ordered in (False, True):
        torch.manual_seed(0)
        net = lb.generative.ProbabilisticUNet(2, (1, 8, 8), dimensions=4, ordered=ordered, widths=(4, 8))
        recipe = lb.Recipe(epochs=2, batch_size=6, lr=1e-3, optimizer="adam", accelerator="cpu")
        lb.generative.fit(net, (images, masks), recipe, progress=False)
        records[f"generative/ProbabilisticUNet/{ordered}"] = digest.tensors(net.state_dict())
    return records
