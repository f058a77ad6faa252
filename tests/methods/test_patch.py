"""Ensemble model patching: counts as printed, every assignment reachable, an unbiased gradient, eq. (6)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import leanbayes as lb
from leanbayes.core.plain import frozen
from leanbayes.distributions.assignment import Assignment
from leanbayes.methods.patch import contrasts, norm_with, PatchLayer
from leanbayes.models import build
from tests.oracle.patches import copies_of, patched

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randint(2, (8,), generator=torch.Generator().manual_seed(2))


def small_net(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    net(X.to(dtype))  # running statistics of their own
    return net.eval()


def layers_of(bnn) -> dict[str, PatchLayer]:
    return dict(lb.stochastic_layers(bnn))


def with_copies(net, bnn, indices):
    """Return the plain network whose tensors are the named copies: an independent twin."""
    state = net.state_dict()
    for path, layer in layers_of(bnn).items():
        start = 0
        for name in layer.names:
            like = state[f"{path}.{name}"]
            index = torch.as_tensor(indices[path]).expand(layer.nodes).flatten()
            own = index[:1].expand(like.numel()) if layer.nodes == 1 else index[start : start + like.numel()]
            copies = copies_of(layer, name).detach()
            chosen = torch.stack([copies[k, i] for i, k in enumerate(own.tolist())])
            state[f"{path}.{name}"] = chosen.view_as(like).to(like.dtype)
            start += like.numel()
    twin = small_net(next(net.parameters()).dtype)
    twin.load_state_dict(state)
    return twin.train(net.training)


@pytest.mark.parametrize(
    ("net", "options", "plain", "expected"),
    [
        ("resnet18", {"num_outputs": 1000, "input_shape": (3, 224, 224)}, 11_689_512, 13_779_912),
        ("pyramidnet-110-270", {"num_outputs": 100, "input_shape": (3, 32, 32)}, 28_511_307, 28_825_299),
        ("mlp-100-100", {"num_outputs": 100, "input_shape": (1,)}, 1_009_900, 1_129_100),
    ],
)
@pytest.mark.parametrize("crossed", [False, True])
def test_parameters_are_those_of_table_3(net, options, plain, expected, crossed):
    with torch.device("meta"):
        network = build(net, **options)
    bnn = lb.convert(network.to_empty(device="cpu"), lb.ModelPatch(components=5, crossed=crossed), copy=False)
    said = lb.summary(bnn)
    assert said.parameters == plain
    assert said.parameters + said.extra_parameters == expected
    assert sum(p.numel() for p in bnn.parameters()) == expected


def test_norms_alone_cost_a_third_of_a_percent():
    bnn = lb.convert(build("resnet18", num_outputs=1000, input_shape=(3, 224, 224)), lb.ModelPatch(patch="norm"))
    assert lb.summary(bnn).extra_percent == pytest.approx(0.328, abs=5e-4)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_contrasts_are_orthonormal_and_sum_to_zero(count):
    basis = contrasts(count)
    torch.testing.assert_close(basis.T @ basis, torch.eye(count - 1, dtype=torch.float64))
    torch.testing.assert_close(basis.sum(0), torch.zeros(count - 1, dtype=torch.float64))


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_one_component_is_the_plain_network(crossed, training):
    net = small_net().train(training)
    bnn = lb.convert(net, lb.ModelPatch(components=1, crossed=crossed, patch=("norm", "input", "output")))
    torch.testing.assert_close(bnn(X), net(X))
    assert lb.summary(bnn).extra_parameters == 0
    assert lb.summary(bnn).log_networks == 0


@pytest.mark.parametrize("crossed", [False, True])
def test_copies_keep_their_mean_and_differ_by_the_spread(crossed):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2000, 3), nn.BatchNorm1d(3000))
    nn.init.constant_(net[1].weight, 0.2)
    bnn = lb.convert(net, lb.ModelPatch(crossed=crossed, init_spread=0.1))
    for path, layer in layers_of(bnn).items():
        size = net.get_submodule(path).weight.square().mean().sqrt().item()
        for name in layer.names:
            copies, like = copies_of(layer, name), getattr(net.get_submodule(path), name)
            torch.testing.assert_close(copies.mean(0), like.flatten(), atol=1e-6, rtol=1e-5)
            if like.numel() > 1000:
                apart = (copies - like.flatten()).std().item()
                assert apart == pytest.approx(0.1 * size, rel=4 / math.sqrt(2 * copies.numel()))
                cross = torch.corrcoef(copies - like.flatten())[~torch.eye(5, dtype=torch.bool)]
                assert cross.mean().item() == pytest.approx(-1 / 4, abs=0.02)  # what a common mean leaves


def test_zero_initialised_layers_break_their_symmetry_too():
    net = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
    nn.init.zeros_(net[0].weight), nn.init.zeros_(net[1].weight)
    for layer in layers_of(lb.convert(net, lb.ModelPatch(patch=("norm", "input")))).values():
        assert copies_of(layer, "weight").std(0).min() > 0


@pytest.mark.parametrize("training", [False, True])
def test_every_assignment_is_reachable_and_is_a_plain_network(training):
    """EMP with K copies in L layers has K^L draws; each equals the twin with those copies, frozen or not."""
    net = small_net(torch.float64)
    bnn = lb.convert(net, lb.ModelPatch(components=2)).train(training)
    paths = list(layers_of(bnn))
    assert paths == ["1", "3", "4"]
    seen = set()
    for choice in itertools.product(range(2), repeat=3):
        indices = dict(zip(paths, choice, strict=True))
        twin = with_copies(net, bnn, indices).train(training)
        expected = twin(X.double())
        with patched(bnn, indices):
            torch.testing.assert_close(bnn(X.double()), expected)
            torch.testing.assert_close(frozen(bnn).train(training)(X.double()), expected)
        seen.add(tuple(expected.flatten().tolist()))
    assert len(seen) == 8
    assert lb.summary(bnn).log_networks == pytest.approx(3 * math.log(2))
    assert lb.summary(bnn).ensemble == "an ensemble of 8 networks"


def test_seeded_draws_find_all_networks_equally_often():
    net = small_net()
    bnn = lb.convert(net, lb.ModelPatch(components=2))
    samples = lb.predict(bnn, X, samples=1600).samples
    _, counts = samples.flatten(1).round(decimals=5).unique(dim=0, return_counts=True)
    assert len(counts) == 8
    assert (counts - 200).abs().max() < 5 * math.sqrt(1600 / 8 * 7 / 8)


def test_crossed_assignments_choose_element_by_element():
    net = small_net(torch.float64)
    bnn = lb.convert(net, lb.ModelPatch(components=3, crossed=True))
    torch.manual_seed(3)
    indices = {path: torch.randint(3, (layer.nodes,)) for path, layer in layers_of(bnn).items()}
    with patched(bnn, indices):
        torch.testing.assert_close(bnn(X.double()), with_copies(net, bnn, indices)(X.double()))
    elements = 8 + 8 + 10
    assert lb.summary(bnn).log_networks == pytest.approx(elements * math.log(3))


def test_wrong_assignments_are_refused():
    bnn = lb.convert(small_net(), lb.ModelPatch(components=2))
    with pytest.raises(ValueError, match="expected an index for each of 1, 3, 4, got 1"), patched(bnn, {"1": 0}):
        pass
    with (
        pytest.raises(ValueError, match="layer '1' expected 1 or 1 indices from 0 to 1, got 1 from 5 to 5"),
        patched(bnn, {"1": 5, "3": 0, "4": 0}),
    ):
        pass


@pytest.mark.parametrize("crossed", [False, True])
def test_the_gradient_is_unbiased(crossed):
    """The mean gradient over 2,500 draws is that of the expected loss, by enumeration of all assignments."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(3, bias=False), nn.Linear(3, 2, bias=False)).double()
    bnn = lb.convert(net, lb.ModelPatch(components=2, crossed=crossed, init_spread=0.5, patch=("norm",)))
    layer = layers_of(bnn)["0"]
    parameters = [layer.base.weight, layer.posterior.contrasts, net_weight(bnn)]

    def gradient():
        return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(bnn(X.double()), Y), parameters)])

    every = list(itertools.product(range(2), repeat=layer.nodes))
    exact = []
    for choice in every:
        with patched(bnn, {"0": torch.tensor(choice)}):
            exact.append(gradient())
    expected = torch.stack(exact).mean(0)
    torch.manual_seed(1)
    drawn = torch.stack([gradient() for _ in range(2_500)])
    error = drawn.std(0) / 50
    assert ((drawn.mean(0) - expected).abs() < 4 * error + 1e-12).all()
    assert drawn.std(0).min() > 0


