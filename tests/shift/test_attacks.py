"""Attacks: closed forms of linear models, gradients by hand, balls and bounds, and models left as they were."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes import shift
from tests.networks import small_net

METHODS = [
    lb.Rank1(components=3),
    lb.ImplicitNodes(components=2),
    lb.MeanField(init_std=0.3),
    lb.MCDropout(rate=0.4),
    lb.ModelPatch(components=3),
    lb.VarianceLayers(parameterization="neuron", init_log_alpha=0.0),
    lb.NestedDropout(groups=4, min_cut=0),
]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
each_norm = pytest.mark.parametrize("norm", ["linf", "l2"])


def made(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(rows: int, count: int, seed: int = 2) -> Tensor:
    return torch.randint(count, (rows,), generator=torch.Generator().manual_seed(seed))


def mlp(dropout: bool = False) -> nn.Sequential:
    middle = [nn.Dropout(0.4)] if dropout else []
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), *middle, nn.Linear(16, 3)).double()


def converted(method) -> nn.Module:
    return lb.convert(mlp(dropout=method.name == "mc_dropout"), method)


def log_mean(networks: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """Return log mean_s p_s(y), term by term."""
    probabilities = torch.stack([network(x).softmax(1) for network in networks]).mean(0)
    return probabilities[torch.arange(len(y)), y].log()


def unit_gradient(networks: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_mean(networks, leaf, y).sum(), leaf)
    return gradient / gradient.norm(dim=1, keepdim=True)


def draws_of(model: nn.Module, indices: range, seed: int = 0) -> list[nn.Module]:
    return [lb.draw(model, seed=seed, index=index).eval() for index in indices]


# Closed forms


@each_norm
def test_one_step_on_a_linear_softmax_follows_the_analytic_gradient(norm):
    net, x, y = nn.Linear(6, 4).double(), made(9, 6), classes(9, 4)
    found = shift.attack(net, x, y, shift.fgsm(0.03, norm=norm))
    expected = net(x).softmax(1) @ net.weight - net.weight[y]  # gradient of -log p(y)
    change = expected.sign() if norm == "linf" else expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found.inputs, (x + 0.03 * change).detach())


@each_norm
@pytest.mark.parametrize("sureness", [1.0, 1e4])  # where 1 - p is rounded to zero
def test_a_linear_model_of_two_classes_falls_at_the_known_distance(norm, sureness):
    net, x = nn.Linear(6, 2), made(200, 6).float()
    net.weight.data *= sureness
    net.bias.data *= sureness
    with torch.no_grad():
        margin = net(x).diff(dim=1)[:, 0].abs()
        y = net(x).argmax(1)
        slope = net.weight.diff(dim=0)[0]
        away = margin / (slope.abs().sum() if norm == "linf" else slope.norm())
    found = shift.attack(net, x, y, shift.fast_sign(12, 0.1, norm=norm))
    expected = [(away < 0.1 * step).float().mean().item() for step in range(13)]
    assert found.curve("success") == pytest.approx(expected, abs=1e-6)
    assert found.curve("accuracy") == pytest.approx([1 - share for share in expected], abs=1e-6)
    assert 0.1 < expected[4] < 0.9
    assert found.curve("distance") == pytest.approx([0.1 * step for step in range(13)], abs=1e-5)


# Gradients


@each_method
def test_the_expectation_is_differentiated_as_finite_differences_say(method):
    bnn, x, y = converted(method), made(4, 5), classes(4, 3)
    found = shift.attack(bnn, x, y, shift.fgsm(0.01, norm="l2", samples=6, seed=3))
    networks = draws_of(bnn, range(6), seed=3)
    slopes = []
    with torch.no_grad():
        for column in 1e-5 * torch.eye(5).double():
            slopes.append((log_mean(networks, x + column, y) - log_mean(networks, x - column, y)) / 2e-5)
    gradient = torch.stack(slopes, 1)
    expected = -gradient / gradient.norm(dim=1, keepdim=True)
    torch.testing.assert_close((found.inputs - x) / 0.01, expected, atol=1e-5, rtol=0)


@each_method
@pytest.mark.parametrize(("through", "fresh", "used"), [
    ("expectation", True, [range(0, 4), range(4, 8)]), ("expectation", False, [range(0, 4)] * 2),
    ("draw", True, [range(0, 1), range(1, 2)]), ("draw", False, [range(0, 1)] * 2),
])  # fmt: skip
def test_every_step_goes_through_the_draws_it_names(method, through, fresh, used):
    bnn, x, y = converted(method), made(5, 5), classes(5, 3)
    goal = (y + 1) % 3
    chosen = shift.fast_sign(2, 0.2, norm="l2", samples=4, seed=8, through=through, fresh=fresh, batch_size=2)
    moved = x
    for indices in used:
        moved = moved + 0.2 * unit_gradient(draws_of(bnn, indices, seed=8), moved, goal)
    torch.testing.assert_close(shift.attack(bnn, x, y, chosen, target=goal).inputs, moved, atol=1e-5, rtol=0)


def test_an_ensemble_is_attacked_through_the_average_of_its_members():
    members, x, y = [mlp() for _ in range(3)], made(5, 5), classes(5, 3)
    chosen = shift.fgsm(1.0, norm="l2")  # ten samples, three different ones
    found = shift.attack(lb.Ensemble(members), x, y, chosen)
    torch.testing.assert_close(found.inputs, x - unit_gradient([m.eval() for m in members], x, y))


@each_method
def test_stochastic_members_take_turns(method):
    members, x, y = [converted(method) for _ in range(3)], made(5, 5), classes(5, 3)
    found = shift.attack(lb.Ensemble(members), x, y, shift.fgsm(1.0, norm="l2", samples=6, seed=4))
    networks = [network for member in members for network in draws_of(member, range(2), seed=4)]
    torch.testing.assert_close(found.inputs, x - unit_gradient(networks, x, y), atol=1e-6, rtol=0)


def test_the_only_draw_of_a_plain_network_is_its_expectation():
    net, x, y = mlp(), made(6, 5), classes(6, 3)
    whole, single = (
        shift.attack(net, x, y, shift.fast_sign(3, 0.1, through=through)) for through in ("expectation", "draw")
    )
    assert torch.equal(whole.inputs, single.inputs)
    assert whole.history == single.history
    assert whole.curve("epistemic") == [0.0] * 4


def test_activation_noise_is_seeded_and_differs_from_functions():
    bnn, x, y = converted(lb.MeanField(init_std=0.5)), made(6, 5), classes(6, 3)
    chosen = shift.fast_sign(2, 0.1, norm="l2", noise="activation")
    found, again = shift.attack(bnn, x, y, chosen), shift.attack(bnn, x, y, chosen)
    assert torch.equal(found.inputs, again.inputs)
    assert not torch.equal(found.inputs, shift.attack(bnn, x, y, replace(chosen, noise="function")).inputs)


# Balls, bounds and units


@each_norm
def test_projected_steps_stay_in_the_ball_and_the_bounds(norm):
    net = small_net()
    x, y = torch.rand(7, 1, 8, 8), classes(7, 4)
    radius = 0.1 if norm == "linf" else 1.0
    chosen = shift.pgd(radius, 6, norm=norm, bounds=(0.0, 1.0))
    for steps in range(1, 7):
        found = shift.attack(net, x, y, replace(chosen, steps=steps))
        change = (found.inputs - x).flatten(1)
        lengths = change.abs().amax(1) if norm == "linf" else change.norm(dim=1)
        assert (lengths <= radius * (1 + 1e-5)).all()
        assert found.inputs.min() >= 0
        assert found.inputs.max() <= 1
        torch.testing.assert_close(found.history[-1].distance, lengths.mean().item(), rtol=1e-5, atol=0)


@each_norm
def test_random_starts_fill_the_ball_evenly(norm):
    clean = torch.zeros(2000, 3)
    start = shift.pgd(2.0, norm=norm).begin(clean)
    lengths = start.abs().amax(1) if norm == "linf" else start.norm(dim=1)
    shares = ((lengths / 2.0) ** 3).sort().values  # uniform if points are, in three dimensions
    steps = torch.arange(1, 2001) / 2000
    assert (shares - steps).abs().max() < 1.63 / 2000**0.5  # Kolmogorov's test, one per cent
    assert start.mean(0).abs().max() < 4 * start.std() / 2000**0.5
    torch.testing.assert_close(shift.pgd(2.0, norm=norm).begin(clean[:5]), start[:5])  # whatever comes with them


@each_norm
def test_pixel_units_attack_as_if_the_network_saw_pixels(norm):
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 5)).double()
    centre, spread = (torch.tensor(moment).double().view(3, 1, 1) for moment in (mean, std))

    class OnPixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, pixels: Tensor) -> Tensor:
            return self.net((pixels / 255 - centre) / spread)

    pixels = torch.randint(256, (6, 3, 6, 6)).double()
    x, y = (pixels / 255 - centre) / spread, classes(6, 5)
    chosen = shift.pgd(40.0, 4, norm=norm, bounds=(0, 255))
    raw = shift.attack(OnPixels(), pixels, y, chosen)
    units = shift.pixel_units(torch.tensor(mean).double(), torch.tensor(std).double())
    found = shift.attack(net, x, y, replace(chosen, units=units))
    torch.testing.assert_close((found.inputs * spread + centre) * 255, raw.inputs)
    assert found.curve("distance") == pytest.approx(raw.curve("distance"))
    assert found.curve("entropy") == pytest.approx(raw.curve("entropy"))


# Targets and records


def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network with dropout that has learned three clouds of points."""
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(300) % 3
    x = torch.randn(300, 4, generator=generator) + 2.5 * torch.eye(3, 4)[y]
    net = lb.convert(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)), lb.MCDropout())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net, x, y


