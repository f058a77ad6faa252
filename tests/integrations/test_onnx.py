"""ONNX files against `lb.predict`: the same mean and the same uncertainties, from onnxruntime alone."""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from leanbayes.core.student import student_of
from leanbayes.integrations import onnx as bridge
from tests.networks import Pair, small_net, Tokens

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

METHODS = {
    "rank1": lb.Rank1(components=2, init_spread=0.3),
    "batch_ensemble": lb.BatchEnsemble(components=2),
    "implicit": lb.ImplicitNodes(components=2),
    "patch": lb.ModelPatch(components=3, init_spread=0.3),
    "variance": lb.VarianceLayers(init_log_alpha=-1.0),
    "nested": lb.NestedDropout(groups=3, init_log_alpha=-1.0),
    "mc_dropout": lb.MCDropout(rate=0.3),
    "dropconnect": lb.DropConnect(rate=0.3),
    "mean_field": lb.MeanField(init_std=0.2),
    "deep_ensemble": lb.DeepEnsemble(components=2),
}
OPTIONS = {
    "additive": lb.Rank1(components=2, perturbation="additive", posterior="cauchy", prior="cauchy"),
    "crossed_patch": lb.ModelPatch(components=3, crossed=True, init_spread=0.3),
}


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))


def session_of(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options)


def assert_same(session, feed, p):
    """Compare all four outputs with a prediction, ten times closer than is promised."""
    names = ["mean", "total", "aleatoric", "epistemic"]
    assert [output.name for output in session.get_outputs()] == names
    arrays = session.run(names, {name: tensor.numpy() for name, tensor in feed.items()})
    for name, array in zip(names, arrays, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(array), getattr(p, name), atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def operators(path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def assert_every_size(name, net, row, folder):
    """Export a network and compare it for batches of other sizes than the example's."""
    with torch.no_grad():
        net[-1].weight *= 5  # probabilities that are far enough from uniform to differ between draws
    bnn = lb.convert(net, (METHODS | OPTIONS)[name]).train()
    path = bridge.export(bnn, torch.randn(3, *row), folder / "model.onnx", samples=5, seed=7)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert bnn.training
    session = session_of(path)
    for rows in (1, 3, 11):
        x = 2 * torch.randn(rows, *row)
        p = lb.predict(bnn, x, samples=5, seed=7)
        assert_same(session, {"input": x}, p)
    assert p.epistemic.max() > 1e-3
    return path


FIRST = ("rank1", "deep_ensemble")  # one model and several; draws of the other methods are folded into weights alike


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_every_method_agrees_with_predict_on_a_convolutional_network(name, tmp_path):
    path = assert_every_size(name, small_net(), (1, 8, 8), tmp_path)
    # Five draws are two networks of two members; a patched norm has three copies, and the layers before it run once.
    expected = {"batch_ensemble": 2 + 2, "deep_ensemble": 2 + 2, "patch": 1 + 3}
    assert operators(path)["Conv"] == expected.get(name, 5 + 5)


@pytest.mark.filterwarnings("ignore:ModelPatch found no norms in this network")
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS | OPTIONS)
def test_every_method_agrees_with_predict_on_an_mlp(name, tmp_path):
    assert_every_size(name, mlp(), (5,), tmp_path)


@pytest.mark.parametrize(
    "likelihood",
    [
        lb.Gaussian(heteroscedastic=True),
        pytest.param(lb.Bernoulli(), marks=pytest.mark.slow),  # below, with names
        pytest.param(lb.Gaussian(std=0.5, learn=True), marks=pytest.mark.slow),
        pytest.param(lb.Gaussian(std=0.3), marks=pytest.mark.slow),
    ],
    ids=["heteroscedastic", "bernoulli", "learned", "fixed"],
)
def test_every_likelihood_is_read_as_predict_reads_it(likelihood, tmp_path):
    bnn = lb.convert(mlp(2), lb.Rank1(components=2), likelihood=likelihood)
    path = bridge.export(bnn, torch.randn(1, 5), tmp_path / "model.onnx", samples=4)
    x = 2 * torch.randn(6, 5)
    assert_same(session_of(path), {"input": x}, lb.predict(bnn, x, samples=4))
    described = json.loads(session_of(path).get_modelmeta().custom_metadata_map["leanbayes"])
    assert described["uncertainty"] == ("variance" if likelihood.measure == "variance" else "entropy in nats")
    assert described["likelihood"] == {"name": type(likelihood).__name__, "options": likelihood.options}


def test_dense_outputs_have_uncertainties_for_every_pixel(tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, stride=2))
    bnn = lb.convert(net, lb.Rank1(components=2))
    path = bridge.export(bnn, torch.randn(2, 1, 4, 6), tmp_path / "model.onnx", samples=3)
    session, x = session_of(path), torch.randn(5, 1, 4, 6)
    p = lb.predict(bnn, x, samples=3)
    assert p.total.shape == (5, 8, 12)
    assert_same(session, {"input": x}, p)
    assert [output.shape for output in session.get_outputs()] == [["rows", 3, 8, 12], *[["rows", 8, 12]] * 3]