def net_weight(bnn):
    return dict(bnn.named_parameters())["1.weight"]


@pytest.mark.parametrize("copies", [2, 5])
def test_a_step_of_one_copy_moves_the_mean_as_a_plain_layer_and_the_others_with_it(copies):
    # M_k = M + sum_j A_kj C_j with A A^T = 1 - 1/K: by a gradient g of copy k, copy l moves by (1 + [l = k] - 1/K) g.
    torch.manual_seed(0)
    layer = lb.convert(nn.Linear(3, 2), lb.ModelPatch(components=copies, patch=("*",))).double()
    before, x = layer.every_copy().detach(), torch.randn(4, 3).double()
    with lb.draws(layer, seed=0, index=1):
        layer(x).sum().backward()
    plain = lb.draw(layer, seed=0, index=1)
    drawn = torch.cat([plain.weight.detach().flatten(), plain.bias.detach()])
    slope = torch.cat([x.sum(0).repeat(2), torch.full((2,), 4.0).double()])
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    moved = (layer.every_copy().detach() - before) / (-0.1 * slope)
    expected = torch.full((copies, len(slope)), 1 - 1 / copies).double()
    expected[(before - drawn).abs().sum(1).argmin()] += 1
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(moved.mean(0), torch.ones(len(slope)).double())  # of K free copies, 1/K


