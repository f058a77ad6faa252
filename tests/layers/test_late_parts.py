"""Late parts of networks: head, last block, last stage, and the rule that finds them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import nn

import leanbayes as lb
from leanbayes.layers.select import choose


class Basic(nn.Module):
    """A residual block as torchvision and timm write it."""

    def __init__(self, inputs: int, outputs: int, stride: int, pooled: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs)
        pool = (nn.AvgPool2d(stride), nn.Conv2d(inputs, outputs, 1)) if pooled else ()
        self.downsample = nn.Sequential(*(pool or (nn.Conv2d(inputs, outputs, 1, stride),))) if stride > 1 else None

    def forward(self, x):
        short = x if self.downsample is None else self.downsample(x)
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + short).relu()


class ResNet(nn.Module):
    def __init__(self, depth: int = 2, pooled: bool = False) -> None:
        super().__init__()
        self.conv1, self.maxpool = nn.Conv2d(3, 4, 7, 2, 3), nn.MaxPool2d(2)
        for stage, (inputs, outputs) in enumerate(((4, 4), (4, 8), (8, 16), (16, 32)), 1):
            first = Basic(inputs, outputs, 1 if stage == 1 else 2, pooled)
            blocks = nn.Sequential(first, *(Basic(outputs, outputs, 1) for _ in range(depth - 1)))
            setattr(self, f"layer{stage}", blocks)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10)

    def forward(self, x):
        x = self.maxpool(self.conv1(x))
        return self.fc(self.avgpool(self.layer4(self.layer3(self.layer2(self.layer1(x))))).flatten(1))


class Encoder(nn.Module):
    """Equal blocks of one width, as ViT and BERT have them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), depth)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.blocks(self.patches(x).flatten(2).mT).mean(1))


def mlp(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(m for pair in pairwise(widths) for m in (nn.Linear(*pair), nn.ReLU())))[:-1]


def chosen(net: nn.Module, part: lb.layers.Selector | str) -> list[str]:
    return [path for path, _ in lb.stochastic_layers(lb.convert(net, lb.ImplicitNodes(), where=part))]


BLOCK = ["conv1", "conv2"]


@pytest.mark.parametrize("pooled", [False, True], ids=["strided shortcut", "pooled shortcut"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_stage_of_a_resnet_begins_with_its_strided_block(depth, pooled):
    net = ResNet(depth, pooled)
    shortcut = ["layer4.0.downsample.1" if pooled else "layer4.0.downsample.0"]
    first = [f"layer4.0.{name}" for name in BLOCK] + shortcut
    rest = [f"layer4.{block}.{name}" for block in range(1, depth) for name in BLOCK]
    assert chosen(net, lb.layers.last_stage()) == [*first, *rest, "fc"]
    assert chosen(net, lb.layers.last_block()) == [*(rest[-2:] or first), "fc"]
    assert chosen(net, lb.layers.head()) == ["fc"]


@pytest.mark.parametrize(
    ("name", "stage", "block"),
    [("wrn-16-2", "stages.2", "stages.2.1"), ("resnet18", "stages.3", "stages.3.1")],
)
def test_networks_of_the_library(name, stage, block):
    net = lb.models.build(name, num_outputs=10, input_shape=(3, 32, 32))
    maps = [path for path, module in net.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    for part, start in (("last_stage", stage), ("last_block", block)):
        first = next(position for position, path in enumerate(maps) if path.startswith(f"{start}."))
        assert chosen(net, part) == maps[first:]
    assert chosen(net, lb.layers.head()) == maps[-1:]


def test_equal_blocks_have_no_stage_so_the_last_quarter_counts():
    found = chosen(Encoder(8), "last_stage")
    assert {path.split(".")[2] for path in found[:-1]} == {"6", "7"}
    assert found[-1] == "head"
    assert {path.split(".")[2] for path in chosen(Encoder(8), "last_block")[:-1]} == {"7"}


@pytest.mark.parametrize(
    ("net", "stage", "block"),
    [
        (mlp(4, 50, 50, 3), ["2", "4"], ["2", "4"]),
        (mlp(4, 50, 20, 20, 3), ["2", "4", "6"], ["4", "6"]),
        (mlp(4, 3), ["0"], ["0"]),
        (nn.Linear(4, 3), [""], [""]),
        (
            nn.Sequential(
                *(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)),
                *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3)),
            ),
            ["2", "4", "7", "8"],
            ["7", "8"],
        ),
    ],
    ids=["equal widths", "a change of width", "two layers", "one layer", "a pool between convolutions"],
)
def test_plain_chains(net, stage, block):
    assert chosen(net, lb.layers.last_stage()) == stage
    assert chosen(net, lb.layers.last_block()) == block


def test_bert_takes_the_last_quarter_of_its_layers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    net = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, **sizes))
    found = chosen(net, "last_stage")
    assert {path for path in found if "layer" in path} == {
        path for path in found if path.startswith("bert.encoder.layer.3.")
    }
    assert found[-2:] == ["bert.pooler.dense", "classifier"]


def test_norms_of_a_late_part_belong_to_it():
    found = [path for path, _ in lb.stochastic_layers(lb.convert(ResNet(), lb.ModelPatch(), where="last_block"))]
    assert set(found) == {*(f"layer4.1.{name}" for name in ("conv1", "bn1", "conv2", "bn2")), "fc"}


def test_a_path_of_that_name_comes_first():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    assert chosen(Net(), "head") == ["head"]
    assert chosen(Net(), lb.layers.head()) == ["last"]
    assert chosen(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), ["head", "0"]) == ["0", "1"]
    with pytest.raises(
        ValueError, match=r"matches no layer; there are head, body, last; the late parts head, last_block"
    ):
        chosen(Net(), "lats_stage")
    with pytest.raises(ValueError, match=r"matches no layer; there are head$"):
        choose([("head", nn.Linear(1, 1))], "last_stage")


def test_a_network_without_linear_maps_has_no_late_part():
    with pytest.raises(ValueError, match=r"found no layer to convert|chose nothing"):
        lb.convert(nn.Sequential(nn.BatchNorm1d(3)), lb.ModelPatch(), where=lb.layers.last_stage())
