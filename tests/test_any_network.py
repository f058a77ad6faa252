"""Networks that were not written for leanbayes: every method converts them unchanged, trains, predicts and draws.

`REFUSED` lists the refusals of each method with their words; a pair that is neither converted nor listed fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods import all_methods
from leanbayes.runtime.batches import call
from tests.needs import need_transformers

B, T, WORDS, CLASSES = 6, 7, 30, 3


# Networks


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, a norm and two Linears over channels that lie last, scaled by a vector of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(nn.functional.gelu(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patches, two stages with a step between them, and an average."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.stages = nn.Sequential(ConvNeXtBlock(8), nn.Conv2d(8, 12, 2, stride=2), ConvNeXtBlock(12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x)).mean((2, 3))))


class SqueezeExcite(nn.Module):
    """Weighs channels by what all pixels together say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * self.expand(nn.functional.silu(self.reduce(pooled))).sigmoid()


class MBConv(nn.Module):
    """An inverted residual of EfficientNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            SqueezeExcite(wide), nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.residual = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class EfficientNet(nn.Module):
    """Three inverted residuals between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.blocks = nn.Sequential(MBConv(8, 8, 1), MBConv(8, 12, 2), MBConv(12, 12, 1))
        self.top = nn.Sequential(nn.Conv2d(12, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.top(self.blocks(self.stem(x))))


class CalledTwice(nn.Module):
    """One layer, called twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.step, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x).tanh()
        return self.head(self.step(self.step(h).tanh()).tanh())


class TwoNames(nn.Module):
    """One encoder for both inputs, known by two names; and a graph of layers that join."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8))
        self.right = self.left
        self.merge, self.skip = nn.Linear(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.left(a), self.right(b)
        return self.head((self.merge(torch.cat([left, right], 1)) + self.skip(left * right)).relu())


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = need_transformers().BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=CLASSES, **sizes)
    return need_transformers().BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    # Without the cache of keys and values, which members of an explicit ensemble cannot put together.
    config = need_transformers().GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return need_transformers().GPT2LMHeadModel(config)


def vit() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = need_transformers().ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **sizes)
    return need_transformers().ViTForImageClassification(config)


def classes(*shape: int) -> Tensor:
    return torch.randint(CLASSES, (B, *shape))


def tokens() -> Tensor:
    return torch.randint(1, WORDS, (B, T))


def padded() -> dict[str, Tensor]:
    words = tokens()
    words[0, 4:] = 0
    return {"input_ids": words, "attention_mask": (words > 0).long()}


@dataclass(frozen=True)
class Case:
    """A network, a batch of inputs and targets, and where its logits are if not in the usual place."""

    make: Callable[[], nn.Module]
    x: Callable[[], Any]
    y: Callable[[], Tensor]
    output: Callable[[Any], Tensor] | None = None


CASES = {
    "bert": Case(bert, padded, classes),
    "gpt2": Case(gpt2, lambda: {"input_ids": tokens()}, tokens, lambda out: out.logits.transpose(1, 2)),
    "vit": Case(vit, lambda: {"pixel_values": torch.randn(B, 3, 8, 8)}, classes),
    "convnext": Case(ConvNeXt, lambda: torch.randn(B, 3, 8, 8), classes),
    "efficientnet": Case(EfficientNet, lambda: torch.randn(B, 3, 8, 8), classes),
    "unet": Case(
        lambda: lb.models.UNet(CLASSES, (3, 8, 8), widths=(4, 8)),
        lambda: torch.randn(B, 3, 8, 8),
        lambda: classes(8, 8),
    ),
    "called twice": Case(CalledTwice, lambda: torch.randn(B, 5), classes),
    "two names": Case(TwoNames, lambda: (torch.randn(B, 5), torch.randn(B, 5)), classes),
}

REFUSED = {
    ("called twice", "nested"): r"can cut 10% of the weights, but the narrowest width would remove 0\.0%",
}
"""Pairs that `convert` refuses, with how it says so."""

ALIKE = {"gpt2", "vit"}
"""Networks with parameters that only their own class initialises: an explicit ensemble of copies warns of them."""

PAIRS = [(network, method) for network in CASES for method, kind in all_methods().items() if not kind.post_hoc]
pairs = pytest.mark.parametrize(("network", "method"), [pair for pair in PAIRS if pair not in REFUSED])


def converted(network: str, method: str) -> tuple[nn.Module, nn.Module, Any]:
    """Return a network, its conversion and a batch of inputs."""
    torch.manual_seed(0)
    net, x = CASES[network].make().eval(), CASES[network].x()
    with warnings.catch_warnings():
        if network in ALIKE and method == "deep_ensemble":
            warnings.filterwarnings("ignore", "the parameter '.*' is the same in all members")
        warnings.filterwarnings("ignore", "ModelPatch found no norms in this network")
        return net, lb.convert(net, all_methods()[method](), likelihood=lb.Categorical()), x