@pytest.mark.parametrize("mixing", ["uniform", "learned"])
@pytest.mark.parametrize("crossed", [False, True])
def test_the_divergence_is_equation_6(crossed, mixing):
    """sum_k tau p_k / 2 |M_k|^2 + sum_k rho p_k / 2 |m_k|^2, and for learned p its divergence from uniform."""
    method = lb.ModelPatch(components=3, crossed=crossed, precision=0.7, bias_precision=0.2, mixing=mixing)
    bnn = lb.convert(small_net(torch.float64), method)
    p = torch.full((3,), 1 / 3, dtype=torch.float64)
    if mixing == "learned":
        logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64)
        p = logits.softmax(0)
        for layer in layers_of(bnn).values():
            layer.posterior.logits.data.copy_(logits)
    expected = 0.0
    for layer in layers_of(bnn).values():
        for name, precision in (("weight", 0.7), ("bias", 0.2)):
            copies = copies_of(layer, name)
            expected += sum(precision * p[k] / 2 * copies[k].square().sum() for k in range(3)).item()
        if mixing == "learned":
            count = layer.base.weight.numel() + layer.base.bias.numel() if crossed else 1
            expected += count * sum(p[k] * math.log(3 * p[k]) for k in range(3)).item()
    assert lb.kl(bnn).item() == pytest.approx(expected, rel=1e-6)


def test_learned_probabilities_decide_how_often_a_copy_is_drawn():
    bnn = lb.convert(nn.Sequential(nn.Linear(2, 1)), lb.ModelPatch(components=3, mixing="learned"))
    layer = layers_of(bnn)["0"]
    shares = torch.tensor([0.7, 0.1, 0.2])
    layer.posterior.logits.data.copy_(shares.log())
    copies = copies_of(layer, "bias").flatten()
    found = lb.predict(bnn, torch.zeros(1, 2), lb.Gaussian(), samples=2000).samples.flatten()  # the biases
    for k, share in enumerate(shares.tolist()):
        here = torch.isclose(found, copies[k], atol=1e-6).double().mean().item()
        assert here == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 2000))
    torch.testing.assert_close(lb.mean(bnn)[0].bias, (shares @ copies_of(layer, "bias")).detach())


