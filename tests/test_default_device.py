"""Whatever torch's default device and dtype are, numbers are made where they belong, and are the same.

The default is set to "meta", whose tensors hold nothing: whatever is made there by mistake cannot meet a number of the
CPU. A default of "cuda" fails in the same places, where there is such a device.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.data.annotated.images import draw_annotators
from leanbayes.data.holdout import fold_of, held_out
from leanbayes.distributions.law import LAWS
from leanbayes.distributions.random import standard
from leanbayes.methods import all_methods
from leanbayes.shift._pixels import Streams
from leanbayes.training.distillation import perturb

EXAMPLES = {f"{name}:{label}": m for name, kind in all_methods().items() for label, m in kind.examples().items()}


@pytest.fixture
def elsewhere():
    """Return a function that sets the default device; in the end there is none, or torch would not take fused paths."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def network() -> nn.Module:
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(6 * 36, 12), nn.LayerNorm(12), nn.Linear(12, 3))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8) % 3


def outcome(net, method, x, y):
    """Convert, predict and draw, with what torch's generator gives."""
    torch.manual_seed(2)
    bnn = lb.convert(net, method)
    predicted = lb.predict(bnn, x, samples=4, seed=1)
    drawn = None if method.targets == () else lb.draw(bnn, seed=1).eval()(x)
    terms = None if method.targets == () else lb.elbo(bnn, x, y, lb.Categorical(), num_data=8)
    return bnn, predicted, drawn, terms


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_same_numbers_as_under_the_usual_default(example, elsewhere):
    net, (x, y), method = network(), rows(), EXAMPLES[example]
    _, expected, drawn, terms = outcome(net, method, x, y)
    elsewhere()
    bnn, found, drawn_there, terms_there = outcome(net, method, x, y)
    assert all(tensor.device.type == "cpu" for tensor in [*bnn.parameters(), *bnn.buffers()])
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.epistemic, expected.epistemic)
    if drawn is not None:
        assert torch.equal(drawn_there, drawn)
        assert torch.equal(terms_there.loss, terms.loss)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("method", [lb.Rank1(components=2), lb.MCDropout(rate=0.1)], ids=["rank1", "mc_dropout"])