def test_targeted_attacks_succeed_on_a_trained_network():
    net, x, y = trained()
    for target in ("random", "least_likely", (y + 1) % 3):
        found = shift.attack(net, x, y, shift.fast_sign(16, 0.2, samples=5), target=target)
        assert found.target is not None
        assert (found.target != y).all()
        success = found.curve("success")
        assert success[0] == 0.0
        assert success[-1] > 0.95
        assert all(later >= before - 0.03 for before, later in pairwise(success))
        before, after = (
            lb.predict(net, inputs, samples=5, seed=1).mean.gather(1, found.target[:, None])
            for inputs in (x, found.inputs)
        )
        assert (after > before).float().mean() > 0.95
    assert shift.attack(net, x, y, shift.fast_sign(16, 0.2, samples=5)).curve("accuracy")[-1] < 0.05


def test_targets_are_random_other_classes_or_the_least_likely():
    net, x, y = nn.Linear(6, 4).double(), made(3000, 6), classes(3000, 4)
    chosen = shift.fgsm(0.01)
    random = shift.attack(net, x, y, chosen, target="random").target
    counts = torch.bincount((random - y) % 4, minlength=4)
    assert counts[0] == 0
    assert ((counts[1:] - 1000).abs() < 4 * (3000 * 2 / 9) ** 0.5).all()
    least = shift.attack(net, x, y, chosen, target="least_likely").target
    order = net(x).argsort(1)
    assert torch.equal(least, torch.where(order[:, 0] == y, order[:, 1], order[:, 0]))