def test_learned_probabilities_turn_to_the_better_copy():
    """Two copies, one right and one wrong, that cannot move: training must find out which is which."""
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(1, 1, bias=False)), lb.ModelPatch(components=2, mixing="learned"))
    layer = layers_of(bnn)["0"]
    layer.base.weight.data.fill_(1.0)
    layer.posterior.contrasts.data.fill_(math.sqrt(2))  # copies 2 and 0
    optimizer = torch.optim.Adam([layer.posterior.logits], lr=0.05)
    x = torch.randn(64, 1)
    for _ in range(200):
        optimizer.zero_grad()
        F.mse_loss(bnn(x), 2 * x).backward()
        optimizer.step()
    assert copies_of(layer, "weight").flatten().tolist() == pytest.approx([2, 0], abs=1e-6)
    assert layer.probabilities[0] > 0.9


def test_running_statistics_are_shared_and_collected():
    net = small_net().train()
    bnn = lb.convert(net, lb.ModelPatch())
    before = bnn[1].base.running_mean.clone()
    for _ in range(5):
        bnn(X + 3)
        net(X + 3)
    assert not torch.equal(bnn[1].base.running_mean, before)
    torch.testing.assert_close(bnn[1].base.running_mean, net[1].running_mean)
    assert bnn[1].base.num_batches_tracked == net[1].num_batches_tracked
    assert lb.draw(bnn)[1].running_mean.equal(bnn[1].base.running_mean)


@pytest.mark.parametrize(
    ("patch", "chosen"),
    [
        (("norm", "output"), ["1", "3", "4"]),
        (("norm",), ["1", "3"]),
        ("input", ["0"]),
        (("input", "output"), ["0", "4"]),
        (("0", "3"), ["0", "3"]),
        ("*", ["0", "1", "3", "4"]),
    ],
)
def test_roles_and_globs_choose_layers(patch, chosen):
    bnn = lb.convert(small_net(), lb.ModelPatch(patch=patch))
    assert list(layers_of(bnn)) == chosen


def test_where_goes_before_patch():
    assert list(layers_of(lb.convert(small_net(), lb.ModelPatch(), where="0"))) == ["0"]


def test_misspelt_patches_are_refused():
    with pytest.raises(ValueError, match="'norms' matches no layer; there are 0, 1, 3, 4"):
        lb.convert(small_net(), lb.ModelPatch(patch=("norms",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"components": 0}, "components to be a whole number of at least 1, got 0"),
        ({"precision": -1.0}, "precision to be a number of at least zero"),
        ({"bias_precision": -1.0}, "bias_precision to be a number of at least zero"),
        ({"mixing": "stacked"}, "mixing to be one of uniform, learned, got 'stacked'"),
        ({"patch": ()}, "expected patch to name layers"),
    ],
)
def test_wrong_fields_say_what_was_expected(fields, message):
    with pytest.raises(ValueError, match=message):
        lb.ModelPatch(**fields)


def test_methods_mix_in_one_network():
    """EMP on norms, DropConnect or dropout on dense layers: the paper's future work."""
    net = small_net()
    bnn = lb.convert(net, lb.ModelPatch(patch="norm"))
    bnn = lb.convert(bnn, lb.DropConnect(rate=0.2), where="0")
    bnn = lb.convert(bnn, lb.ModelPatch(crossed=True, patch="output"))
    kinds = {path: layer.method.name for path, layer in lb.stochastic_layers(bnn)}
    assert kinds == {"0": "dropconnect", "1": "patch", "3": "patch", "4": "patch"}
    p = lb.predict(bnn, X, samples=8)
    assert p.epistemic.min() > 0
    for index in (0, 5):
        torch.testing.assert_close(lb.draw(bnn, index=index)(X).softmax(1), p.samples[index])
    torch.testing.assert_close(lb.mean(bnn)(X), net(X))
    choices = 2 * math.log(5) + 12 * math.log(2) + 10 * math.log(5)
    assert lb.summary(bnn).log_networks == pytest.approx(choices)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.LayerNorm([4, 2, 2]), nn.GroupNorm(2, 4)])
def test_norms_under_autocast_answer_in_the_dtype_of_the_plain_norm(norm):
    net = nn.Sequential(norm)
    bnn = lb.convert(net, lb.ModelPatch())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 4, 2, 2, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert bnn(x).dtype == net(x).dtype


