"""`Predictor`: the three ways to run draws give one answer; it follows its model, counts its memory, and has a lock."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.core import batched
from leanbayes.methods import all_methods
from tests.golden.problems import batch, converted, NETWORKS

from .networks import small_net

X = torch.randn(11, 1, 8, 8, generator=torch.Generator().manual_seed(0))
METHODS = ("rank1:default", "implicit:bias_node", "batch_ensemble:default", "patch:crossed", "mean_field:default")
SOME = ("rank1:additive", "mc_dropout:default", "nested:default", "dropconnect:default", "variance:neuron")
PAIRS = [*itertools.product(NETWORKS, METHODS), *zip(itertools.cycle(("mlp", "conv", "transformer")), SOME)]


def folded(model: nn.Module, x, **options) -> lb.Prediction:
    """Predict draw by draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(batched.SMALL, "cpu", 0)
        patch.setitem(batched.TILED, "cpu", 0)
        return lb.predict(model, x, **options)


def way(predictor: lb.Predictor, x) -> str:
    (leaf,) = predictor.leaves
    return leaf.way(x, len(x))


def close(ours: lb.Prediction, theirs: lb.Prediction) -> None:
    for name in ("samples", "mean", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("network", "method"), PAIRS)
def test_all_ways_give_the_same_probabilities(network, method, monkeypatch):
    model, (x, _) = converted(network, method), batch(network)
    expected = folded(model, x, samples=6, seed=5)
    predictor = lb.Predictor(model, samples=6, seed=5)
    assert way(predictor, x) == "stacked"
    close(predictor(x), expected)
    assert predictor.leaves[0].batched is not None  # it did not give up
    close(lb.predict(model, x, samples=6, seed=5, chunk_size=4), expected)
    order = torch.randperm(len(x))
    close(predictor(x[order]), folded(model, x[order], samples=6, seed=5))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", ["rank1:default", "implicit:default", "batch_ensemble:default", "patch:default"])
def test_factors_per_draw_give_the_same_probabilities(network, method, monkeypatch):
    monkeypatch.setattr(batched, "LARGEST_STACK", 0)
    model, (x, _) = converted(network, method), batch(network)
    predictor = lb.Predictor(model, samples=6, seed=5)
    assert way(predictor, x) == "factored"
    close(predictor(x), folded(model, x, samples=6, seed=5))
    assert predictor.leaves[0].batched is not None


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("network", [name for name in NETWORKS if name != "lstm"])
@pytest.mark.parametrize(
    "method", ["rank1:default", "rank1:input", "implicit:default", "batch_ensemble:default", "patch:default"]
)
def test_one_batch_of_all_draws_gives_the_same_probabilities(network, method, monkeypatch):
    monkeypatch.setitem(batched.TILED, "cpu", 2**30)
    model, (x, _) = converted(network, method), batch(network)
    predictor = lb.Predictor(model, samples=6, seed=5)
    ran = way(predictor, x)
    if any(layer.together() is None for _, layer in lb.stochastic_layers(model)):
        assert ran != "tiled"
        assert (network, method) in (("unet", "patch:default"), ("tied", "patch:default"))  # another output layer
        return
    for rows in (len(x), 1, 3):
        close(predictor(x[:rows]), folded(model, x[:rows], samples=6, seed=5))
    assert way(predictor, x) == ran == "tiled"
    assert predictor.leaves[0].batched.compared
    assert torch.equal(predictor(x).samples, lb.predict(model, x, samples=6, seed=5).samples)
    model.train()  # another call of the model has no part in it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    close(predictor(x), folded(model, x, samples=6, seed=5))