def test_fit_and_evaluate(method, elsewhere, tmp_path):
    net, (x, y) = network(), rows()
    recipe = lb.Recipe(epochs=1, batch_size=4, accelerator="cpu")
    usual = lb.convert(net, method)
    torch.manual_seed(2)
    there = lb.convert(net, method)
    there.load_state_dict(usual.state_dict())
    lb.fit(usual, (x, y), recipe, progress=False)
    elsewhere()
    lb.fit(there, (x, y), recipe, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(usual.parameters(), there.parameters(), strict=True))
    assert lb.evaluate(there, (x, y), samples=2).metrics["test"]["nll"] > 0
    lb.save(there, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors", net)
    assert torch.equal(lb.predict(again, x, samples=2).mean, lb.predict(there, x, samples=2).mean)


def test_draws_are_made_on_the_device_of_their_generator(elsewhere):
    elsewhere()
    generator = torch.Generator().manual_seed(0)
    assert standard("seed", (3, 1), torch.device("cpu"), generator).device.type == "cpu"
    for law in LAWS.values():
        assert standard(law.noise, (2, 3), torch.device("meta"), generator).device.type == "cpu"
    streams = Streams(0, "fog", range(2), torch.device("cpu"))
    assert streams.normal(3).device.type == streams.uniform(3).device.type == "cpu"
    counts = torch.tensor([2, 3], device="cpu")
    assert draw_annotators(counts, generator).device.type == "cpu"


def test_data_are_on_the_cpu(elsewhere):
    elsewhere()
    digits = lb.data.load("digits")
    x, y = digits.prepared(digits.test)
    made = lb.data.ambiguous_images(train=2, val=1, test=1)
    foreign = [lb.data.ood(name, digits) for name in ("noise", "shuffled", "inverted", "fashion-demo")]
    for tensor in (x, y, made.images, made.annotations, made.annotators, *foreign):
        assert tensor.device.type == "cpu"
        assert bool(torch.isfinite(tensor.float()).all())


def nested() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    return lb.convert(net, lb.NestedDropout(groups=4))


def made_by_topics(bnn, autoencoders, unet) -> list[torch.Tensor]:
    """Return numbers of every topic package, for inputs on the CPU."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, generator=generator, device="cpu")
    images = torch.rand(2, 3, 32, 32, generator=generator, device="cpu")
    y = torch.arange(12, device="cpu") % 3
    recipe, p = lb.Recipe(epochs=1, batch_size=4, accelerator="cpu"), lb.predict(bnn, x, samples=4)
    student = lb.slim.distill(bnn, (x, y), width=0.5, recipe=recipe, progress=False)
    return [
        *(lb.shift.corrupt(images, name, 3) for name in lb.shift.all_names()),
        lb.shift.attack(bnn, x, y, lb.shift.pgd(0.1, 2, samples=2), target="random").inputs,
        lb.shift.pixel_units([0.5], [0.2]).place(1, x[:, :1, None, None]),
        *lb.slim.extract(bnn, 0.5).parameters(),
        lb.slim.correlate(bnn, x, [0.5, 1.0], samples=2).matrix,
        lb.predict(student, x, samples=2).mean,
        *lb.phase.kappa(lb.convert(lb.mean(bnn), lb.VarianceLayers()), (x, y)).values(),
        *(model.sample(2, seed=0) for model in autoencoders),
        *(model.reconstruct(images[:, :1, :16, :16], length=2) for model in autoencoders),
        torch.tensor(lb.generative.explained(autoencoders[0], images[:, :1, :16, :16], [1, 2]), device="cpu"),
        unet.predict(images[:, :1, :16, :16], samples=2).mean,
        lb.recalibrate.Temperature().fit(p, y)(p).mean,
        lb.metrics.inception_score(p.mean, 2).mean,
        *lb.predict(bnn, x, samples=8, tolerance=0.1).draws,
        held_out(y, 0.25, 0),
        fold_of(y, 3, 0),
        perturb(images, torch.Generator().manual_seed(0)),
    ]


@pytest.mark.filterwarnings("ignore:.*")
def test_topic_packages_make_the_same_numbers(elsewhere):
    torch.manual_seed(0)
    kinds = lb.generative.VAE, lb.generative.VNDAutoencoder, lb.generative.JointVAE
    autoencoders = [kind((1, 16, 16), dimensions=4) for kind in kinds]
    unet = lb.generative.ProbabilisticUNet(2, (1, 16, 16), widths=(4, 8), ordered=True)
    bnn = nested()
    expected = made_by_topics(bnn, autoencoders, unet)
    elsewhere()
    found = made_by_topics(bnn, autoencoders, unet)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    rows = torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(0), device="cpu")
    recipe = lb.Recipe(epochs=1, optimizer="adam", lr=1e-3, accelerator="cpu")
    assert lb.generative.fit(autoencoders[0], rows, recipe, progress=False)[-1]["loss"] > 0


@pytest.fixture
def double():
    """Return a function that sets the default dtype to float64; in the end it is float32."""
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def of_other_dtypes(autoencoders, unet, digits, x) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(2, 3, 32, 40, generator=generator, dtype=torch.float32)
    return [
        *(lb.shift.corrupt(images, name, 3) for name in lb.shift.all_names()),
        *(lb.shift.corrupt(images, name, 3, scale="imagenet") for name in ("defocus_blur", "snow")),
        lb.shift.pgd(0.1).begin(x),
        lb.shift.pgd(0.1, norm="l2").begin(x),
        *(model.sample(2, seed=0) for model in autoencoders),
        unet.sample(images[:, :1, :16, :16], 2),
        *(lb.data.ood(name, digits) for name in ("noise", "shuffled")),
    ]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_seed_gives_the_same_draws_under_another_default_dtype(example, double):
    x, _ = rows()
    bnn = lb.convert(network(), EXAMPLES[example])
    expected = lb.predict(bnn, x, samples=4, seed=1)
    double()
    found = lb.predict(bnn, x, samples=4, seed=1)
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.samples, expected.samples, rtol=1e-4, atol=1e-5)


def test_noise_is_the_same_under_another_default_dtype(double):
    torch.manual_seed(0)
    kinds = lb.generative.VAE, lb.generative.VNDAutoencoder, lb.generative.JointVAE
    autoencoders = [kind((1, 16, 16), dimensions=4) for kind in kinds]
    unet = lb.generative.ProbabilisticUNet(2, (1, 16, 16), widths=(4, 8), ordered=True)
    digits, x = lb.data.load("digits"), torch.randn(3, 5)
    expected = of_other_dtypes(autoencoders, unet, digits, x)
    double()
    found = of_other_dtypes(autoencoders, unet, digits, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert all(model.double().sample(2, seed=0).dtype == torch.float64 for model in autoencoders)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("example", EXAMPLES)
def test_what_a_conversion_adds_is_where_the_network_is(example):
    """A network on a GPU is converted there; "meta" stands for it. A layer without numbers can be drawn, too."""
    bnn = lb.convert(network().to("meta"), EXAMPLES[example])
    assert all(tensor.is_meta for tensor in [*bnn.parameters(), *bnn.buffers()])
    plain = [lb.draw(bnn), lb.mean(bnn, component=0)]
    assert all(tensor.is_meta for one in plain for tensor in [*one.parameters(), *one.buffers()])
    assert lb.kl(bnn).is_meta
    assert lb.summary(bnn).parameters == lb.summary(lb.convert(network(), EXAMPLES[example])).parameters
