"""SWAG against moments computed from the recorded path, on a quadratic loss with known noise and on networks."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.methods.swag import Moments
from leanbayes.runtime._files import read_tensors, write_tensors
from leanbayes.training.recipe import rate
from leanbayes.training.state import HEADER, STATE

X = torch.randn(70, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
RECIPE = lb.Recipe(epochs=6, batch_size=16, accelerator="cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).double()


def expected_moments(path: list[torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and covariance by the formulas of the paper, from the whole path in float64."""
    weights = torch.stack(path).double()
    mean = weights.mean(0)
    variance = (weights.square().mean(0) - mean.square()).clamp(min=0)
    running = torch.stack([weights[: i + 1].mean(0) for i in range(len(path))])
    columns = (weights - running)[-rank:].T
    return mean, 0.5 * (torch.diag(variance) + columns @ columns.T / (columns.shape[1] - 1))


@pytest.mark.parametrize("epochs", [5, 12])
def test_the_moments_of_sgd_on_a_noisy_quadratic_are_those_of_its_path(epochs):
    """The loss is (w - c)' A (w - c) / 2 with Gaussian noise of a known size on its gradient."""
    generator = torch.Generator().manual_seed(3)
    curvature = torch.diag(torch.tensor([1.0, 3.0, 0.5, 2.0, 1.5]))
    centre = torch.arange(5.0)
    net = nn.Linear(5, 1, bias=False)
    moments, path = Moments(net, rank=8), []
    for _ in range(epochs):
        for _ in range(10):
            noise = 0.5 * torch.randn(5, generator=generator)
            net.weight.data -= 0.1 * ((net.weight.data[0] - centre) @ curvature + noise)
        moments.collect(net)
        path.append(net.weight.data[0].clone())
    mean, covariance = expected_moments(path, 8)
    draws = 20_000
    sampled = torch.stack([moments.draw(index) for index in range(draws)]).double()
    torch.testing.assert_close(moments.mean.double(), mean, rtol=1e-5, atol=1e-6)
    deviation = (sampled.mean(0) - mean).abs()
    assert (deviation <= 5 * (covariance.diagonal() / draws).sqrt()).all()
    spread = covariance.diagonal()
    error = ((torch.outer(spread, spread) + covariance.square()) / draws).sqrt()  # of a Gaussian's covariance
    assert ((sampled.T.cov() - covariance).abs() <= 5 * error).all()


def test_large_weights_with_small_steps_keep_their_variance():
    net, path = nn.Linear(3, 1, bias=False), []
    moments = Moments(net, rank=2)
    for step in range(6):
        net.weight.data = torch.tensor([[100.0, 1000.0, -500.0]]) + 1e-2 * math.sin(step)
        moments.collect(net)
        path.append(net.weight.data[0].clone())
    exact = torch.stack(path).double().var(0, correction=0)
    torch.testing.assert_close(moments.squares.double() / 6, exact, rtol=0.02, atol=0)


def test_the_collected_weights_are_those_after_each_further_epoch():
    model, seen = lb.convert(network(), lb.SWAG(components=3, rank=2, extra_epochs=0.5)), []

    def look(state):
        moments = model.kept[0] if model.kept else None
        seen.append((state.epoch, flat(state.model), moments, 0 if moments is None else int(moments.count)))

    history = lb.fit(model, (X, Y), RECIPE, callbacks=[look], progress=False)
    assert [row["epoch"] for row in history] == list(range(1, 10))
    assert [count for *_, count in seen] == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert all(row["lr"] == pytest.approx(0.2 * RECIPE.lr) for row in history[6:])
    moments = seen[-1][2]
    mean, _ = expected_moments([weights for epoch, weights, *_ in seen if epoch > 6], 2)
    torch.testing.assert_close(moments.mean.double(), mean, rtol=1e-5, atol=1e-6)
    for index, member in enumerate(model.members):
        torch.testing.assert_close(flat(member), moments.draw(index).double())


def test_the_training_begins_as_that_of_the_plain_network():
    plain, swag, at = network(), lb.convert(network(), lb.SWAG(components=2)), []
    lb.fit(plain, (X, Y), RECIPE, progress=False)
    lb.fit(swag, (X, Y), RECIPE, callbacks=[lambda state: at.append(flat(state.model))], progress=False)
    assert torch.equal(at[5], flat(plain))
    assert len(at) == 8