def test_figures_are_those_of_predictions_with_other_draws():
    net, x, y = trained()
    found = shift.attack(net, x, y, shift.pgd(0.8, 3, samples=7, seed=5), target="random")
    right_at_first = None
    for inputs, entry in ((x, found.history[0]), (found.inputs, found.history[-1])):
        p = lb.predict(net, inputs, samples=7, seed=6)
        got = p.mean.argmax(1)
        right_at_first = got != found.target if right_at_first is None else right_at_first
        assert entry.accuracy == pytest.approx((got == y).float().mean().item())
        assert entry.entropy == pytest.approx(p.total.mean().item(), rel=1e-5)
        assert entry.epistemic == pytest.approx(p.epistemic.mean().item(), rel=1e-4)
        assert entry.success == pytest.approx((got == found.target)[right_at_first].float().mean().item())
        torch.testing.assert_close(found.prediction.mean, p.mean) if entry.step else None
    assert [entry.step for entry in found.history] == [0, 1, 2, 3]
    assert found.curve("entropy") == [entry.entropy for entry in found.history]


# Habits


def test_the_same_seed_gives_the_same_attack_whatever_the_batches():
    bnn, x, y = converted(lb.Rank1(components=3)), made(11, 5), classes(11, 3)
    chosen = shift.pgd(0.5, 3, seed=2)
    found = shift.attack(bnn, x, y, chosen, target="random")
    torch.manual_seed(99)
    again = shift.attack(bnn, x, y, chosen, target="random")
    assert torch.equal(found.inputs, again.inputs)
    assert found.history == again.history
    cut = shift.attack(bnn, x, y, replace(chosen, batch_size=4), target="random")
    torch.testing.assert_close(cut.inputs, found.inputs)
    assert not torch.equal(shift.attack(bnn, x, y, replace(chosen, seed=3), target="random").inputs, found.inputs)