class Mixes(nn.Module):
    """Subtracts the mean over the rows, before or after the first stochastic layer."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.a, self.b, self.late = nn.Linear(4, 4), nn.Linear(4, 3), late

    def forward(self, x):
        h = self.a(x if self.late else x / x.abs().sum(0))
        return self.b(h - 0.01 * h.mean(0) if self.late else h)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_rows_that_depend_on_each_other_do_not_share_a_batch(late, half, monkeypatch):
    monkeypatch.setitem(batched.TILED, "cpu", 2**30)
    torch.manual_seed(0)
    model, x = lb.convert(Mixes(late), lb.Rank1()), torch.randn(6, 4)
    predictor = lb.Predictor(model, samples=6)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        assert way(predictor, x) == "tiled"
        found = predictor(x).samples
        assert way(predictor, x) != "tiled"
        assert not batched.BatchedDraws(predictor.leaves[0].draws)._tiles().known()
    torch.testing.assert_close(found, folded(model, x, samples=6).samples, atol=1e-2 if half else 1e-5, rtol=0)


@pytest.mark.parametrize("method", [lb.Rank1(), lb.ImplicitNodes(), lb.ModelPatch()], ids=lambda m: m.name)
def test_one_batch_of_all_draws_is_as_exact_under_autocast(method, monkeypatch):
    torch.manual_seed(0)
    model, x = lb.convert(small_net(), method), torch.randn(40, 1, 8, 8)
    exact = folded(model, x, samples=8).samples
    with torch.autocast("cpu", torch.bfloat16):
        theirs = folded(model, x, samples=8).samples
        monkeypatch.setitem(batched.TILED, "cpu", 2**30)
        predictor = lb.Predictor(model, samples=8)
        ours = predictor(x).samples
        assert way(predictor, x) == "tiled"
    assert (ours - exact).square().mean() <= 1.5**2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("method", [lb.Rank1(), lb.ImplicitNodes(), lb.MeanField()], ids=lambda m: m.name)
def test_autocast_is_as_exact_together_as_draw_by_draw(method):
    model = lb.convert(small_net(), method)
    exact = folded(model, X, samples=8).samples
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = folded(model, X, samples=8).samples, lb.predict(model, X, samples=8).samples
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()


@pytest.mark.parametrize("small", [0, batched.SMALL["cpu"]], ids=["draw by draw", "together"])
@pytest.mark.parametrize("memory", [0, 2**28])
@pytest.mark.parametrize("name", ["rank1", "mean_field", "patch"])
def test_training_between_two_calls_takes_effect(name, memory, small, monkeypatch):
    monkeypatch.setitem(batched.SMALL, "cpu", small)
    model = lb.convert(small_net(), all_methods()[name]())
    predictor = lb.Predictor(model, samples=4, memory=memory)
    before = predictor(X).mean
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lb.elbo(model, X, torch.zeros(11, dtype=torch.long), num_data=11).loss.backward()
    optimizer.step()
    now = predictor(X)
    assert not torch.allclose(now.mean, before, atol=1e-4)
    assert torch.equal(now.samples, lb.predict(model, X, samples=4).samples)


def test_loaded_and_replaced_parameters_take_effect_and_data_needs_refresh():
    torch.manual_seed(0)
    model = lb.convert(nn.Sequential(nn.Linear(64, 5)), lb.Rank1())
    x = X.flatten(1)
    predictor = lb.Predictor(model, samples=4)
    model.load_state_dict({name: tensor + 0.1 for name, tensor in model.state_dict().items()})
    assert torch.equal(predictor(x).mean, lb.predict(model, x, samples=4).mean)
    model[0].base.weight = nn.Parameter(torch.randn(5, 64))
    assert torch.equal(predictor(x).mean, lb.predict(model, x, samples=4).mean)
    model[0].base.weight.data.mul_(2.0)
    predictor.refresh()
    assert torch.equal(predictor(x).mean, lb.predict(model, x, samples=4).mean)


def test_buffers_of_norms_take_effect():
    model = lb.convert(small_net(), lb.Rank1())
    predictor = lb.Predictor(model, samples=4)
    before = predictor(X).mean
    model.train()(5 * X + 3)
    assert not torch.equal(predictor(X).mean, before)
    assert torch.equal(predictor(X).mean, lb.predict(model, X, samples=4).mean)


def test_threads_get_the_answers_of_one_after_the_other():
    model = lb.convert(small_net(), lb.Rank1())
    predictor = lb.Predictor(model, samples=4)
    inputs = [X * (1 + i / 8) for i in range(8)] + [X.repeat(90, 1, 1, 1)]
    expected = [predictor(x).mean for x in inputs]
    found: dict[int, torch.Tensor] = {}

    def work(mine: int) -> None:
        for _ in range(3):
            for i in range(mine, len(inputs), 3):
                found[i] = predictor(inputs[i]).mean

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], mean) for i, mean in enumerate(expected))


def test_memory_counts_what_is_kept(monkeypatch):
    model = lb.convert(nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 5)), lb.Rank1())
    x, weights = X.flatten(1), 4 * (64 * 500 + 500 * 5)
    predictor = lb.Predictor(model, samples=8)
    assert predictor.memory == 0  # nothing was sampled yet
    predictor(x)
    assert 8 * weights <= predictor.memory <= 9 * weights
    frugal = lb.Predictor(model, samples=8, memory=0)
    assert torch.equal(frugal(x).mean, predictor(x).mean)
    assert 0 < frugal.memory < weights  # variables alone
    monkeypatch.setitem(batched.SMALL, "cpu", 0)
    half = lb.Predictor(model, samples=8, memory=int(4.5 * weights))
    half(x)
    assert 5 * weights <= half.memory <= 6 * weights  # four draws, and the weights of the twin


@pytest.mark.parametrize("memory", [-1, None, "1"])
def test_a_wrong_memory_gives_one_clear_sentence(memory):
    with pytest.raises(ValueError, match="expected memory to be a number of bytes of at least 0, got"):
        lb.Predictor(lb.convert(nn.Linear(3, 2), lb.Rank1()), memory=memory)


class Branches(nn.Module):
    """Looks at values after the first stochastic layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(h if float(h.detach().mean()) > 0 else -h)