@pytest.mark.parametrize(("network", "method"), REFUSED)
def test_what_is_refused_is_refused_with_a_reason(network, method):
    with pytest.raises(ValueError, match=REFUSED[network, method]):
        converted(network, method)


@pairs
def test_every_method_summarises_draws_saves_and_trains_any_network(network, method, tmp_path):
    net, bnn, x = converted(network, method)
    output = CASES[network].output
    check_summary(bnn, method)
    check_draws(net, bnn, x, method, output)
    prediction = lb.predict(bnn, x, samples=2, seed=5, output=output)
    lb.save(bnn, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors", net)
    torch.testing.assert_close(lb.predict(again, x, samples=2, seed=5, output=output).mean, prediction.mean)
    check_training(bnn, x, CASES[network].y(), output)


def check_draws(net, bnn, x, method, output):
    """A draw is of the network's own class and equals the seeded pass; the mean is the network itself."""
    prediction = lb.predict(bnn, x, samples=2, seed=5, output=output)
    assert prediction.mean.isfinite().all()
    for index in range(2):
        plain = lb.draw(bnn, seed=5, index=index)
        assert type(plain) is type(net)
        assert not [name for name, m in plain.named_modules() if inside_leanbayes(m)]
        with torch.no_grad(), lb.draws(bnn, seed=5, index=index):
            ours, stochastic = call(plain, x, output), call(bnn, x, output)
        torch.testing.assert_close(ours, stochastic, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.softmax(1), prediction.samples[index], rtol=1e-4, atol=1e-5)
    if method not in ("deep_ensemble", "nested"):  # no mean network, and one of full width
        with torch.no_grad():
            torch.testing.assert_close(call(lb.mean(bnn), x, output), call(net, x, output), rtol=1e-4, atol=1e-5)


def check_training(bnn, x, y, output):
    """Every parameter has a finite gradient."""
    bnn.train()
    terms = lb.elbo(bnn, x, y, num_data=100, output=output)
    terms.loss.backward()
    assert terms.loss.isfinite()
    assert not [n for n, p in bnn.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


def check_summary(bnn, method):
    """Every layer that carries no noise is named with a reason."""
    rows = {row.path: row for row in lb.summary(bnn).rows}
    assert all(row.method or row.reason for row in rows.values())
    if method == "deep_ensemble":
        return
    stochastic = {path for path, _ in lb.stochastic_layers(bnn)}
    assert stochastic == {path for path, row in rows.items() if row.method}
    owners = {path for path, m in bnn.named_modules() if any(True for _ in m.parameters(recurse=False))}
    inside = tuple(f"{path}." for path in stochastic)
    assert {path for path in owners if not path.startswith(inside)} - stochastic <= set(rows)


def inside_leanbayes(module: nn.Module) -> bool:
    home = type(module).__module__
    return home.startswith("leanbayes") and not home.startswith("leanbayes.models")


# The summary of the parts that only some methods take


@pytest.mark.parametrize(
    "method", [n for n, kind in all_methods().items() if n not in ("nested", "deep_ensemble") and not kind.post_hoc]
)
def test_the_transposed_linears_of_gpt2_are_targets_of_every_method(method):
    _, bnn, _ = converted("gpt2", method)
    reasons = {row.reason for row in lb.summary(bnn).rows if row.kind == "Conv1D"}
    assert reasons <= {"", "not chosen"}
    kinds = {type(layer.base).__name__ for _, layer in lb.stochastic_layers(bnn)}
    assert "Conv1D" in kinds or method in ("mc_dropout", "patch")  # these take dropouts, and norms and the output


def test_gpt2_stays_tied_in_training_and_its_draws_are_untied_and_generate():
    """To transformers, whose `tie_weights` would tie a draw again, it is `tie_word_embeddings=False` from then on."""
    _, bnn, x = converted("gpt2", "mean_field")
    assert bnn.lm_head.base.weight is bnn.transformer.wte.base.weight
    plain = lb.draw(bnn, seed=1)
    assert not torch.equal(plain.lm_head.weight, plain.transformer.wte.weight)
    options = {"attention_mask": torch.ones_like(x["input_ids"]), "max_new_tokens": 3, "do_sample": False}
    with lb.draws(bnn, seed=1):
        drawn = bnn.generate(x["input_ids"], pad_token_id=0, **options)
    assert torch.equal(plain.generate(x["input_ids"], pad_token_id=0, **options), drawn)
    plain.config.tie_word_embeddings = False
    plain.tie_weights()
    assert plain.lm_head.weight is not plain.transformer.wte.weight


def test_shared_parts_are_converted_once():
    for network, shared in (("called twice", "step"), ("two names", "left.0")):
        _, bnn, _ = converted(network, "rank1")
        paths = [path for path, _ in lb.stochastic_layers(bnn)]
        assert paths.count(shared) == 1
        assert not any(path.startswith("right") for path in paths)
    plain = lb.draw(bnn)
    assert bnn.left is bnn.right
    assert plain.left is plain.right
