"""Attention made of ordinary layers: torch's outputs and gradients in every option, never its fast path."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.core.plain import strip
from leanbayes.layers.composites.lowering import Attention, refusal

ROWS, QUERIES, KEYS, WIDTH, HEADS = 3, 4, 5, 8, 2

OPTIONS = {
    "default": {},
    "no bias": {"bias": False},
    "learned pair": {"add_bias_kv": True},
    "zeros": {"add_zero_attn": True},
    "kdim and vdim": {"kdim": 6, "vdim": 10},
    "vdim alone": {"vdim": 6, "bias": False},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 10, "vdim": 6},
    "odd heads": {"num_heads": 1, "add_bias_kv": True, "add_zero_attn": True, "bias": False},
}
LAYOUTS = ("batch first", "batch second", "one sequence")
MASKS = (
    *("none", "padding", "float padding", "pairs", "float pairs", "pairs of each head", "float pairs of each head"),
    *("both", "float both", "both of each head", "causal", "float causal", "causal and padding"),
)
WEIGHTS = (
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
)
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def multihead(layout: str = "batch first", dtype: torch.dtype = torch.float32, **options) -> nn.MultiheadAttention:
    """Make torch's module with random biases, which it begins at zero."""
    options = {"num_heads": HEADS, "batch_first": layout == "batch first", "dtype": dtype, **options}
    return randomised(nn.MultiheadAttention(WIDTH, **options))


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return module


def inputs_of(module: nn.MultiheadAttention, layout: str) -> list[Tensor]:
    """Draw a query, a key and a value that want gradients."""
    dtype = module.out_proj.weight.dtype
    sizes = ((QUERIES, module.embed_dim), (KEYS, module.kdim), (KEYS, module.vdim))
    shapes = {
        "batch first": [(ROWS, *size) for size in sizes],
        "batch second": [(length, ROWS, width) for length, width in sizes],
        "one sequence": sizes,
    }
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes[layout]]


def masks_of(kind: str, layout: str, heads: int, dtype: torch.dtype) -> dict:
    """Draw masks; no query is left without a key, whose softmax would be nan."""
    rows = 1 if layout == "one sequence" else ROWS
    padding = torch.rand(rows, KEYS) < 0.4
    padding[:, 0] = False
    pairs = torch.rand(*(rows * heads,) * ("each head" in kind), QUERIES, KEYS) < 0.4
    pairs[..., 0] = False
    if "causal" in kind:
        pairs = torch.ones(QUERIES, KEYS).triu(1).bool()
    if "float" in kind and "causal" in kind:
        pairs = torch.zeros(pairs.shape, dtype=dtype).masked_fill(pairs, float("-inf"))
    elif "float" in kind:
        pairs, padding = torch.randn(pairs.shape, dtype=dtype), torch.randn(padding.shape, dtype=dtype)
    chosen: dict = {}
    if "padding" in kind or "both" in kind:
        chosen["key_padding_mask"] = padding[0] if layout == "one sequence" else padding
    if "padding" not in kind.split() or "causal" in kind:
        chosen["attn_mask"] = pairs
    return {} if kind == "none" else {**chosen, "is_causal": "causal" in kind}


def gradients(module: nn.MultiheadAttention | Attention) -> dict[str, Tensor]:
    """Return the gradients of all parameters under torch's names."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    if isinstance(module, nn.MultiheadAttention):
        return found
    layers = (module.query, module.key, module.value)
    if module.kdim == module.vdim == module.embed_dim:
        found["in_proj_weight"] = torch.cat([layer.weight.grad for layer in layers])
    else:
        found |= {f"{n}_proj_weight": layer.weight.grad for n, layer in zip("qkv", layers, strict=True)}
    if module.query.bias is not None:
        found["in_proj_bias"] = torch.cat([layer.bias.grad for layer in layers])
    return {name: grad for name, grad in found.items() if name.split(".")[0] not in ("query", "key", "value")}


def run(module: nn.Module, inputs: list[Tensor], **options) -> dict[str, Tensor]:
    """Call attention and differentiate a function of all it returns; everything by name."""
    module.zero_grad()
    inputs = [x.detach().requires_grad_() for x in inputs]
    output, weights = module(*inputs, **options)
    found = {"output": output} if weights is None else {"output": output, "weights": weights}
    sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in found.values()).backward()
    found |= {name: x.grad for name, x in zip(("query", "key", "value"), inputs, strict=True)}
    return found | gradients(module)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def lowered(model: nn.Module) -> nn.Module:
    """Return a copy of a model with every attention lowered."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, Attention(child))
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    return model