class Overwrites(Branches):
    """Adds the outputs of a stochastic layer to its input, in place."""

    def forward(self, x):
        x += self.a(x)
        return self.b(x)


class Random(Branches):
    """Draws its own random numbers, which do not matter."""

    def forward(self, x):
        return self.b(self.a(x)) + 0 * torch.rand(3)


class Remembers(Branches):
    """Keeps an activation as an attribute."""

    def forward(self, x):
        self.hidden = self.a(x)
        return self.b(self.hidden)


@pytest.mark.parametrize("network", [Branches, Overwrites, Random, Remembers], ids=lambda n: n.__name__)
def test_networks_that_cannot_run_together_run_draw_by_draw(network):
    torch.manual_seed(0)
    model, x = lb.convert(network(), lb.Rank1()), torch.randn(6, 4)
    predictor, given = lb.Predictor(model, samples=5), x.clone()
    for _ in range(2):
        close(predictor(x), folded(model, x, samples=5))
    assert torch.equal(x, given)
    assert (predictor.leaves[0].batched is None) == (network is not Remembers)
    assert "hidden" not in vars(model)


def test_hooks_of_the_caller_see_tensors():
    model, seen = lb.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), lb.Rank1()), []
    model[1].register_forward_hook(lambda module, args, y: seen.append(y.numpy().sum()))
    lb.predict(model, torch.randn(6, 4), samples=5)
    assert len(seen) == 5


def test_a_wrong_input_does_not_change_the_way_of_later_calls():
    model, x = lb.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), lb.Rank1()), torch.randn(6, 4)
    predictor = lb.Predictor(model)
    before = predictor(x)
    with pytest.raises(ValueError, match="expected an input with 4 features on axis 1"):
        predictor(torch.randn(6, 5))
    assert torch.equal(predictor(x).samples, before.samples)


