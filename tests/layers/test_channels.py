"""Following channels: which layers share a stream, what passes one on, what holds it, and what cannot be followed."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn, Tensor

from leanbayes import models
from leanbayes.layers.channels import follow
from leanbayes.layers.streams import Channels, Layout, positions, Stream
from tests.needs import need_torch

OUTPUT = "it is an output of the network"


class Net(nn.Module):
    """Layers by name, and a forward pass that is given as a function."""

    def __init__(self, run, **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def conv(inputs: int, outputs: int, kernel: int = 1, **options) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def read_by(found: Channels, path: str) -> Layout:
    layout = found.inputs[path]
    assert layout is not None
    return layout


def stream(found: Channels, path: str) -> Stream:
    """Return the one stream that a layer makes or passes on."""
    layout = found.outputs[path]
    assert layout is not None
    (part,) = layout
    return found.stream(part.stream)


def families(found: Channels) -> list[set[str]]:
    """Return the layers of each stream: makers, depthwise convolutions, norms and PReLUs."""
    members: dict[int, set[str]] = {}
    for path, layout in found.outputs.items():
        for part in layout or ():
            members.setdefault(found.root(part.stream), set()).add(path)
    return list(members.values())


def together(found: Channels, *paths: str) -> bool:
    return any(set(paths) <= family for family in families(found))


def between(run, last: nn.Module | None = None, **layers: nn.Module) -> Channels:
    """Follow first -> run(net, ...) -> last; first is a 1x1 convolution to four channels, last one from them."""
    ends = {"first": conv(3, 4), "last": last or conv(4, 2)}
    return follow(Net(lambda net, x: net.last(run(net, net.first(x))), **ends, **layers))


# ------------------------------------------------------------------------- reference networks


def build(name: str) -> nn.Module:
    return models.build(name, num_outputs=5, input_shape=(3, 32, 32))


def test_vgg_has_a_stream_for_every_layer():
    net = build("vgg11-bn-w0.125")
    found = follow(net)
    convolutions = [i for i, layer in enumerate(net.features) if isinstance(layer, nn.Conv2d)]
    assert found.makers == [*(f"features.{i}" for i in convolutions), "head.2", "head.4", "head.6"]
    assert found.normed == {f"features.{i}" for i in convolutions}
    pairs = [{f"features.{i}", f"features.{i + 1}"} for i in convolutions]
    assert families(found) == [*pairs, {"head.2"}, {"head.4"}, {"head.6"}]
    assert [stream(found, path).held for path in found.makers] == [""] * 10 + [OUTPUT]


def test_mobilenet_passes_streams_through_depthwise_convolutions_and_sums():
    net = build("mobilenetv2-w0.25")
    found = follow(net)
    expected = [{"stem.0", "stem.1", "stages.0.0.body.0", "stages.0.0.body.1"}]  # the first block does not widen
    for i, stage in enumerate(net.stages):
        leaving = set()
        for j, block in enumerate(stage):
            body = f"stages.{i}.{j}.body"
            count = len(block.body)
            leaving |= {f"{body}.{count - 2}", f"{body}.{count - 1}"}
            if count > 5:
                expected.append({f"{body}.{k}" for k in (0, 1, 3, 4)})
        expected.append(leaving)  # a stage has one width, and its blocks are added up
    expected += [{"last.0", "last.1"}, {"head"}]
    assert sorted(map(sorted, families(found))) == sorted(map(sorted, expected))
    filtered = [path for path in found.makers if stream(found, path).filtered]
    assert filtered == ["stem.0", *(path for path in found.makers if path.endswith("body.0"))]
    assert {stream(found, path).held for path in found.makers} == {"", OUTPUT}


def test_residual_stages_have_one_stream_for_their_sums():
    found = follow(build("resnet18"))
    assert together(found, "stem.0", "stem.1", *(f"stages.0.{j}.body.{k}" for j in (0, 1) for k in (3, 4)))
    for i in (1, 2, 3):
        sums = [f"stages.{i}.{j}.body.{k}" for j in (0, 1) for k in (3, 4)]
        assert together(found, *sums, f"stages.{i}.0.shortcut.0", f"stages.{i}.0.shortcut.1")
    assert len(families(found)) == 4 + 8 + 1  # a sum in every stage, an inner stream in every block, the output
    assert found.normed == set(found.makers) - {"head"}


def test_preactivated_residual_stages_have_one_stream_for_their_sums():
    found = follow(build("wrn-16-2"))
    for i in range(3):
        made = ["shortcut", "body.3"]
        following = f"stages.{i + 1}.0.activate.0" if i < 2 else "activate.0"
        assert together(found, *(f"stages.{i}.0.{name}" for name in made), f"stages.{i}.1.activate.0", following)
    assert not found.normed & {f"stages.{i}.{j}.body.3" for i in range(3) for j in range(2)}
    assert {f"stages.{i}.{j}.body.0" for i in range(3) for j in range(2)} <= found.normed


def test_grouped_convolutions_read_and_make_streams_in_lanes():
    found = follow(build("resnext-11-2x8d"))
    for i in range(3):
        lanes = {k: stream(found, f"stages.{i}.0.body.{k}").lanes for k in (0, 3, 6)}
        assert lanes == {0: 2, 3: 2, 6: 1}
        assert not together(found, f"stages.{i}.0.body.0", f"stages.{i}.0.body.3")
        assert together(found, f"stages.{i}.0.body.6", f"stages.{i}.0.shortcut.0")


def test_unet_joins_streams_side_by_side():
    found = follow(models.UNet(3, (3, 16, 16), widths=(4, 5, 6)))
    joined = [read_by(found, f"decoder.{i}.0") for i in (0, 1)]
    expected = [("encoder.1.4", "enlarge.0.1"), ("encoder.0.3", "enlarge.1.1")]
    assert [[found.root(part.stream) for part in layout] for layout in joined] == [
        [found.root(found.outputs[path][0].stream) for path in paths] for paths in expected
    ]
    assert [found.size(layout) for layout in joined] == [10, 8]
    assert {stream(found, path).held for path in found.makers[:-1]} == {""}


# ------------------------------------------------------------------------- what passes streams on


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: F.relu(x),
        lambda net, x: torch.relu(x),
        lambda net, x: x.relu(),
        lambda net, x: x.relu_(),
        lambda net, x: F.leaky_relu(x, 0.1),
        lambda net, x: F.dropout(F.gelu(x), 0.1, net.training),
        lambda net, x: F.max_pool2d(F.avg_pool2d(x, 2), 2),
        lambda net, x: F.adaptive_avg_pool2d(F.adaptive_max_pool2d(x, 4), 2),
        lambda net, x: F.interpolate(x, scale_factor=2),
        lambda net, x: 0.5 * x / 3 * 2,
        lambda net, x: x + x - F.relu(x),
        lambda net, x: torch.mul(x, other=x.tanh()),
        lambda net, x: x.mean((2, 3), keepdim=True),
        lambda net, x: torch.mean(x, dim=(-2, -1), keepdim=True),
        lambda net, x: x.contiguous().to(torch.float32),
    ],
)
def test_functions_of_single_channels_pass_a_stream_on(run):
    found = between(run)
    assert stream(found, "first").held == ""
    assert read_by(found, "last") == found.outputs["first"]


@pytest.mark.parametrize(
    "layer",
    [
        nn.ReLU(), nn.Sequential(nn.SiLU(), nn.Hardswish()), nn.MaxPool2d(2), nn.Upsample(scale_factor=2),
        nn.Identity(), nn.Dropout2d(0.2), nn.ZeroPad2d(1), nn.BatchNorm2d(4), nn.InstanceNorm2d(4), nn.PReLU(),
        nn.PReLU(4), conv(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 4, 2, groups=4),
    ],
    ids=lambda layer: str(layer).split("(")[0],
)  # fmt: skip
def test_modules_of_single_channels_pass_a_stream_on(layer):
    found = between(lambda net, x: net.layer(x), layer=layer)
    assert stream(found, "first").held == ""
    assert read_by(found, "last") == found.outputs["first"]


@pytest.mark.parametrize(
    "rows",
    [
        lambda net, x: net.flatten(x),
        lambda net, x: x.flatten(1),
        lambda net, x: torch.flatten(x, start_dim=1),
        lambda net, x: x.view(x.size(0), -1),
        lambda net, x: x.reshape(x.shape[0], -1),
        lambda net, x: x.flatten(-3),
    ],
)
def test_flattening_repeats_every_channel_once_for_each_pixel(rows):
    found = between(rows, nn.Linear(4 * 16, 2), flatten=nn.Flatten())
    assert read_by(found, "last")[0].repeat == 16
    assert stream(found, "first").held == ""


@pytest.mark.parametrize(
    "pool", [lambda net, x: x.mean((2, 3)), lambda net, x: x.mean(3).mean(-1), lambda net, x: x.mean([-1, -2])]
)
def test_means_over_all_pixels_leave_one_number_of_each_channel(pool):
    found = between(pool, nn.Linear(4, 2))
    assert read_by(found, "last") == (found.outputs["first"][0]._replace(pixels=0),)
    assert stream(found, "first").held == ""


def test_norms_and_slopes_behind_flattening_have_repeated_channels():
    found = between(
        lambda net, x: net.slope(net.norm(x.flatten(1))), nn.Linear(36, 2), norm=nn.BatchNorm1d(36), slope=nn.PReLU(36)
    )
    for path in ("norm", "slope", "last"):
        assert read_by(found, path)[0].repeat == 9
    assert stream(found, "first").held == ""


def test_a_layer_called_twice_makes_one_stream_of_what_it_reads():
    def run(net, x):
        x = F.relu(net.first(x))
        return net.last(net.shared(F.relu(net.shared(x))))

    found = follow(Net(run, first=conv(3, 4), shared=conv(4, 4), last=conv(4, 2)))
    assert together(found, "first", "shared")
    assert stream(found, "shared").held == ""


def test_a_norm_called_twice_makes_one_stream_of_what_it_reads():
    def run(net, x):
        return net.last(net.norm(net.second(F.relu(net.norm(net.first(x))))))

    found = follow(Net(run, first=conv(3, 4), second=conv(4, 4), last=conv(4, 2), norm=nn.BatchNorm2d(4)))
    assert together(found, "first", "second", "norm")
    assert found.normed == {"first", "second"}


def test_one_slope_for_all_channels_joins_nothing():
    """The same PReLU after two layers of different width is common in generators and autoencoders."""

    def run(net, x):
        return net.last(net.slope(net.second(net.slope(net.first(x)))))

    found = follow(Net(run, first=conv(3, 4), second=conv(4, 6), last=conv(6, 2), slope=nn.PReLU()))
    assert {"first"} in families(found)
    assert {"second"} in families(found)
    assert stream(found, "first").held == stream(found, "second").held == ""


def test_a_layer_that_meets_a_norm_in_one_of_two_calls_is_not_normed():
    def run(net, x):
        x = F.relu(net.first(x))
        return net.last(net.norm(net.shared(F.relu(net.shared(x)))))

    found = follow(Net(run, first=conv(3, 4), shared=conv(4, 4), last=conv(4, 2), norm=nn.BatchNorm2d(4)))
    assert "shared" not in found.normed


def test_concatenation_counts_what_is_joined_to_itself():
    found = between(lambda net, x: torch.cat([x, x.relu(), x], dim=1), conv(12, 2))
    assert [part.stream for part in read_by(found, "last")] == [0, 0, 0]
    rows = between(lambda net, x: torch.cat((x.mean((2, 3)), x.mean((2, 3))), -1), nn.Linear(8, 2))
    assert stream(found, "first").held == stream(rows, "first").held == ""


def test_a_users_own_upsampling_with_a_convolution_inside_is_followed():
    class Upsample(nn.Module):  # the name of a layer of torch's
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv(4, 6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.interpolate(x, scale_factor=2.0))

    found = between(lambda net, x: net.up(x), conv(6, 2), up=Upsample())
    assert found.makers == ["first", "up.conv", "last"]
    assert read_by(found, "last") == found.outputs["up.conv"]


def test_positions_count_within_lanes():
    assert list(positions(Stream(6))) == [0, 1, 2, 3, 4, 5]
    assert list(positions(Stream(6, lanes=2))) == [0, 1, 2, 0, 1, 2]


# ------------------------------------------------------------------------- what holds streams


def somebodys(x: Tensor) -> Tensor:
    return x + 1


fx.wrap("somebodys")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda net, x: torch.sigmoid(x), "the function sigmoid reads it"),
        (lambda net, x: x.softmax(1), "the function softmax reads it"),
        (lambda net, x: x.exp(), "the function exp reads it"),
        (lambda net, x: x + 1, "a number is added to it"),
        (lambda net, x: 1 - x, "a number is added to it"),
        (lambda net, x: 1 / x, "something is divided by it"),
        (lambda net, x: x / x.abs(), "something is divided by it"),
        (lambda net, x: somebodys(x), "somebodys reads it"),
        (lambda net, x: torch.cat(x.chunk(2, 1), 1), "the function chunk reads it"),
        (lambda net, x: torch.cat(x.split(2, 1)[::-1], 1), "the function split reads it"),
        (lambda net, x: x[:, [0, 1, 2, 3]], "the function getitem reads it"),
        (lambda net, x: x.transpose(2, 3), "the function transpose reads it"),
        (lambda net, x: x.mean(1, keepdim=True).expand(-1, 4, -1, -1), "the function mean reads it"),
        (lambda net, x: x.view(-1, 4, 8, 8), "the function view reads it"),
        (lambda net, x: torch.cat([x, x], 2), "joined to something in a way that cannot be followed"),
        (lambda net, x: x * net.gate.weight, "added to something of another layout"),
        (lambda net, x: net.norm(x), "a norm over several channels reads it"),
        (lambda net, x: net.softplus(x), "Softplus 'softplus' reads it"),
    ],
)
def test_what_is_not_understood_holds_a_stream(run, reason):
    if "chunk" in reason or "split" in reason:
        need_torch("2.9", "torch.fx cannot trace torch.cat of what a call returns before")
    layers = {"gate": nn.PReLU(4), "norm": nn.GroupNorm(2, 4), "softplus": nn.Softplus()}
    assert reason in stream(between(run, **layers), "first").held


def test_a_norm_over_the_features_of_a_row_holds_them():
    found = follow(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    assert stream(found, "0").held == "a norm over several channels reads it"


def test_every_output_of_the_network_is_held():
    def run(net, x):
        hidden = net.first(x)
        return {"logits": net.last(net.middle(hidden)), "features": [hidden]}

    found = follow(Net(run, first=conv(3, 4), middle=conv(4, 4), last=conv(4, 2)))
    assert [stream(found, path).held for path in ("first", "middle", "last")] == [OUTPUT, "", OUTPUT]


def test_a_root_that_is_itself_a_layer_is_an_output():
    assert stream(follow(nn.Linear(3, 4)), "").held == OUTPUT
    assert not follow(nn.BatchNorm1d(4)).outputs


def test_a_held_stream_holds_what_is_added_to_it():
    def run(net, x):
        x = net.first(x)
        return net.last(net.second(x) + torch.sigmoid(net.third(x)) * 0 + net.third(x))

    found = follow(Net(run, first=conv(3, 4), second=conv(4, 4), third=conv(4, 4), last=conv(4, 2)))
    assert stream(found, "first").held == ""
    assert stream(found, "second").held
    assert stream(found, "third").held


def test_lanes_that_do_not_fit_are_held():
    """Four channels in two lanes go in pairs, in four lanes one by one: no narrower network has both."""

    def run(net, x):
        x = net.first(x)
        return net.last(net.two(x) + net.four(x))

    layers = {"two": conv(8, 8, groups=2), "four": conv(8, 8, groups=4)}
    found = follow(Net(run, first=conv(3, 8), last=conv(8, 2), **layers))
    assert stream(found, "first").held == "it is read in 2 and in 4 lanes"
    assert stream(found, "two").held == "it is read in 2 and in 4 lanes"


def test_grouped_and_depthwise_readers_of_several_streams_hold_them():
    for groups, kind in ((2, "grouped"), (8, "depthwise")):
        found = follow(Net(
            lambda net, x: net.last(net.mix(torch.cat([net.first(x), net.second(x)], 1))),
            first=conv(3, 4), second=conv(3, 4), mix=conv(8, 8, 3, groups=groups), last=conv(8, 2),
        ))  # fmt: skip
        assert stream(found, "first").held == f"a {kind} convolution reads several streams"


def test_several_channels_of_each_hold_what_they_are_made_of():
    found = between(lambda net, x: net.mix(x), conv(8, 2), mix=conv(4, 8, 3, groups=4))
    assert stream(found, "first").held == "a depthwise convolution makes several channels of each"
    assert (stream(found, "mix").lanes, stream(found, "mix").held) == (4, "")


def test_branches_that_were_flattened_apart_are_held():
    """4 channels of 4 pixels and 8 of one are 24 numbers, as 12 channels of 2 would be."""

    def run(net, x):
        x = net.stem(x)
        return net.last(torch.cat([net.first(x).flatten(1), net.second(x).mean((2, 3))], 1))

    found = follow(Net(run, stem=conv(3, 4), first=conv(4, 4), second=conv(4, 8), last=nn.Linear(24, 2)))
    assert "cannot be followed" in stream(found, "first").held
    assert "cannot be followed" in stream(found, "second").held


def test_tokens_keep_their_features_last():
    """Flattening (B, T, d) does not repeat a feature but the whole row of them."""
    plain = follow(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert stream(plain, "0").held == ""
    flat = follow(nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Linear(5 * 4, 2)))
    assert "cannot be followed" in stream(flat, "0").held
    pooled = follow(nn.Sequential(nn.Linear(3, 4), nn.MaxPool1d(2), nn.Linear(2, 2)))
    assert stream(pooled, "0").held == "MaxPool1d '1' reads it"


@pytest.mark.parametrize("reader", [nn.Linear(7, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(7)])
def test_a_reader_of_another_axis_holds_a_stream(reader):
    """A Linear over pixels (even as many as there are channels), a convolution over the features of rows."""
    first = nn.Linear(3, 4) if isinstance(reader, (nn.Conv1d, nn.BatchNorm1d)) else nn.Conv1d(3, 4, 1)
    assert "cannot be followed" in stream(follow(nn.Sequential(first, reader)), "0").held


def test_rows_of_another_kind_than_batch_and_all_the_rest_are_held():
    for run in (lambda net, x: x.view(x.size(0) * 4, -1), lambda net, x: x.view(-1, 64)):
        assert stream(between(run, nn.Linear(64, 2)), "first").held == "the function view reads it"
    found = between(lambda net, x: x.flatten(1, 2), nn.Linear(4, 2))
    assert stream(found, "first").held == "the function flatten reads it"


def test_weights_that_are_used_outside_of_their_layer_hold_both_sides():
    def run(net, x):
        hidden = torch.relu(net.code(torch.relu(net.first(x))))
        return net.last(F.linear(hidden, net.code.weight.t()))

    found = follow(Net(run, first=nn.Linear(3, 6), code=nn.Linear(6, 4), last=nn.Linear(6, 2)))
    assert stream(found, "first").held == "the weights of 'code' are used outside of it"
    assert stream(found, "code").held


def test_a_subclass_with_a_forward_of_its_own_is_no_linear_map():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias) * 2

    found = follow(nn.Sequential(nn.Linear(3, 4), Scaled(4, 4), nn.Linear(4, 2)))
    assert found.makers == ["0", "2"]
    assert stream(found, "0").held == "the function linear reads it"


def test_a_network_that_cannot_be_traced_names_the_line_at_fault():
    net = Net(lambda net, x: net.first(x) if x.sum() > 0 else x, first=conv(3, 4))
    found = follow(net)
    assert not found.outputs
    assert re.fullmatch(
        r"line \d+ of test_channels\.py, `net = Net\(.*\)` \(TraceError\): a condition on values or sizes .*",
        found.untraced[""],
    )