# --- one module -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_weights_and_gradients_are_torchs(name, layout, mask):
    module = multihead(layout, **OPTIONS[name])
    ours = Attention(module)
    inputs = inputs_of(module, layout)
    masks = masks_of(mask, layout, module.num_heads, torch.float32)
    for weights in WEIGHTS:
        assert_same(run(ours, inputs, **masks, **weights), run(module, inputs, **masks, **weights))


@pytest.mark.parametrize("name", OPTIONS)
def test_double_precision_agrees_to_rounding(name):
    module = multihead(dtype=torch.float64, **OPTIONS[name])
    inputs = inputs_of(module, "batch first")
    for mask, weights in itertools.product(("none", "float both", "causal"), WEIGHTS):
        masks = masks_of(mask, "batch first", module.num_heads, torch.float64)
        theirs = run(module, inputs, **masks, **weights)
        assert theirs["output"].dtype == torch.float64
        assert_same(run(Attention(module), inputs, **masks, **weights), theirs, 1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_dropout_is_of_training_and_torchs_to_the_draw(weights):
    module = multihead(dropout=0.5)
    ours, inputs = Attention(module), inputs_of(module, "batch first")
    torch.manual_seed(3)
    theirs = run(module, inputs, **weights)
    torch.manual_seed(3)
    assert_same(run(ours, inputs, **weights), theirs)
    assert not torch.allclose(run(ours, inputs, **weights)["output"], theirs["output"], atol=1e-3)
    assert_same(run(ours.eval(), inputs, **weights), run(module.eval(), inputs, **weights))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_self_attention_equals_torchs_fast_path(weights, batch_first):
    module = multihead(batch_first=batch_first).eval()
    x = torch.randn(ROWS, QUERIES, WIDTH)
    with torch.no_grad():
        ours, theirs = Attention(module)(x, x, x, **weights), module(x, x, x, **weights)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_masks_that_are_learned_get_torchs_gradient():
    module = multihead()
    inputs, found = inputs_of(module, "batch first"), []
    bias = torch.randn(ROWS * HEADS, QUERIES, KEYS)
    for attention, weights in itertools.product((module, Attention(module)), WEIGHTS):
        mask = bias.clone().requires_grad_()
        attention(*inputs, attn_mask=mask, **weights)[0].square().sum().backward()
        found.append(mask.grad)
    for expected, ours in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_scores_are_not_stored_where_no_weights_are_wanted(monkeypatch):
    calls = []
    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or kernel(*a, **k))
    module = multihead()
    ours, inputs = Attention(module), inputs_of(module, "batch first")
    for mask in MASKS:
        ours(*inputs, need_weights=False, **masks_of(mask, "batch first", HEADS, torch.float32))
    assert len(calls) == len(MASKS)
    assert [call["is_causal"] for call in calls] == [mask in ("causal", "float causal") for mask in MASKS]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_bfloat16_autocast_gives_torchs_numbers_and_types(weights):
    module = multihead(add_bias_kv=True)
    ours, inputs = Attention(module), inputs_of(module, "batch first")
    masks = masks_of("both", "batch first", HEADS, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        pairs = zip(ours(*inputs, **masks, **weights), module(*inputs, **masks, **weights), strict=True)
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(("layout", "weights"), zip(LAYOUTS[:2], WEIGHTS[:2], strict=True))
def test_compiles_to_one_graph(layout, weights):
    module = multihead(layout, add_bias_kv=True, add_zero_attn=True)
    ours, inputs = Attention(module), inputs_of(module, layout)
    masks = masks_of("both", layout, HEADS, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs, **masks, **weights), ours(*inputs, **masks, **weights))


