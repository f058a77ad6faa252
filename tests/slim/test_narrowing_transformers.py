"""Hugging Face's networks: hidden widths and heads are ordered, and narrowed networks equal the masked ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import leanbayes as lb

from .networks import parameters, units_of, unsettle

transformers: Any = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
WORDS = {"input_ids": torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))}
IMAGES = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, vocab_size=40, max_position_embeddings=8)
    return transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, vocab_size=40, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def conspicuous(net: nn.Module) -> nn.Module:
    """Give weights a size that shows every mistake: fresh networks of this kind return almost nothing."""
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape) * 0.5)
    return net


@pytest.mark.parametrize(
    ("make", "inputs", "hidden", "units"),
    [(bert, WORDS, "bert.encoder.layer.1.intermediate.dense", (2, 4)), (vit, IMAGES, "vit.layers.1.mlp.fc1", (2, 4)),
     (gpt2, WORDS, "transformer.h.1.mlp.c_fc", (2, 2))],
)  # fmt: skip
@pytest.mark.parametrize("known", [False, True], ids=["parts", "example"])
def test_narrowed_networks_equal_the_masked_ones(make, inputs, hidden, units, known):
    torch.manual_seed(0)
    net = conspicuous(make())
    bnn = unsettle(lb.convert(net, lb.NestedDropout(groups=4), example=inputs if known else None))
    assert len(units_of(bnn)) == units[known]
    sizes, outputs = [], []
    for width in (0.25, 0.5, 1.0):
        small = lb.slim.extract(bnn, width)
        with torch.no_grad(), lb.draws(bnn, mean=True, width=width):
            outputs.append(bnn(**inputs).logits)
        torch.testing.assert_close(small(**inputs).logits, outputs[-1], atol=1e-4, rtol=1e-4)
        sizes.append(parameters(small))
    assert sizes[0] < sizes[1] < sizes[2]
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-2)
    assert min(small.get_submodule(hidden).weight.shape) == 16


def test_heads_are_cut_whole():
    bnn = lb.convert(vit(), lb.NestedDropout(groups=4), example=IMAGES)
    layer = lb.slim.extract(bnn, 0.5).vit.layers[1].attention
    assert [layer.get_submodule(name).weight.shape for name in ("q_proj", "v_proj", "o_proj")] == [
        (8, 16),
        (8, 16),
        (16, 8),
    ]
