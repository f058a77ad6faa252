"""Activation checkpointing gives the gradients of the same pass without it, whatever is recomputed, and when."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import leanbayes as lb

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # nested reentrant

METHODS = {
    "rank1": lb.Rank1(),
    "batch_ensemble": lb.BatchEnsemble(),
    "implicit": lb.ImplicitNodes(),
    "patch": lb.ModelPatch(),
    "variance": lb.VarianceLayers(init_log_alpha=0.0),
    "ordered": lb.NestedDropout(groups=4, first=True, weight_noise=False),
    "nested": lb.NestedDropout(groups=4, first=True, init_log_alpha=-1.0),
    "mean_field": lb.MeanField(init_std=0.1),
    "flipout": lb.MeanField(init_std=0.1, estimator="flipout"),
    "dropconnect": lb.DropConnect(rate=0.3),
    "mc_dropout": lb.MCDropout(rate=0.3),
}


class Blocks(nn.Module):
    """Two blocks; `how` is the checkpointed part: nothing, each block, a region around regions, or the whole."""

    how = "none"
    reentrant = False
    preserve = True
    after: nn.Module

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.c, self.d = nn.Linear(16, 16), nn.Linear(16, 3)

    def first(self, x):
        return torch.tanh(self.b(self.drop(torch.tanh(self.norm(self.a(x))))))

    def second(self, x):
        return torch.tanh(self.c(self.drop(x)) + self.b(x))

    def body(self, x):
        if self.how in ("blocks", "nested"):
            return self.region(self.second, self.region(self.first, x))
        return self.second(self.first(x))

    def region(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)

    def forward(self, x):
        return self.d(self.region(self.body, x) if self.how == "nested" else self.body(x))


def run(model, x, how, *, whole=False, passes=1, seed=5):
    """Return the gradients of several passes and one backward."""
    model.how = how
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "running" in name or "num_batches" in name:
                buffer.zero_()
    loss = 0.0
    for part in x.chunk(passes):
        part = part.detach().requires_grad_()
        loss = loss + (model.region(model, part) if whole else model(part)).square().mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one, other):
    assert one
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def make(method, **options):
    torch.manual_seed(0)
    return lb.convert(Blocks(**options), method), torch.randn(12, 8)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["blocks", "nested"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_regions_with_dropout_have_the_gradients_without_checkpointing(method, how, reentrant):
    model, x = make(method)
    model.reentrant = reentrant
    assert_same(run(model, x, how), run(model, x, "none"))
    assert_same(run(model, x, how, passes=2), run(model, x, "none", passes=2))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_region_around_the_whole_model_repeats_its_pass(method, reentrant):
    model, x = make(method)
    model.reentrant = reentrant
    wanted = run(model, x, "none", passes=2)
    for how in ("none", "blocks"):
        assert_same(run(model, x, how, whole=True, passes=2), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_regions_need_no_random_state_where_the_network_has_no_dropout(method, reentrant):
    model, x = make(method, dropout=0.0)
    model.reentrant, model.preserve = reentrant, False
    for how in ("blocks", "nested"):
        assert_same(run(model, x, how, passes=2), run(model, x, "none", passes=2))


def test_a_whole_model_without_random_state_is_refused():
    model, x = make(lb.Rank1(), dropout=0.0)
    model.preserve = False
    with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
        run(model, x, "none", whole=True)
    with lb.draws(model, seed=0):  # fixed noise needs no random state
        assert_same(run(model, x, "none", whole=True), run(model, x, "none"))


@pytest.mark.parametrize("method", [lb.Rank1(), lb.MeanField(init_std=0.1), lb.ModelPatch()], ids=["r", "m", "p"])
def test_backward_after_the_context_of_a_draw_repeats_the_draw(method):
    model, x = make(method, dropout=0.0)
    found = []
    for how in ("blocks", "none"):
        model.how = how
        model.zero_grad()
        with lb.draws(model, seed=3):
            y = model(x)
        model(x)  # a later pass with other noise
        y.square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


def test_backward_of_passes_in_any_order():
    model, x = make(lb.Rank1())
    found = []
    for how in ("blocks", "none"):
        model.how = how
        model.zero_grad()
        torch.manual_seed(1)
        losses = [model(part).square().mean() for part in x.chunk(3)]
        (losses[1] * 2).backward()
        losses[2].backward(retain_graph=True)
        losses[0].backward()
        losses[2].backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


def test_a_submodule_in_a_region_of_its_own():
    torch.manual_seed(0)
    model = lb.convert(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3)), lb.Rank1())
    part, x = model[:3], torch.randn(6, 8, requires_grad=True)
    found = []
    for checkpointed in (True, False):
        model.zero_grad()
        torch.manual_seed(2)
        total = 0.0
        for _ in range(2):
            y = checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
            total = total + (y * model(x).sum()).square().mean()
        total.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


def test_a_pass_is_forgotten_with_its_graph():
    model, x = make(lb.Rank1())
    history = model.a.state.history
    outputs = [model(x) for _ in range(4)]
    assert sum(one() is not None for one in history.passes) == 4
    del outputs
    with torch.no_grad():
        model(x)
    assert sum(one() is not None for one in history.passes) == 1
    assert not copy.deepcopy(model).a.state.history.passes


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_noise_is_drawn_when_the_pass_begins(method):
    model, x = make(method)
    states = []
    for layer in (model.a, model.drop):
        layer.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    model(x)
    assert torch.equal(states[0], states[1])  # so dropout sees the numbers that it sees in a recomputation


# Ordered channels of these networks have tests of their own.
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not isinstance(method, lb.NestedDropout)])
def test_gpt2_and_vit_of_transformers_with_gradient_checkpointing(name):
    transformers, method = pytest.importorskip("transformers"), METHODS[name]
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    vit = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_labels=3, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    cases = [
        (transformers.GPT2LMHeadModel(gpt2), {"input_ids": torch.randint(50, (4, 8))}),
        (transformers.ViTForImageClassification(vit), {"pixel_values": torch.randn(4, 3, 16, 16)}),
    ]
    for net, inputs in cases:
        bnn, found = lb.convert(net, method).train(), []
        for checkpointed in (False, True):
            if checkpointed:
                bnn.gradient_checkpointing_enable()
            bnn.zero_grad()
            torch.manual_seed(1)
            kept = {} if isinstance(net, transformers.ViTForImageClassification) else {"use_cache": False}
            sum(bnn(**inputs, **kept).logits.square().mean() for _ in range(2)).backward()
            found.append({name: p.grad.clone() for name, p in bnn.named_parameters() if p.grad is not None})
        assert_same(*found)