@pytest.mark.parametrize("noise", ["function", "activation"])
@pytest.mark.parametrize("together", [False, True])
def test_the_model_is_left_as_it_was(noise, together):
    bnn = lb.convert(small_net(), lb.Rank1(components=2))
    model = lb.Ensemble([bnn, lb.convert(small_net(), lb.Rank1(components=2))]) if together else bnn
    bnn[1].eval()
    bnn[0].requires_grad_(False)
    bnn[7].base.weight.grad = torch.ones_like(bnn[7].base.weight)
    x, y = torch.randn(5, 1, 8, 8), classes(5, 4)
    kept = x.clone()
    modes = [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        found = shift.attack(model, x.requires_grad_(), y, shift.fast_sign(2, 0.1, samples=3, noise=noise))
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    grads = [name for name, parameter in bnn.named_parameters() if parameter.grad is not None]
    assert grads == ["7.base.weight"]
    assert torch.equal(bnn[7].base.weight.grad, torch.ones_like(bnn[7].base.weight))
    assert torch.equal(x, kept)
    assert x.grad is None
    assert not found.inputs.requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_inputs_and_targets_come_back_to_where_they_were():
    bnn, x, y = converted(lb.Rank1(components=3)), made(6, 5), classes(6, 3)
    chosen = shift.pgd(0.5, 3, norm="l2", samples=3)
    here = shift.attack(bnn, x, y, chosen, target="random")
    there = shift.attack(bnn.cuda(), x, y, chosen, target="random")
    torch.testing.assert_close(there.inputs, here.inputs, atol=1e-6, rtol=0)
    assert torch.equal(there.target, here.target)


def test_work_before_the_first_stochastic_layer_is_not_taken_from_another_step():
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    bnn, x, y = lb.convert(net, lb.Rank1(components=2), where="2"), made(5, 5), classes(5, 3)
    moved = x
    for indices in (range(0, 3), range(3, 6)):
        moved = moved - 0.3 * unit_gradient(draws_of(bnn, indices), moved, y)
    found = shift.attack(bnn, x, y, shift.fast_sign(2, 0.3, norm="l2", samples=3))
    torch.testing.assert_close(found.inputs, moved, atol=1e-6, rtol=0)


def test_rows_without_a_gradient_stay():
    net = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    x, y = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]), torch.tensor([0, 1])
    for norm in ("linf", "l2"):
        moved = shift.attack(net, x, y, shift.fgsm(0.1, norm=norm)).inputs
        assert torch.equal(moved[0], x[0])
        assert not torch.equal(moved[1], x[1])


@pytest.mark.parametrize(("fields", "says"), [
    ({"steps": 0}, "expected steps"), ({"step_size": -1.0}, "expected step_size"), ({"samples": 0}, "expected samples"),
    ({"norm": "l1"}, "expected norm"), ({"start": "random"}, "expected epsilon"), ({"noise": "x"}, "expected noise"),
    ({"bounds": (1, 0)}, "expected bounds"), ({"epsilon": 0.0}, "expected epsilon"), ({"through": "x"}, "through"),
])  # fmt: skip
def test_wrong_attacks_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        shift.Attack(**{"steps": 1, "step_size": 0.1, **fields})
    with pytest.raises(ValueError, match="expected steps"):
        shift.pgd(0.1, steps=0)


@pytest.mark.parametrize(("changed", "says"), [
    ({"x": torch.zeros(4, 3, dtype=torch.long)}, "floating-point inputs"), ({"y": torch.zeros(3).long()}, "expected y"),
    ({"y": torch.full((4,), 2)}, "class from 0 to 1"), ({"target": torch.full((4,), -1)}, "expected target"),
    ({"target": "other"}, "expected target"), ({"attack": shift.fgsm(0.1, bounds=(0.5, 1))}, "within the bounds"),
    ({"x": torch.full((4, 3), torch.nan)}, "expected finite predictions"),
])  # fmt: skip
def test_wrong_calls_are_refused(changed, says):
    call = {"x": torch.zeros(4, 3), "y": torch.zeros(4).long(), "attack": shift.fgsm(0.1), **changed}
    with pytest.raises(ValueError, match=says):
        shift.attack(nn.Linear(3, 2), **call)


def test_real_targets_have_no_adversary():
    with pytest.raises(TypeError, match="Categorical"):
        shift.attack(nn.Linear(3, 2), torch.zeros(4, 3), torch.zeros(4, 2), shift.fgsm(0.1), likelihood=lb.Gaussian())