def test_mappings_go_in_by_name_and_records_come_out(tmp_path):
    tokens = lb.convert(Tokens(), lb.Rank1(components=2), where="mix", likelihood=lb.Bernoulli())
    example = {"tokens": torch.randint(11, (2, 5)), "scale": 0.5}
    path = bridge.export(tokens, example, tmp_path / "tokens.onnx", samples=2)
    words = torch.randint(11, (3, 5))
    session = session_of(path)
    assert_same(session, {"tokens": words}, lb.predict(tokens, {"tokens": words, "scale": 0.5}, samples=2))
    assert json.loads(session.get_modelmeta().custom_metadata_map["leanbayes"])["uncertainty"] == "entropy in nats"


@pytest.mark.slow
def test_tuples_go_in_by_number(tmp_path):
    pair = lb.convert(Pair(), lb.Rank1(components=2))
    path = bridge.export(pair, (torch.randn(2, 3), torch.randn(2, 2)), tmp_path / "pair.onnx", samples=2)
    a, b = torch.randn(4, 3), torch.randn(4, 2)
    assert_same(session_of(path), {"input_0": a, "input_1": b}, lb.predict(pair, (a, b), samples=2))


@pytest.mark.slow
def test_an_ensemble_of_converted_members_takes_turns(tmp_path):
    ensemble = lb.Ensemble([lb.convert(mlp(), lb.Rank1(components=2)) for _ in range(2)])
    x = torch.randn(4, 5)
    path = bridge.export(ensemble, x, tmp_path / "model.onnx", samples=3, seed=1)
    assert_same(session_of(path), {"input": x}, lb.predict(ensemble, x, samples=3, seed=1))
    methods = json.loads(session_of(path).get_modelmeta().custom_metadata_map["leanbayes"])["methods"]
    assert [told["method"] for told in methods] == ["deep_ensemble", "rank1"]


def test_dropout_layers_of_the_network_and_tied_layers(tmp_path):
    shared = nn.Linear(6, 6)
    net = nn.Sequential(shared, nn.ReLU(), nn.Dropout(0.5), shared, nn.Linear(6, 3))
    bnn = lb.convert(lb.convert(net, lb.MCDropout()), lb.Rank1(components=2))
    x = torch.randn(4, 6)
    path = bridge.export(bnn, x, tmp_path / "model.onnx", samples=3)
    assert_same(session_of(path), {"input": x}, lb.predict(bnn, x, samples=3))


def test_what_draws_share_is_stored_and_computed_once(tmp_path):
    net = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3))
    weights = 4 * sum(p.numel() for p in net.parameters())
    x = torch.randn(2, 40)

    def exported(method, **options):
        path = bridge.export(lb.convert(net, method, **options), x, tmp_path / "model.onnx", samples=4)
        return path.stat().st_size, operators(path)["Gemm"]

    factors = 4 * (40 + 2 * 300 + 2 * 200 + 3 + 503)  # of inputs and outputs, and the members' biases
    size, products = exported(lb.Rank1(components=2))
    assert size < weights + 4 * factors + 2**15
    assert products == 3 * 4
    size, products = exported(lb.MeanField(), where="4")
    assert size < weights + 4 * 4 * 600 + 2**15
    assert products == 2 + 4  # the layers before it run once