def test_rows_that_are_averaged_are_run_as_a_whole():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    model, x = lb.convert(net, lb.Rank1()), torch.randn(6, 4)
    predictor = lb.Predictor(model, samples=3)
    assert way(predictor, x) == "folded"
    expected = torch.stack([lb.draw(model, index=i).eval()(x).softmax(1) for i in range(3)])
    torch.testing.assert_close(predictor(x).samples, expected)


def test_a_built_predictor_gives_the_numbers_of_predict():
    for method in (lb.Rank1(), lb.BatchEnsemble(), lb.DeepEnsemble(components=2), lb.MCDropout()):
        model = lb.convert(small_net(), method)
        predictor = lb.Predictor(model, samples=7, seed=2)
        for x in (X, X[:1], X.repeat(40, 1, 1, 1), X):
            assert torch.equal(predictor(x).samples, lb.predict(model, x, samples=7, seed=2).samples)


MEASURE = """
import sys, torch, leanbayes as lb
torch.set_num_threads(1)
from torch import nn
from leanbayes.core import batched
net = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(512, 512), nn.ReLU())), nn.Linear(512, 10))
def kilobytes(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])
def most(bnn, x, samples):
    predictor = lb.Predictor(bnn, samples=samples, keep_samples=False, memory=0)
    predictor(x)
    open("/proc/self/clear_refs", "w").write("5")
    predictor(x)
    return kilobytes("VmHWM")
for case in sys.argv[1:]:
    method, small, rows = case.split(",")
    batched.SMALL["cpu"] = int(small)
    bnn, x = lb.convert(net, getattr(lb, method)()), torch.randn(int(rows), 512)
    print(case, most(bnn, x, 16), most(bnn, x, 32))
"""
CASES = ("Rank1,0,512", f"Rank1,{2**21},16", "MeanField,0,64")


@pytest.fixture(scope="module")
def memory_used():
    """Return the kilobytes at 16 and 32 draws of each case; memory is given back at once, so the most is the need."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, *CASES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {case: (int(few), int(many)) for case, few, many in map(str.split, run.stdout.splitlines())}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux says how much memory was used")
@pytest.mark.parametrize("case", CASES)
def test_memory_does_not_grow_with_the_draws(memory_used, case):
    few, many = memory_used[case]
    assert many <= 1.05 * few


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "foreach adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_every_optimizer_take_effect(name):
    """The kernels of fused optimisers change parameters without a new version."""
    model, x = lb.convert(nn.Linear(6, 3), lb.Rank1()), torch.randn(5, 6)
    predictor, optimizer = lb.Predictor(model, samples=4), OPTIMIZERS[name](model.parameters())
    before = predictor(x).mean
    for _ in range(2):
        lb.elbo(model, x, torch.zeros(5, dtype=torch.long), num_data=5).loss.backward()
        optimizer.step()
        assert torch.equal(predictor(x).samples, lb.predict(model, x, samples=4).samples)
    assert not torch.allclose(predictor(x).mean, before, atol=1e-4)


def test_a_training_by_fit_takes_effect():
    model, x = lb.convert(nn.Linear(6, 3), lb.Rank1()), torch.randn(32, 6)
    predictor = lb.Predictor(model, samples=4)
    predictor(x)
    lb.fit(model, (x, torch.zeros(32).long()), lb.Recipe(epochs=1, optimizer="adam", lr=0.01), progress=False)
    assert torch.equal(predictor(x).samples, lb.predict(model, x, samples=4).samples)


def test_steps_of_another_model_keep_the_folded_weights():
    model, other = lb.convert(nn.Linear(6, 3), lb.Rank1()), nn.Linear(6, 3)
    predictor = lb.Predictor(model, samples=4)
    predictor(torch.randn(5, 6))
    kept = predictor.changes
    other(torch.randn(5, 6)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1, fused=True).step()
    predictor(torch.randn(5, 6))
    assert predictor.changes is kept