def test_wrong_inputs_are_named():
    ours, x = Attention(multihead()), torch.randn(ROWS, QUERIES, WIDTH)
    wrong = {
        "two axes or of three": ((x[None], x, x), {}),
        "equally many rows": ((x, x[:1], x[:1]), {}),
        "as many values as keys": ((x, x, x[:, :1]), {}),
        "which is_causal promises": ((x, x, x), {"is_causal": True}),
        r"attn_mask of shape \(4, 4\) or \(6, 4, 4\), got \(1, 4\)": ((x, x, x), {"attn_mask": torch.zeros(1, 4)}),
        r"key_padding_mask of shape \(3, 4\), got \(1, 4\)": ((x, x, x), {"key_padding_mask": torch.zeros(1, 4)}),
        r"bool or floating type, got torch.int64": ((x, x, x), {"attn_mask": torch.zeros(4, 4).long()}),
    }
    for message, (inputs, options) in wrong.items():
        with pytest.raises(ValueError, match=message):
            ours(*inputs, **options)


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_raised_gives_torchs_module_back(name):
    module = multihead("batch second", torch.float64, dropout=0.25, **OPTIONS[name]).eval()
    module.out_proj.weight.requires_grad_(False)
    generator = torch.get_rng_state()
    ours = Attention(module)
    back = ours.raised()
    assert torch.equal(torch.get_rng_state(), generator)
    assert type(back) is nn.MultiheadAttention
    assert type(back.out_proj) is type(module.out_proj)
    torch.testing.assert_close(back.state_dict(), module.state_dict(), atol=0, rtol=0)
    flags = [[(n, p.requires_grad) for n, p in m.named_parameters()] for m in (module, back)]
    assert flags[0] == flags[1]
    options = {n: v for n, v in vars(module).items() if not n.startswith("_") or n == "_qkv_same_embed_dim"}
    assert options == {n: vars(back)[n] for n in options}
    storages = {p.data_ptr() for m in (module, ours, back) for p in m.parameters()}
    assert len(storages) == sum(len(list(m.parameters())) for m in (module, ours, back))


def test_lowering_keeps_what_is_frozen_also_without_grad():
    module = multihead(add_bias_kv=True).eval()
    module.in_proj_bias.requires_grad_(False)
    with torch.no_grad():
        ours = Attention(module)
        assert ours.raised().in_proj_weight.requires_grad
    assert not any(m.training for m in ours.modules())
    frozen = {n for n, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"query.bias", "key.bias", "value.bias"}
    assert not ours.raised().in_proj_bias.requires_grad


@pytest.mark.parametrize("which", ["key", "out_proj"])
def test_a_bias_that_one_layer_gained_is_raised_among_zeros(which):
    ours = Attention(multihead(bias=False))
    getattr(ours, which).bias = nn.Parameter(torch.randn(WIDTH))
    back = ours.raised()
    inputs = inputs_of(back, "batch first")
    torch.testing.assert_close(back(*inputs), ours(*inputs))
    biases = torch.cat([back.in_proj_bias, back.out_proj.bias]).view(4, WIDTH)
    assert (biases != 0).any(1).tolist() == [False, which == "key", False, which == "out_proj"]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_torchs_module_loads_strictly(name, assign):
    module, other = multihead(**OPTIONS[name]), multihead(**OPTIONS[name])
    ours = Attention(other)
    ours.load_state_dict(module.state_dict(), assign=assign)
    torch.testing.assert_close(ours.raised().state_dict(), module.state_dict(), atol=0, rtol=0)
    again = Attention(other)
    again.load_state_dict(ours.state_dict())
    torch.testing.assert_close(again.state_dict(), ours.state_dict(), atol=0, rtol=0)
    with pytest.raises(RuntimeError, match=r"size mismatch for query\.weight"):
        ours.load_state_dict({**ours.state_dict(), "in_proj_weight": torch.zeros(5, WIDTH)})


def test_a_state_dict_loads_inside_a_model():
    plain = randomised(nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 16), 2))
    model = lowered(nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 16), 2)).eval()
    model.load_state_dict(plain.state_dict())
    x, memory = torch.randn(QUERIES, ROWS, WIDTH), torch.randn(KEYS, ROWS, WIDTH)
    torch.testing.assert_close(model(x, memory), plain.eval()(x, memory), atol=1e-5, rtol=1e-5)


class OwnForward(nn.MultiheadAttention):
    def forward(self, query, key, value):
        return 2 * query


class OwnClass(nn.MultiheadAttention):
    """Computes what its parent does."""


def test_somebody_elses_attention_is_refused():
    parametrised, hooked, foreign, lora = (multihead() for _ in range(4))
    nn.utils.parametrizations.spectral_norm(parametrised, "in_proj_weight")
    nn.utils.spectral_norm(hooked, "in_proj_weight")
    foreign.out_proj = nn.Identity()
    lora.out_proj = type("LoRA", (nn.Linear,), {"forward": lambda self, x: x})(WIDTH, WIDTH)
    quantisable = torch.ao.nn.quantizable.MultiheadAttention(WIDTH, HEADS)
    expected = {
        OwnForward(WIDTH, HEADS): "OwnForward is a MultiheadAttention with a forward of its own",
        quantisable: "MultiheadAttention is a MultiheadAttention with a forward of its own",
        OwnClass(WIDTH, HEADS): "a class of its own",
        parametrised: "parametrised",
        hooked: "a hook computes",
        foreign: "out_proj is no Linear but a Identity",
        lora: "LoRA is a Linear with a forward of its own",
    }
    for module, reason in expected.items():
        assert reason in str(refusal(module))
    assert refusal(multihead()) == ""