def test_the_file_says_what_it_is_and_nothing_of_the_machine(tmp_path, capfd, caplog):
    bnn = lb.convert(mlp(), lb.Rank1(components=2))
    before = logging.getLogger("torch.onnx").level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = bridge.export(bnn, torch.randn(2, 5), tmp_path / "sub" / "model.onnx", samples=3, seed=5, opset=18)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logging.getLogger("torch.onnx").level == before
    assert path == tmp_path / "sub" / "model.onnx"
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    model = onnx.load(path)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 18)]
    described = json.loads({entry.key: entry.value for entry in model.metadata_props}["leanbayes"])
    assert described["methods"] == [{"method": "rank1", "fields": lb.Rank1(components=2).fields()}]
    assert (described["samples"], described["seed"]) == (3, 5)
    assert described["versions"] == {"leanbayes": version("leanbayes"), "torch": str(torch.__version__)}
    assert b".py" not in path.read_bytes()  # the exporters write stack traces into their nodes


def test_a_plain_network_has_no_epistemic_uncertainty_and_many_tensors_go_into_a_second_file(tmp_path, monkeypatch):
    monkeypatch.setattr(bridge, "LARGEST_FILE", 100)
    net, x = small_net(), torch.randn(3, 1, 8, 8)
    (tmp_path / "model.onnx").write_bytes(b"an older file")
    path = bridge.export(net, x, tmp_path / "model.onnx", samples=4)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert operators(path)["Conv"] == 2
    assert_same(session_of(path), {"input": x}, lb.predict(net, x, samples=4))


class RowBound(nn.Module):
    """A network that knows how many rows it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return F.relu(self.layer(x).view(4, 3) + torch.arange(4.0)[:, None])


def test_what_cannot_be_exported_is_said_in_one_sentence(tmp_path, monkeypatch):
    bnn, x = lb.convert(RowBound(), lb.Rank1(components=2)), torch.randn(4, 5)
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"^torch cannot export this network \(.*dynamic_rows=False$"):
        bridge.export(bnn, x, path, samples=2)
    assert not path.exists()
    bridge.export(bnn, x, path, samples=2, dynamic_rows=False)
    assert_same(session_of(path), {"input": x}, lb.predict(bnn, x, samples=2, chunk_size=4))
    with pytest.raises(ValueError, match="expected samples to be a whole number of at least 1, got 0"):
        bridge.export(bnn, x, path, samples=0)
    with pytest.raises(ValueError, match="expected an example with rows"):
        bridge.export(bnn, {}, path)
    monkeypatch.setattr(bridge, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^ONNX export needs onnx and onnxscript: pip install leanbayes\[onnx\]$"):
        bridge.export(bnn, x, path)
    monkeypatch.undo()
    monkeypatch.setattr(bridge, "OLDEST_TORCH", "99.0")
    with pytest.raises(ImportError, match=r"needs torch 99.0 or later, got"):
        bridge.export(bnn, x, path)


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (lb.Categorical(), 3),
        (lb.Gaussian(heteroscedastic=True), 4),
        pytest.param(lb.Bernoulli(), 2, marks=pytest.mark.slow),  # the operations are those of classes
    ],
    ids=["categorical", "gaussian", "bernoulli"],
)
def test_a_student_is_one_pass_of_the_graph(likelihood, outputs, tmp_path):
    student = student_of(mlp(outputs), likelihood, torch.randn(2, 5))
    with torch.no_grad():
        student.network[-1].weight.normal_()
        student.network[-1].bias.normal_()
    path = bridge.export(student, torch.randn(2, 5), tmp_path / "student.onnx")
    x = 2 * torch.randn(7, 5)
    assert_same(session_of(path), {"input": x}, lb.predict(student, x))
    assert operators(path)["Gemm"] + operators(path)["MatMul"] == 3
    described = json.loads(session_of(path).get_modelmeta().custom_metadata_map["leanbayes"])
    assert described["methods"] == [{"method": "student", "fields": {}}]
    assert described["samples"] == 1


class Flat(nn.Module):
    """A network whose single output has no axis: the wider one of a student keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(1)

    def forward(self, x):
        return self.inner(x).squeeze(-1)


def test_a_student_without_an_axis_for_its_output_is_exported(tmp_path):
    student = student_of(Flat(), lb.Gaussian(), torch.randn(2, 5))
    with torch.no_grad():
        student.network.inner[-1].weight.normal_()
    x, session = torch.randn(7, 5), session_of(bridge.export(student, torch.randn(2, 5), tmp_path / "student.onnx"))
    assert_same(session, {"input": x}, lb.predict(student, x))
    plain = Flat()
    path = bridge.export(plain, torch.randn(2, 5), tmp_path / "plain.onnx", likelihood=lb.Gaussian())
    assert_same(session_of(path), {"input": x}, lb.predict(plain, x, lb.Gaussian()))