def test_trained_plainly_first_all_copies_follow():
    """The copies lie around the shared tensors, so plain training before a late conversion moves them all."""
    torch.manual_seed(0)
    bnn = lb.convert(small_net(), lb.ModelPatch())
    apart = [copies_of(layer, "weight") - layer.base.weight.flatten() for layer in layers_of(bnn).values()]
    lb.fit(bnn, (X, Y), lb.Recipe(epochs=3, convert_at_epoch=2, batch_size=8, posterior_lr=1e-12), progress=False)
    for before, layer in zip(apart, layers_of(bnn).values(), strict=True):
        torch.testing.assert_close(
            copies_of(layer, "weight") - layer.base.weight.flatten(), before, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("method", [lb.ModelPatch(), lb.DropConnect(rate=0.5)], ids=["patch", "dropconnect"])
def test_several_samples_are_several_draws(method):
    """A draw serves a whole batch, so samples are passes; their average is the average of the passes' losses."""
    bnn = lb.convert(small_net(), method)
    torch.manual_seed(1)  # four draws that differ: two layers of five copies have 25
    terms = lb.elbo(bnn, X, Y, num_data=8, samples=4)
    outputs = terms.outputs.view(4, 8, 2)
    assert len({tuple(one.flatten().tolist()) for one in outputs}) == 4
    expected = torch.stack([F.cross_entropy(one, Y) for one in outputs]).mean()
    torch.testing.assert_close(terms.nll, expected)
    mixture = lb.elbo(bnn, X, Y, num_data=8, samples=4, aggregate="mixture")
    each = mixture.outputs.view(4, 8, 2).log_softmax(2)[:, torch.arange(8), Y]
    torch.testing.assert_close(mixture.nll, (math.log(4) - each.logsumexp(0)).mean())


@pytest.mark.parametrize("mixing", ["uniform", "learned"])
@pytest.mark.parametrize("crossed", [False, True])
def test_autocast_rounds_neither_copies_nor_divergence(crossed, mixing):
    bnn = lb.convert(small_net(), lb.ModelPatch(crossed=crossed, mixing=mixing))
    plain, divergence = lb.draw(bnn, index=3), lb.kl(bnn)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, inside = lb.draw(bnn, index=3), lb.kl(bnn)
    for one, other in zip(plain.parameters(), rounded.parameters(), strict=True):
        torch.testing.assert_close(other, one, atol=0, rtol=1e-6)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, divergence)


NORMS = {
    "batch": lambda: nn.BatchNorm2d(3),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "untracked": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "layer": lambda: nn.LayerNorm(4, eps=1e-3),
    "no_bias": lambda: nn.LayerNorm(4, bias=False),
    "group": lambda: nn.GroupNorm(3, 3),
    "instance": lambda: nn.InstanceNorm2d(3, affine=True),
    "rms": lambda: nn.RMSNorm(4),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_a_norm_with_a_chosen_copy_is_the_norm_itself(make, training):
    ours, theirs = make().train(training), make().train(training)
    shape = (5, 3, 4) if isinstance(ours, nn.BatchNorm1d) else (5, 3, 4, 4)
    tensors = {name: torch.randn_like(p) for name, p in ours.named_parameters()}
    for _ in range(3):
        x = torch.randn(shape) + 1
        found, expected = norm_with(ours, x, tensors, ()), functional_call(theirs, tensors, (x,))
        assert torch.equal(found, expected)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(dict(ours.named_buffers())[name], buffer), name


@pytest.mark.parametrize("crossed", [False, True])
def test_layers_are_sampled_together_as_each_alone(crossed):
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2))
    bnn = lb.convert(net, lb.ModelPatch(patch=("*",), crossed=crossed, init_spread=1.0)).double()
    layers = [layer for _, layer in lb.stochastic_layers(bnn)]
    noise = [(torch.rand(1, layer.nodes),) for layer in layers]
    every = Assignment(torch.zeros(1, dtype=torch.long))
    together = type(layers[0]).sample_of(layers, every, noise, None)
    for layer, own, found in zip(layers, noise, together, strict=True):
        torch.testing.assert_close(found, layer.sample(every, own, None), rtol=1e-12, atol=1e-12)