def test_packed_weights_are_not_there_to_be_computed_with():
    ours = Attention(multihead())
    with pytest.raises(TypeError, match="lowered into layers; call it"):
        F.linear(torch.randn(2, WIDTH), ours.in_proj_weight)


# --- inside torch's transformers --------------------------------------------------------------------------------------


@pytest.fixture
def fast_paths(monkeypatch) -> list[str]:
    """Record torch's fast paths, and do not take them."""
    taken: list[str] = []

    def record(name: str):
        def instead(*args, **kwargs):
            taken.append(name)
            raise ZeroDivisionError(name)

        monkeypatch.setattr(torch, name, instead)

    for name in ("_transformer_encoder_layer_fwd", "_nested_tensor_from_mask", "_native_multi_head_attention"):
        record(name)
    return taken


def padding_of(*lengths: int) -> Tensor:
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    options = {"batch_first": True, "dropout": 0.0, **options}
    return randomised(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **options))


def transformers() -> dict:
    """Return models with what they are called with: everything that contains attention in torch."""
    x, memory, padding = torch.randn(ROWS, KEYS, WIDTH), torch.randn(ROWS, QUERIES, WIDTH), padding_of(5, 3, 4)
    causal = nn.Transformer.generate_square_subsequent_mask(KEYS)
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    whole = nn.Transformer(WIDTH, HEADS, 2, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(WIDTH))
    return {
        "layer": (encoder_layer(), (x,), {}),
        "layer, gelu, norm first": (encoder_layer(activation="gelu", norm_first=True), (x,), {}),
        "layer, no bias": (encoder_layer(bias=False), (x,), {"src_key_padding_mask": padding}),
        "layer, batch second": (encoder_layer(batch_first=False), (x.transpose(0, 1),), {}),
        "layer, causal": (encoder_layer(), (x,), {"src_mask": causal, "is_causal": True}),
        "layer, one sequence": (encoder_layer(), (x[0],), {}),
        "encoder": (encoder, (x,), {}),
        "encoder, padding": (encoder, (x,), {"src_key_padding_mask": padding}),
        "encoder, causal": (encoder, (x,), {"mask": causal}),
        "decoder layer": (decoder, (x, memory), {"tgt_mask": causal, "tgt_is_causal": True}),
        "decoder layer, padding": (decoder, (x, memory), {"memory_key_padding_mask": padding_of(4, 1, 2)}),
        "transformer": (whole, (x, x), {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", transformers())
def test_transformers_compute_what_they_did(name, training):
    model, inputs, options = transformers()[name]
    ours = lowered(model.train(training))
    mine, theirs = ours(*inputs, **options), model(*inputs, **options)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    for output in (mine, theirs):
        (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if "in_proj" not in n}
    found = {n: p.grad for n, p in ours.named_parameters()}
    torch.testing.assert_close({n: found[n] for n in expected}, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", transformers())
def test_torchs_fast_path_gave_the_same_where_nothing_is_padded(name):
    model, inputs, options = transformers()[name]
    with torch.no_grad():
        theirs, mine = model.eval()(*inputs, **options), lowered(model)(*inputs, **options)
    if "encoder, padding" in name:  # nested tensors come back with zeros, after them the norm's bias
        mine, theirs = (y[~options["src_key_padding_mask"]] for y in (mine, theirs))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", transformers())
def test_the_fast_path_is_never_taken(name, mode, frozen, fast_paths):
    model, inputs, options = transformers()[name]
    ours = lowered(model).eval().requires_grad_(not frozen)
    with MODES[mode]():
        ours(*inputs, **options)
    assert fast_paths == []


@pytest.mark.parametrize("name", ["layer", "layer, gelu, norm first", "encoder", "encoder, padding", "transformer"])
def test_the_plain_model_would_have_taken_it(name, fast_paths):
    model, inputs, options = transformers()[name]
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model.eval()(*inputs, **options)
    assert fast_paths


class Doubled(nn.Linear):
    """A layer whose weight does not tell what it computes, as a stochastic one's."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("layer", ["linear1", "linear2"])
@pytest.mark.parametrize("mode", MODES)
def test_other_layers_of_an_encoder_are_called_in_every_mode(mode, layer):
    model = lowered(nn.TransformerEncoder(encoder_layer(), 2))
    x, padding = torch.randn(ROWS, KEYS, WIDTH), padding_of(5, 3, 4)
    plain = model(x, src_key_padding_mask=padding)
    for block in model.layers:
        getattr(block, layer).__class__ = Doubled
    expected = model.train()(x, src_key_padding_mask=padding)
    assert not torch.allclose(expected, plain, atol=1e-2)
    with MODES[mode]():
        torch.testing.assert_close(model.eval()(x, src_key_padding_mask=padding), expected.detach())


def test_an_encoder_compiles_to_one_graph():
    model = lowered(nn.TransformerEncoder(encoder_layer(), 1, mask_check=False)).eval()
    x, padding = torch.randn(ROWS, KEYS, WIDTH), padding_of(5, 3, 4)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding))


def test_layers_may_share_one_attention():
    plain = nn.ModuleList([encoder_layer(), encoder_layer()])
    plain[1].self_attn = plain[0].self_attn
    ours = copy.deepcopy(plain)
    ours[0].self_attn = ours[1].self_attn = Attention(plain[0].self_attn)
    x = torch.randn(ROWS, KEYS, WIDTH)
    for model in (plain, ours):
        model[1](model[0](x)).square().mean().backward()
    mine, theirs = gradients(ours[0].self_attn), gradients(plain[0].self_attn)
    assert_same(mine, theirs)


# --- with noise -------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A small network around attention, with rows on the first axis of its inputs; returns (rows, positions, 2)."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.attention = Attention(multihead(batch_first=batch_first))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h if self.attention.batch_first else h.transpose(0, 1)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h if self.attention.batch_first else h.transpose(0, 1))


@pytest.fixture(params=[True, False], ids=["batch first", "batch second"])
def tagger(request) -> nn.Module:
    return lb.convert(Tagger(request.param), lb.Rank1(components=2)).eval()


def test_all_four_layers_are_converted_and_trained(tagger):
    paths = [path for path, _ in lb.stochastic_layers(tagger)]
    assert [p.removeprefix("attention.") for p in paths[1:5]] == ["query", "key", "value", "out_proj"]
    x = torch.randn(16, KEYS, 3)
    y = x.cumsum(1)[..., :2]
    optimiser = torch.optim.Adam(tagger.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = (tagger(x) - y).square().mean() + lb.kl(tagger) / 10_000
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in tagger.parameters())
        optimiser.step()
    assert sum(losses[-10:]) < sum(losses[:10]) / 2


def test_a_drawn_network_equals_the_pass_of_the_same_draw(tagger):
    x = torch.randn(ROWS, KEYS, 3)
    for seed, index in itertools.product((0, 1), (0, 1, 2)):
        with lb.draws(tagger, seed=seed, index=index):
            expected = tagger(x)
        plain = lb.draw(tagger, seed=seed, index=index)
        torch.testing.assert_close(plain(x), expected, atol=1e-5, rtol=1e-5)
        assert type(plain.attention) is nn.MultiheadAttention
        h = plain.embed(x)
        h = h if plain.attention.batch_first else h.transpose(0, 1)
        h = h + plain.attention(h, h, h, need_weights=False)[0]
        h = h if plain.attention.batch_first else h.transpose(0, 1)
        torch.testing.assert_close(plain.head(h), expected, atol=1e-5, rtol=1e-5)


def test_noise_is_of_a_row_and_a_sequence_has_one_draw(tagger):
    same = torch.randn(1, 1, 3).expand(6, 6, 3)  # as many rows as positions: neither can pass for the other
    output = tagger(same)
    torch.testing.assert_close(output, output[:, :1].expand_as(output), atol=1e-5, rtol=1e-5)
    assert (torch.pdist(output[:, 0]) > 1e-3).all()
    with lb.draws(tagger, seed=0):
        output = tagger(same)
    torch.testing.assert_close(output, output[:1].expand_as(output), atol=1e-5, rtol=1e-5)


def test_a_plain_state_dict_loads_into_the_converted_model(tagger):
    plain = Tagger(tagger.attention.batch_first)
    state = {k: v for k, v in plain.state_dict().items() if not k.startswith("attention.")}
    state |= {f"attention.{k}": v for k, v in plain.attention.raised().state_dict().items()}
    missing, unexpected = tagger.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(".posterior." in key for key in missing)
    x = torch.randn(ROWS, KEYS, 3)
    torch.testing.assert_close(strip(tagger)(x), plain(x), atol=1e-6, rtol=1e-6)


def test_a_converted_model_compiles_to_one_graph():
    tagger = lb.convert(Tagger(batch_first=False), lb.Rank1(components=2))
    x = torch.randn(ROWS, KEYS, 3)
    torch.compiler.reset()
    compiled = torch.compile(tagger, fullgraph=True, backend="aot_eager")
    with lb.draws(tagger, seed=0):
        torch.testing.assert_close(compiled(x), tagger(x), atol=1e-5, rtol=1e-5)
