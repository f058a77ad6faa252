"""`fit` against a loop written by hand, bit for bit, and what it does beyond such a loop."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import traceback

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.core.conversion import own_likelihood
from leanbayes.training import recipe as schedule
from leanbayes.training.data import seeded
from leanbayes.training.fit import fit
from tests.needs import need_torch

from .problems import images, line, network, rank1, same, short


def by_hand(model, data, recipe):
    """Train as `fit` promises to: Nesterov momentum, a rate and a KL weight per step, rows in the seeded order."""
    x, y = data
    groups = lb.parameter_groups(
        model, lr=recipe.lr, posterior_lr=recipe.posterior_lr, weight_decay=recipe.weight_decay
    )
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.SGD(groups, lr=1, momentum=0.9, nesterov=True)
    torch.manual_seed(recipe.seed)
    model.train()
    losses = []
    for epoch in range(recipe.epochs):
        order = torch.randperm(len(x), generator=seeded(torch.device("cpu"), recipe.seed, "order", epoch))
        parts = order.split(recipe.batch_size)
        for step, rows in enumerate(parts):
            progress = epoch + step / len(parts)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * progress / recipe.epochs))
            beta = min(1.0, progress / recipe.anneal_epochs) if recipe.anneal_epochs else 1.0
            loss = lb.elbo(model, x[rows], y[rows], num_data=len(x), beta=beta).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), len(rows)))
    last = losses[-len(parts) :]
    return sum(loss * rows for loss, rows in last) / len(x)


def test_fit_minimises_the_mixture_likelihood_where_asked():
    recipe = short(epochs=1, batch_size=90, tile=True, aggregate="mixture")
    history = fit(rank1(), images(90), recipe)
    x, y = images(90)
    rows = torch.randperm(90, generator=seeded(torch.device("cpu"), recipe.seed, "order", 0))
    found = {}
    for aggregate in ("mixture", "average"):
        model = rank1().train()
        torch.manual_seed(recipe.seed)
        found[aggregate] = lb.elbo(model, x[rows], y[rows], num_data=90, tile=True, aggregate=aggregate).nll.item()
    assert history[0]["nll"] == pytest.approx(found["mixture"], rel=1e-6)
    assert found["mixture"] < found["average"] - 1e-4


@pytest.mark.parametrize("make", [network, rank1])
def test_fit_equals_a_loop_written_by_hand(make):
    recipe = short(posterior_lr=0.2, anneal_epochs=2, seed=3)
    ours, theirs = make(), make()
    history = fit(ours, images(90), recipe)
    assert history[-1]["loss"] == pytest.approx(by_hand(theirs, images(90), recipe), rel=1e-6)
    assert same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cosine", "step", "linear", "constant"])
@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adam", 0.02)])
def test_every_optimiser_and_schedule_learns(optimizer, lr, name):
    recipe = short(epochs=8, optimizer=optimizer, lr=lr, schedule=name, warmup_epochs=1, weight_decay=1e-4)
    history = fit(network(), images(256), recipe, validation=images(256))
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert history[-1]["valid_accuracy"] > 0.85


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adam", 0.02)])
def test_a_network_learns_and_the_history_has_the_last_rate(optimizer, lr):
    recipe = short(epochs=4, optimizer=optimizer, lr=lr, schedule="step", warmup_epochs=1, weight_decay=1e-4)
    history = fit(network(), images(256), recipe, validation=images(256))
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    assert history[-1]["lr"] == pytest.approx(lr * schedule.rate(recipe, 4 - 1 / 16))


def test_a_step_is_four_calls_deep():
    """The loop is `fit -> Trainer.run -> step -> loss`, before and after the conversion."""
    seen = []

    def likelihood(outputs, y):
        frames = [frame for frame in traceback.extract_stack() if "leanbayes/training" in frame.filename]
        seen.append([frame.name for frame in frames])
        return F.cross_entropy(outputs, y)

    fit(rank1(), images(32), short(epochs=2, convert_at_epoch=1, batch_size=32), likelihood=likelihood)
    assert seen == [["fit", "run", "step", "loss"]] * 2


def test_history_is_json_and_keeps_its_books():
    history = fit(rank1(), images(), short(), validation=images(33))
    assert json.loads(json.dumps(history)) == history
    assert [row["epoch"] for row in history] == [1, 2, 3]
    for row in history:
        assert row["loss"] == pytest.approx(row["nll"] + row["beta"] * row["kl"] / 96, rel=1e-5)
        assert {"lr", "seconds", "peak_memory_mb", "valid_nll", "valid_accuracy"} <= row.keys()
    assert history.seconds == sum(row["seconds"] for row in history) > 0
    assert history.peak_memory_mb > 10


def test_validation_is_the_mean_of_four_draws():
    bnn, (x, y) = rank1(), images(33)
    row = fit(bnn, images(), short(epochs=1), validation=(x, y))[-1]
    p = lb.predict(bnn, x, samples=4)
    assert row["valid_nll"] == pytest.approx(-p.log_prob(y).mean().item(), rel=1e-5)
    assert row["valid_accuracy"] == pytest.approx((p.mean.argmax(1) == y).double().mean().item())


def test_regression_learns_its_noise_wherever_the_likelihood_is_kept():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    recipe = short(epochs=20, optimizer="adam", lr=0.03, weight_decay=0.0, convert_at_epoch=10, anneal_epochs=100)
    kept = lb.convert(net(), lb.Rank1(components=2), likelihood=lb.Gaussian(1.0, learn=True))
    rows = fit(kept, line(), recipe, validation=line(50))
    assert rows[-1]["valid_rmse"] < 0.4
    assert own_likelihood(kept).log_std.exp() < 0.7  # it began at one
    given = lb.Gaussian(1.0, learn=True)
    fit(lb.convert(net(), lb.Rank1(components=2)), line(), recipe, likelihood=given)
    assert torch.equal(given.log_std, own_likelihood(kept).log_std)


def test_yes_or_no_and_any_other_loss():
    x, y = images()
    y = (y > 0).float()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    recipe = short(epochs=20, lr=0.5, weight_decay=0.0)
    history = fit(net, (x, y), recipe, likelihood=lb.Bernoulli(), validation=(x, y))
    assert history[-1]["valid_accuracy"] > 0.8
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    other.load_state_dict(net.state_dict())
    plain_loss = lambda outputs, y: F.binary_cross_entropy_with_logits(outputs[:, 0], y)  # noqa: E731
    fit(net, (x, y), recipe, likelihood=lb.Bernoulli())
    fit(other, (x, y), recipe, likelihood=plain_loss)
    assert same(net, other)
    with pytest.raises(TypeError, match=r"validation needs a likelihood that predicts, such as lb.Categorical\(\)"):
        fit(other, (x, y), recipe, likelihood=plain_loss, validation=(x, y))


def several_targets(case):
    """Return a network, its likelihood, data with several targets a row, and the log-likelihood of all of them."""
    x, classes = images(24)
    if case == "labels":
        y = F.one_hot(classes, 3).float()
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), lb.Bernoulli(), (x, y), F.binary_cross_entropy_with_logits
    if case == "pixels":
        return nn.Conv2d(1, 3, 1), lb.Categorical(), (x, classes[:, None, None].expand(-1, 4, 4)), F.cross_entropy
    return (
        nn.Conv2d(1, 1, 1),
        lb.Gaussian(2.0),
        (x, x.square()),
        lambda mean, y, reduction: F.gaussian_nll_loss(
            mean, y, torch.full_like(mean, 4.0), full=True, reduction=reduction
        ),
    )


@pytest.mark.parametrize("how", ["tensors", "loader", "accumulated"])
@pytest.mark.parametrize("case", ["labels", "pixels", "numbers"])
def test_a_step_follows_the_bound_however_many_targets_a_row_has(case, how):
    """Oracle: the bound of the data set, -sum log p + KL, whose gradient is taken by hand; scaled, as `fit` scales."""
    torch.manual_seed(3)
    net, likelihood, (x, y), loss = several_targets(case)
    model = lb.convert(net, lb.MeanField(init_std=1e-6), likelihood=likelihood)  # the noise is too small to matter
    twin = copy.deepcopy(model)
    batches = 2 if how == "accumulated" else 1
    recipe = short(epochs=1, batch_size=24 // batches, accumulate=batches, momentum=0.0, weight_decay=0.0)
    data = DataLoader(TensorDataset(x, y), batch_size=24) if how == "loader" else (x, y)
    history = fit(model, data, recipe)
    targets = 24 * {"labels": 3, "pixels": 16, "numbers": 1}[case]
    bound = loss(twin(x), y, reduction="sum") + lb.kl(twin)
    assert history[0]["loss"] == pytest.approx(bound.item() / targets, rel=1e-5)
    (bound / targets).backward()
    for before, after in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(after, before - recipe.lr * before.grad, rtol=1e-5, atol=1e-6)


def test_the_model_comes_back_in_its_modes_and_without_gradients():
    net = network().eval()
    net[0].train()
    fit(net, images(), short(epochs=1, channels_last=True))
    assert [module.training for module in net] == [True, False, False, False, False]
    assert not net.training
    assert all(p.grad is None and p.is_contiguous() for p in net.parameters())


def test_tensors_a_dataset_and_a_loader_train_alike():
    models = [rank1() for _ in range(2)]
    fit(models[0], images(), short(augment="flip"))
    fit(models[1], TensorDataset(*images()), short(augment="flip"))
    assert same(*models)
    loader = DataLoader(TensorDataset(*images()), batch_size=16, shuffle=True)
    history = fit(network(), loader, short(epochs=6, lr=0.1), validation=loader)
    assert history[-1]["loss"] < history[0]["loss"]
    assert len(history) == 6


def test_callbacks_hear_of_every_epoch_and_cannot_disturb_the_noise():
    heard = []

    def listen(state):
        heard.append((state.epoch, state.row["epoch"], len(state.history), state.fabric.world_size))
        torch.randn(7)
        assert state.model is disturbed

    quiet, disturbed = rank1(), rank1()
    fit(quiet, images(), short())
    fit(disturbed, images(), short(), callbacks=[listen], validation=DataLoader(TensorDataset(*images(20)), 8))
    assert heard == [(1, 1, 1, 1), (2, 2, 2, 1), (3, 3, 3, 1)]
    assert same(quiet, disturbed)


def test_the_gradient_is_clipped():
    net = network()
    before = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
    # One step of plain gradient descent at rate one moves by the clipped gradient.
    fit(net, images(16), short(epochs=1, lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=0.01))
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_groups_have_their_own_rates_and_the_posterior_may_keep_its():
    bnn, seen = rank1(), []

    class Watched(torch.optim.SGD):
        def step(self, *args, **kwargs):
            seen.append({group["name"]: (group["lr"], group["weight_decay"]) for group in self.param_groups})
            return super().step(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "SGD", Watched)
        fit(bnn, images(32), short(epochs=2, posterior_lr=0.3, posterior_schedule="constant"))
    assert [step["posterior"] for step in seen] == [(0.3, 0.0)] * 4
    assert [step["weights"][0] for step in seen] == pytest.approx(
        [0.05 * 0.5 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    )
    assert seen[0]["weights"][1] == 5e-4


def test_mixed_precision_trains_and_keeps_losses_in_float32():
    dtypes = []
    bnn = rank1()
    bnn[0].base.register_forward_hook(lambda module, args, result: None)
    bnn[4].register_forward_hook(lambda module, args, result: dtypes.append(result.dtype))
    history = fit(bnn, images(256), short(epochs=3, lr=0.1, precision="bf16-mixed", anneal_epochs=100))
    assert set(dtypes) == {torch.bfloat16}
    assert history[-1]["nll"] < 0.8 * history[0]["nll"]
    seen = []
    fit(network(), images(32), short(epochs=1, precision="bf16-mixed"), likelihood=functools.partial(record, seen))
    assert set(seen) == {torch.float32}


def record(seen, outputs, y):
    seen.append(outputs.dtype)
    return F.cross_entropy(outputs, y)


def test_compiled_training_gives_the_eager_numbers_with_one_graph_a_phase(monkeypatch):
    need_torch("2.11", "dynamo of 2.5 cannot compile a whole training step; 2.11 can, those between were not tried")
    dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    recipe = short(epochs=4, convert_at_epoch=1, anneal_epochs=2, lr=0.01)
    # Without noise: compiled code draws it in another order.
    eager, fast = (lb.convert(network(), lb.BatchEnsemble(components=1, init_spread=0.0)) for _ in range(2))
    fit(eager, images(90), recipe)
    with dynamo.config.patch(error_on_recompile=True):
        fit(fast, images(90), short(**recipe.fields() | {"compile": True, "milestones": ()}))
    dynamo.reset()
    assert len(compiled) == 2
    for a, b in zip(eager.state_dict().values(), fast.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_there_must_be_something_to_train_and_to_validate_on():
    frozen = network().requires_grad_(False)
    with pytest.raises(ValueError, match="expected a model with parameters to train, got none"):
        fit(frozen, images(), short())
    with pytest.raises(ValueError, match="expected rows to validate on, got none"):
        fit(network(), images(), short(), validation=images(0))


def test_an_ensemble_is_trained_member_by_member(tmp_path):
    ensemble = lb.Ensemble([network(), rank1()])
    alone = [network(), rank1()]
    history = fit(ensemble, images(), short(seed=2), folder=tmp_path, validation=images(20))
    for k, member in enumerate(alone):
        fit(member, images(), short(seed=2 + 1000 * k))
        assert same(ensemble.members[k], member)
        assert (tmp_path / f"member{k}" / "checkpoint" / "last.safetensors").is_file()
    assert [(row["member"], row["epoch"]) for row in history] == [(k, e) for k in (0, 1) for e in (1, 2, 3)]
    again = lb.Ensemble([network(), rank1()])
    assert fit(again, images(), short(seed=2), folder=tmp_path, resume=True) == history
    assert same(again, ensemble)


def test_weights_and_posterior_can_be_trained_in_turn():
    bnn, seen = rank1(), []

    def keep(state):
        shared = torch.cat([p.detach().flatten() for name, p in bnn.named_parameters() if "posterior" not in name])
        own = torch.cat([p.detach().flatten() for name, p in bnn.named_parameters() if "posterior" in name])
        seen.append((shared, own))

    fit(bnn, images(32), short(epochs=3, schedule="constant", alternate_epochs=1), callbacks=[keep])
    for (before, after), fixed in zip(itertools.pairwise(seen), ("weights", "posterior"), strict=True):
        assert torch.equal(before[0], after[0]) == (fixed == "weights")
        assert torch.equal(before[1], after[1]) == (fixed == "posterior")
