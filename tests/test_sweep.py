"""The sweep over networks, on miniature copies of the patterns that it found in other libraries."""

import json
import tomllib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from tests.test_rows import Graph, Pair, Queries, Reads, Table, TimeFirst, Windows
from tools import network_sweep as sweep
from tools import sweep_catalogue


class NormAct(nn.BatchNorm1d):
    """A norm with an activation, as timm's BatchNormAct2d."""

    def forward(self, x):
        return torch.relu(super().forward(x))


class OwnLinear(nn.Linear):
    """A Linear with a forward of its own, as timm's."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class ScaleNorm(nn.Module):
    """A norm by the root mean square, as Llama's."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class Experts(nn.Module):
    """A mixture of experts with raw parameters."""

    def __init__(self):
        super().__init__()
        self.gate, self.w, self.out = nn.Linear(8, 2), nn.Parameter(torch.randn(2, 8, 8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.einsum("be,eod,bd->bo", self.gate(x).softmax(-1), self.w, x))


def x(*shape):
    return {"_x": torch.randn(4, *shape)}


def plain():
    return nn.Sequential(OwnLinear(8, 16), NormAct(16), OwnLinear(16, 16), nn.ReLU(), ScaleNorm(16), OwnLinear(16, 3))


PATTERNS = {
    "two frames": (Pair, lambda: x(8) | {"_y": torch.randn(4, 8)}),
    "time first": (TimeFirst, lambda: x(8, 8)),
    "table of positions": (lambda: Table(16), lambda: x(8)),
    "windows": (Windows, lambda: x(8, 8)),
    "learned queries": (Queries, lambda: x(8)),
    "weights that are read": (Reads, lambda: x(8)),
    "own forwards": (plain, lambda: x(8)),
    "experts": (Experts, lambda: x(8)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_method_is_right_or_refuses_with_a_remedy(name):
    make, inputs = PATTERNS[name]
    torch.manual_seed(0)
    net, given = make(), inputs()
    for method in sweep.METHODS:
        found = sweep.attempt(net, given, method)
        assert sweep.outcome(found) in ("ok", "refused"), (method, found)
        if "refused" in found:
            assert method == "nested"
        elif method in sweep.PER_ROW:
            assert found["noise_moves"] > 0 or method == "mc_dropout"


def test_wrong_rows_are_noticed():
    """A layer that reads time-first activations as if they were batch-first is a fault."""
    torch.manual_seed(0)
    bnn = lb.convert(TimeFirst(), lb.Rank1(), batch_axis={"q": 0})
    found = sweep.row_changes(bnn, {"_x": torch.randn(4, 4, 8)})
    assert found["noise_leak"] > sweep.TOLERANCE


class Aside(nn.Module):
    """A layer whose output is not in the network's, as the pooler of BigBird."""

    def __init__(self):
        super().__init__()
        self.body, self.pooler, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        self.pooler(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("method", ["rank1", "batch_ensemble"])
def test_a_layer_without_gradient_in_the_plain_network_has_none_after_conversion(method):
    torch.manual_seed(0)
    found = sweep.attempt(Aside(), x(8), method)
    assert (found["without_gradient"], found["idle"]) == ([], 1)
    assert sweep.outcome(found) == "ok"


def test_a_gradient_that_conversion_loses_is_noticed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    bnn = lb.convert(net, lb.BatchEnsemble())
    bnn[0].register_forward_hook(lambda layer, args, output: output.detach())
    found = sweep.training_step(bnn, x(8), net)
    assert found["idle"] == 0
    assert "0.bias" in found["without_gradient"]


class Chaos(nn.Module):
    """Every sine makes a difference up to eight times as large, as untrained deep networks may."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        for _ in range(8):
            x = torch.sin(8 * x)
        return x


def test_draws_that_float32_cannot_tell_from_passes_are_compared_in_float64():
    torch.manual_seed(0)
    bnn = lb.convert(Chaos(), lb.BatchEnsemble())
    found = sweep.draw_difference(bnn, x(8))
    assert found["draw"] > sweep.TOLERANCE
    assert found["rounding"] > sweep.TOLERANCE
    assert sweep.beyond_float32(found)


def test_a_draw_of_other_weights_is_noticed_whatever_the_rounding():
    found = {"draw": 0.1, "draw_in_float64": 0.1, "rounding": 0.2}
    assert not sweep.beyond_float32(found)
    assert not sweep.beyond_float32(found | {"draw_in_float64": 1e-12, "rounding": 1e-6})
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), lb.Rank1())
    bnn.register_forward_hook(lambda net, args, output: output * (1 + 1e-3) if net is bnn else output)
    found = sweep.draw_difference(bnn, x(8))
    assert found["draw"] > sweep.TOLERANCE
    assert not sweep.beyond_float32(found)


def test_a_graph_is_one_draw():
    torch.manual_seed(0)
    bnn = lb.convert(Graph(), lb.Rank1())
    with pytest.warns(UserWarning, match="mixed"):
        bnn(torch.randn(4, 8), torch.rand(4, 4))
    assert lb.draw(bnn)(torch.randn(4, 8), torch.rand(4, 4)).shape == (4, 3)


def test_the_catalogue_is_as_large_as_promised():
    libraries = [name.split("/")[0] for name in sweep_catalogue.catalogue()]
    assert libraries.count("timm") >= 60
    assert libraries.count("torchvision") >= 40
    assert libraries.count("transformers") >= 40
    assert len(libraries) >= 150


def test_no_network_is_both_in_the_catalogue_and_left_out():
    """Left out are families of timm and transformers, and single networks of torchvision, each once."""
    networks, left_out = sweep_catalogue.catalogue(), sweep_catalogue.excluded()
    assert set(networks) & set(left_out) == set()
    families = {f"transformers/{family}" for family in sweep_catalogue.covered("transformers")}
    assert families & set(left_out) == set()
    assert all(reason.strip() for reason in left_out.values())
    read = tomllib.loads(sweep_catalogue.CATALOGUE.read_text())["excluded"]
    listed = [f"{library}/{name}" for library, why in read.items() for names in why.values() for name in names]
    assert len(listed) == len(set(listed)) == len(left_out)


def test_a_refusal_without_remedy_or_end_is_a_fault():
    assert sweep.outcome({"refused": "no"}) == "UNHELPFUL"
    assert sweep.outcome({"refused": "name layers with where="}) == "refused"
    assert sweep.outcome({"refused": "name layers with where=" + "x" * sweep.LONGEST_REFUSAL}) == "UNHELPFUL"


def test_a_sweep_summarises_what_it_found(tmp_path):
    good = {"draw": 0.0, "loss": 1.0, "without_gradient": [], "covered": 0.99, "norms": 2, "norms_converted": 2}
    results = {
        "timm/a": {"methods": {"rank1": good, "patch": good}, "seconds": 30.0},
        "timm/b": {"methods": {"rank1": good | {"draw": 0.1}, "patch": {"refused": "no"}}, "seconds": 30.0},
        "timm/c": {"failed": "took more than 900 seconds"},
    }
    for name, result in results.items():
        sweep.file_of(tmp_path, name).write_text(json.dumps({"name": name} | result))
    report = sweep.summarise(tmp_path, [*results, "timm/missing"])
    assert (report["networks"], report["pairs"], report["cpu_minutes"]) == (2, 4, 1.0)
    assert report["outcomes"] == {"ok": 2, "DRAW": 1, "UNHELPFUL": 1}
    assert report["median_share_of_weights_rank1"] == 0.99
    assert [fault.split(":")[0] for fault in report["faults"]] == ["timm/c", "timm/b, rank1", "timm/b, patch"]