def test_norm_statistics_are_collected_again_for_each_draw():
    model = lb.convert(network(), lb.SWAG(components=3))
    lb.fit(model, (X, Y), RECIPE, progress=False)
    for member in model.members:
        inputs = member[0](X).detach()
        torch.testing.assert_close(member[1].running_mean, inputs.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(member[1].running_var, inputs.var(0), rtol=1e-4, atol=1e-5)
    means = torch.stack([member[1].running_mean for member in model.members])
    assert means.std(0).min() > 0


def test_predictions_draws_and_files(tmp_path):
    model = lb.convert(network(), lb.SWAG(components=3), likelihood=lb.Categorical())
    lb.fit(model, (X, Y), RECIPE, progress=False)
    p = lb.predict(model, X, samples=6)
    each = torch.stack([member.eval()(X).softmax(1) for member in model.members])
    torch.testing.assert_close(p.mean, each.mean(0))
    assert p.epistemic.max() > 0
    assert torch.equal(lb.draw(model, index=4).eval()(X), model.members[1](X))
    lb.save(model, tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", network())
    for twin in (loaded, copy.deepcopy(model)):
        assert torch.equal(lb.predict(twin, X, samples=6).mean, p.mean)
    assert loaded.method == model.method
    with pytest.raises(ValueError, match="ensemble of whole networks has no posterior"):
        lb.save(model, tmp_path / "posterior.safetensors", only="posterior")


def test_the_price_counts_copies_and_further_epochs():
    model, plain = lb.convert(network(), lb.SWAG(components=3, extra_epochs=0.5)), network()
    result = lb.evaluate(model, (X, Y), plain=plain)
    size = sum(p.numel() for p in plain.parameters())
    assert result.cost.extra_parameters == 2 * size
    assert result.cost.train_step_ratio == 1.5
    assert result.cost.passes == 3


@pytest.mark.parametrize("epochs", [3, 7, 8])
def test_a_killed_training_resumes_to_the_same_members(tmp_path, epochs):
    method = lb.SWAG(components=2, rank=2)
    whole, part = (lb.convert(network(), method) for _ in range(2))
    lb.fit(whole, (X, Y), RECIPE, progress=False)

    def kill(state):
        if state.epoch == epochs:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lb.fit(part, (X, Y), RECIPE, folder=tmp_path, callbacks=[kill], progress=False)
    for again in (lb.convert(network(), method), part):  # a new process, or the same one
        lb.fit(again, (X, Y), RECIPE, folder=tmp_path, resume=True, progress=False)
        for name, tensor in whole.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_a_loop_of_ones_own():
    method = lb.SWAG(components=2)
    model = lb.convert(network(), method)
    trainee = model.members[0]
    with pytest.raises(ValueError, match=r"weights of at least 2 epochs, got 0; call model.collect\(\)"):
        method.after_training(model, (X, Y))
    optimizer = torch.optim.SGD(trainee.parameters(), lr=0.05)
    for _ in range(3):
        nn.functional.cross_entropy(trainee(X), Y).backward()
        optimizer.step()
        model.collect()
    method.after_training(model, (X, Y))
    assert not torch.equal(flat(model.members[0]), flat(model.members[1]))
    assert not model.kept


def test_further_epochs_have_a_constant_rate_after_any_schedule():
    for schedule in ("cosine", "step", "linear", "straight", "constant"):
        recipe = lb.Recipe(epochs=10, schedule=schedule, extra_epochs=3, extra_rate=0.3)
        assert [rate(recipe, t) for t in (10, 11.5, 12.9)] == [0.3] * 3
        assert rate(recipe, 9.5) == rate(lb.Recipe(epochs=10, schedule=schedule), 9.5)
    assert "extra_epochs" not in lb.Recipe().fields()
    assert lb.SWAG().extended(lb.Recipe(epochs=3)).extra_epochs == 2
    assert lb.SWAG().extended(lb.Recipe(epochs=41)).extra_epochs == 11
    assert lb.SWAG().extended(lb.Recipe(epochs=41, extra_epochs=5)).extra_epochs == 5


def test_bad_input_has_clear_errors():
    with pytest.raises(ValueError, match="expected rank to be a whole number of at least 2, got 1"):
        lb.SWAG(rank=1)
    with pytest.raises(ValueError, match="expected a plain network, got one that is converted already"):
        lb.convert(lb.convert(network(), lb.Rank1()), lb.SWAG())
    with pytest.raises(TypeError, match=r"expected a model of lb\.convert"):
        lb.SWAG().after_training(network(), (X, Y))
    with pytest.raises(ValueError, match="expected extra_epochs to be a whole number"):
        lb.Recipe(extra_epochs=-1)


def test_real_targets_learn_their_noise_with_the_one_network():
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    y = X[:, :1] + 0.1 * torch.randn(70, 1, generator=torch.Generator().manual_seed(2))
    likelihood = lb.Gaussian(std=0.5, learn=True)
    model = lb.convert(net, lb.SWAG(components=4), likelihood=likelihood)
    lb.fit(model, (X, y), lb.Recipe(epochs=30, batch_size=16, lr=0.02, accelerator="cpu"), progress=False)
    p = lb.predict(model, X)
    assert float((p.mean - y).square().mean().sqrt()) < 0.25
    assert float(likelihood.log_std.detach().exp()) < 0.4


def early(**fields: object) -> tuple[nn.Module, lb.training.History]:
    """Train on noise with patience: the validation gets worse soon."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    y = torch.randint(3, (70,), generator=torch.Generator().manual_seed(5))
    model = lb.convert(net, lb.SWAG(components=2, extra_epochs=0.5))
    recipe = lb.Recipe(epochs=40, batch_size=16, patience=3, schedule="constant", accelerator="cpu")
    return model, lb.fit(model, (X[:50], y[:50]), recipe, validation=(X[50:], y[50:]), progress=False, **fields)


def test_after_an_early_stop_the_further_epochs_begin_at_the_best_state(tmp_path):
    seen, states = [], {}

    def look(state):
        seen.append(state.row.get("extra", False))
        states[state.epoch] = flat(state.model)

    whole, history = early(callbacks=[look])
    stopped = seen.index(True)
    scores = [row["valid_nll"] for row in history[:stopped]]
    assert stopped < 40
    assert stopped - (scores.index(min(scores)) + 1) == 3
    assert sum(seen) == max(2, math.ceil(stopped / 2))
    best, last, first = (states[epoch] for epoch in (stopped - 3, stopped, stopped + 1))
    assert (first - best).norm() < (first - last).norm()

    def kill(state):
        if state.epoch == stopped:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        early(folder=tmp_path, callbacks=[kill])
    again, rows = early(folder=tmp_path, resume=True)
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in history]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_the_average_of_the_path_is_one_network(tmp_path):
    model, path = lb.convert(network(), lb.SWAG(average=True, extra_epochs=0.5), likelihood=lb.Categorical()), []
    lb.fit(model, (X, Y), RECIPE, callbacks=[lambda state: path.append(flat(state.model))], progress=False)
    (member,) = model.members
    torch.testing.assert_close(flat(member), torch.stack(path[6:]).mean(0), rtol=1e-5, atol=1e-6)
    inputs = member[0](X).detach()
    torch.testing.assert_close(member[1].running_mean, inputs.mean(0), rtol=1e-4, atol=1e-5)
    p = lb.predict(model, X, samples=16)
    torch.testing.assert_close(p.mean, member.eval()(X).softmax(1))
    assert p.epistemic.max() < 1e-6
    assert type(lb.draw(model)) is nn.Sequential
    lb.save(model, tmp_path / "model.safetensors")
    assert torch.equal(lb.predict(lb.load(tmp_path / "model.safetensors", network()), X).mean, p.mean)
    cost = lb.evaluate(model, (X, Y), plain=network()).cost
    assert (cost.extra_parameters, cost.train_step_ratio, cost.passes) == (0, 1.5, 1)
    assert "average" not in lb.SWAG().fields()
    with pytest.raises(ValueError, match="expected average to be True or False, got 1"):
        lb.SWAG(average=1)


def stopped_average(folder):
    """Return the trained model, and store the state of the same training after two further epochs."""

    def kill(state):
        if state.epoch == 8:
            raise KeyboardInterrupt

    method = lb.SWAG(average=True, rank=3, extra_epochs=0.5)
    whole = lb.convert(network(), method)
    lb.fit(whole, (X, Y), RECIPE, progress=False)
    with pytest.raises(KeyboardInterrupt):
        lb.fit(lb.convert(network(), method), (X, Y), RECIPE, folder=folder, callbacks=[kill], progress=False)
    return method, whole, folder / STATE


def test_the_state_of_an_average_has_the_mean_alone(tmp_path):
    _, _, path = stopped_average(tmp_path)
    collected = {name: tensor.numel() for name, tensor in read_tensors(path)[1].items() if "collector" in name}
    parameters = sum(p.numel() for p in network().parameters())
    assert collected == {"model/collector.count": 1, "model/collector.mean": parameters}


def test_a_state_of_an_average_with_deviations_still_resumes_to_the_same_bits(tmp_path):
    """Earlier versions stored them, and never used them."""
    method, whole, path = stopped_average(tmp_path)
    metadata, tensors = read_tensors(path)
    mean = tensors["model/collector.mean"]
    older = {"model/collector.squares": mean.square(), "model/collector.deviations": mean.repeat(3, 1)}
    header = json.loads(metadata[HEADER])
    header["tensors"]["model"] += len(older)
    write_tensors(tensors | older, path, metadata | {HEADER: json.dumps(header)})
    again = lb.convert(network(), method)
    lb.fit(again, (X, Y), RECIPE, folder=tmp_path, resume=True, progress=False)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert "model/collector.deviations" not in read_tensors(path)[1]


def test_a_state_of_draws_without_deviations_is_another_network(tmp_path):
    stopped_average(tmp_path)
    model = lb.convert(network(), lb.SWAG(components=1, rank=3, extra_epochs=0.5))
    with pytest.raises(ValueError, match=r"'collector\.squares' is missing there"):
        lb.fit(model, (X, Y), RECIPE, folder=tmp_path, resume=True, progress=False)


class Normed(nn.Module):
    """A network whose statistics are not those of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(2, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.head(self.norm(x).relu().mean(2))


@pytest.mark.parametrize("average", [False, True])
def test_all_members_have_the_trained_buffers(average):
    torch.manual_seed(0)
    x, y = 3 * torch.randn(32, 2, 6) + 1, torch.randint(3, (32,))
    model = lb.convert(Normed(), lb.SWAG(components=3, average=average))
    lb.fit(model, (x, y), lb.Recipe(epochs=4, batch_size=16), progress=False)
    for member in model.members:
        assert member.seen == 2 * (4 + 2)
        torch.testing.assert_close(member.norm.running_mean, model.members[0].norm.running_mean)
        assert member.norm.running_var.min() > 2
