"""Many networks as one: the exact twin of separate networks, in outputs, statistics, gradients and whole trainings."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import leanbayes as lb
from leanbayes.models import RegressionNet
from leanbayes_papers.patch import batched
from leanbayes_papers.patch.batched import BatchedRegression, CHUNK, Mask, Nothing, PatchedNorm, Shuffles, Training
from leanbayes_papers.patch.uci import Protocol

NETS, INPUTS, HIDDEN, COPIES, ROWS = 2, 3, 4, 3, 11
NORMS = {0: "first", 3: "second"}  # positions in RegressionNet


def networks(crossed: bool = False, seed: int = 0) -> BatchedRegression:
    torch.manual_seed(seed)
    norms = [PatchedNorm((COPIES, NETS, f), crossed=crossed, scale=0.2, spread=0.1) for f in (INPUTS, HIDDEN)]
    return BatchedRegression(*norms, nets=NETS, inputs=INPUTS, hidden=HIDDEN).double()


def separate(net: BatchedRegression, t: int) -> RegressionNet:
    """Return network t of the batch as one of its own; which copies its norms have is left to `chosen`."""
    twin = RegressionNet(INPUTS, hidden=HIDDEN).double()
    with torch.no_grad():
        for position, weight, bias in (
            (1, net.hidden_weight, net.hidden_bias),
            (4, net.output_weight, net.output_bias),
        ):
            twin.layers[position].weight.copy_(weight[0, t])
            twin.layers[position].bias.copy_(bias[0, t, :, 0])
        for position, name in NORMS.items():
            twin.layers[position].running_mean.copy_(getattr(net, name).running_mean[t])
            twin.layers[position].running_var.copy_(getattr(net, name).running_var[t])
    return twin.train(net.training)


def chosen(copies: list[torch.Tensor], choice: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pick scale and shift of both norms of one network element by element: copies (K, 2, F), choices (2, F)."""
    found = {}
    for position, of, z in zip(NORMS, copies, choice, strict=True):
        for which, name in enumerate(("weight", "bias")):
            elements = [of[int(k), which, j] for j, k in enumerate(z[which])]
            found[f"layers.{position}.{name}"] = torch.stack(elements)
    return found


@pytest.mark.parametrize("crossed", [False, True])
def test_outputs_statistics_and_gradients_are_those_of_separate_networks(crossed):
    net, generator = networks(crossed), torch.Generator().manual_seed(1)
    x, y = torch.randn(NETS, INPUTS, ROWS).double() * 3 + 1, torch.randn(NETS, ROWS).double()
    for _ in range(2):  # the second pass begins with moved statistics
        noise = net.noise(1, ROWS, generator)
        twins = [separate(net, t) for t in range(NETS)]
        outputs = net(x.unsqueeze(0), noise)
        loss = F.mse_loss(outputs[0, :, 0], y, reduction="sum") / ROWS
        gradients = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, [*net.parameters()]), strict=True))
        losses = []
        for t, twin in enumerate(twins):
            copies = [getattr(net, name).copies[:, :, t].detach().requires_grad_() for name in NORMS.values()]
            found = functional_call(twin, chosen(copies, [z[0, :, t] for z in noise]), x[t].T)
            torch.testing.assert_close(outputs[0, t], found.T)
            losses.append(F.mse_loss(found[:, 0], y[t]))
            losses[-1].backward()
            for name, of in zip(NORMS.values(), copies, strict=True):
                torch.testing.assert_close(gradients[f"{name}.copies"][:, :, t], of.grad)
            torch.testing.assert_close(gradients["hidden_weight"][0, t], twin.layers[1].weight.grad)
            torch.testing.assert_close(gradients["hidden_bias"][0, t, :, 0], twin.layers[1].bias.grad)
            torch.testing.assert_close(gradients["output_weight"][0, t], twin.layers[4].weight.grad)
            torch.testing.assert_close(gradients["output_bias"][0, t, :, 0], twin.layers[4].bias.grad)
            for position, name in NORMS.items():
                torch.testing.assert_close(getattr(net, name).running_mean[t], twin.layers[position].running_mean)
                torch.testing.assert_close(getattr(net, name).running_var[t], twin.layers[position].running_var)
        torch.testing.assert_close(loss, sum(losses))


@pytest.mark.parametrize("crossed", [False, True])
def test_every_draw_is_a_separate_network_in_evaluation(crossed):
    net, generator = networks(crossed), torch.Generator().manual_seed(1)
    x = torch.randn(NETS, INPUTS, ROWS).double()
    net(x.unsqueeze(0) + 2, net.noise(1, ROWS, generator))  # moves the statistics
    net.eval()
    noise = net.noise(5, 1, generator)
    outputs = net(x.unsqueeze(0), noise)
    assert outputs.shape == (5, NETS, 1, ROWS)
    for t in range(NETS):
        copies = [getattr(net, name).copies[:, :, t] for name in NORMS.values()]
        for s in range(5):
            found = functional_call(separate(net, t), chosen(copies, [z[s, :, t] for z in noise]), x[t].T)
            torch.testing.assert_close(outputs[s, t], found.T)


def test_emp_chooses_by_norm_and_network_ecmp_by_element():
    generator = torch.Generator().manual_seed(0)
    first, second = networks(crossed=False).noise(400, 7, generator)
    assert (first == first[:, :1, :, :1]).all()
    assert (second == second[:, :1, :, :1]).all()
    crossed, _ = networks(crossed=True).noise(400, 7, generator)
    for one, other in (
        (first[:, 0, 0, 0], second[:, 0, 0, 0]),  # norms
        (first[:, 0, 0, 0], first[:, 0, 1, 0]),  # networks
        (crossed[:, 0, 0, 0], crossed[:, 0, 0, 1]),  # elements
        (crossed[:, 0, 0, 0], crossed[:, 1, 0, 0]),  # scale and shift
    ):
        share = (one == other).double().mean().item()  # independent: equal with probability 1 / K
        assert share == pytest.approx(1 / COPIES, abs=4 * (1 / COPIES * (1 - 1 / COPIES) / 400) ** 0.5)


def test_copies_start_around_the_papers_scale():
    torch.manual_seed(0)
    copies = PatchedNorm((5, 20, 50), crossed=False, scale=0.2, spread=0.1).copies
    for which, centre in ((0, 0.2), (1, 0.0)):
        values = copies[:, which].flatten()
        assert values.mean().item() == pytest.approx(centre, abs=4 * 0.02 / len(values) ** 0.5)
        assert values.std().item() == pytest.approx(0.02, abs=4 * 0.02 / (2 * len(values)) ** 0.5)


def test_masks_keep_what_they_should_and_its_mean():
    mask = Mask(4, 50, rate=0.2).noise(10, 30, torch.Generator().manual_seed(0))
    assert mask.shape == (10, 4, 50, 30)
    assert set(mask.unique().tolist()) == {0.0, 1.25}
    assert mask.mean().item() == pytest.approx(1, abs=4 * (0.25 / mask.numel()) ** 0.5)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_masked_networks_multiply_inputs_and_hidden_units(rate):
    torch.manual_seed(0)
    net = BatchedRegression(Mask(2, 3, rate=rate), Mask(2, 4, rate=rate), nets=2, inputs=3, hidden=4)
    x, (first, second) = torch.randn(1, 2, 3, 9), net.noise(1, 9, torch.Generator().manual_seed(0))
    outputs = net(x, (first, second))
    for t in range(2):
        hidden = F.linear((x * first)[0, t].T, net.hidden_weight[0, t], net.hidden_bias[0, t, :, 0]).relu()
        found = F.linear(hidden * second[0, t].T, net.output_weight[0, t], net.output_bias[0, t, :, 0])
        torch.testing.assert_close(outputs[0, t], found.T)


# ------------------------------------------------------------------------------------ training


def test_shuffles_are_epochs_one_after_the_other():
    shuffles = Shuffles(3, 10, 4, torch.Generator().manual_seed(0))
    taken = torch.cat([shuffles.take(steps) for steps in (1, 3, 2, 4, 5)])  # 15 batches of 4: six epochs
    assert taken.shape == (15, 3, 4)
    epochs = taken.transpose(0, 1).reshape(3, 6, 10)
    assert torch.equal(epochs.sort(-1).values, torch.arange(10).expand(3, 6, 10))
    assert len({tuple(epoch.tolist()) for epoch in epochs.flatten(0, 1)}) == 18
    assert shuffles.left.shape == (3, 0)


@pytest.mark.parametrize("crossed", [False, True])
def test_a_training_is_that_of_separate_networks_under_torchs_adam(crossed):
    net, steps = networks(crossed), 7
    protocol = Protocol()
    starts = [
        (separate(net, t), [getattr(net, name).copies[:, :, t].detach().clone() for name in NORMS.values()])
        for t in range(NETS)
    ]
    data = torch.randn(NETS, 25, INPUTS).double(), torch.randn(NETS, 25).double()
    generator = torch.Generator().manual_seed(2)
    training = Training(net, data, protocol.optimizer(net), generator, steps=steps, batch=10)
    assert training.advance() == training.done == steps
    for t, (twin, copies) in enumerate(starts):
        copies = [of.requires_grad_() for of in copies]
        linear = [p for i in (1, 4) for p in twin.layers[i].parameters()]
        adam = torch.optim.Adam([*linear, *copies], lr=1e-3, weight_decay=0.01, foreach=False)
        for step in range(steps):
            parts = chosen(copies, [z[step, :, t] for z in training.noise])
            found = functional_call(twin, parts, training.inputs[step, t].T)
            adam.zero_grad()
            F.mse_loss(found, training.targets[step, t].T).backward()
            adam.step()
        torch.testing.assert_close(net.hidden_weight[0, t], twin.layers[1].weight)
        torch.testing.assert_close(net.output_bias[0, t, :, 0], twin.layers[4].bias)
        for position, name in NORMS.items():
            torch.testing.assert_close(getattr(net, name).running_var[t], twin.layers[position].running_var)
        for name, of in zip(NORMS.values(), copies, strict=True):
            torch.testing.assert_close(getattr(net, name).copies[:, :, t], of)


def patched(net: BatchedRegression, t: int, crossed: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return network t as `lb.ModelPatch` has it, and the basis of its copies: copies = centre + basis @ contrasts."""
    method = lb.ModelPatch(components=COPIES, crossed=crossed, patch=("norm",))
    bnn = lb.convert(separate(net, t), method).double()
    layers = dict(lb.stochastic_layers(bnn))
    with torch.no_grad():
        for layer, name in zip(layers.values(), NORMS.values(), strict=True):
            copies = getattr(net, name).copies[:, :, t].flatten(1)  # (K, 2 F), scales before shifts
            layer.base.weight.copy_(copies.mean(0)[: layer.base.weight.numel()])
            layer.base.bias.copy_(copies.mean(0)[layer.base.weight.numel() :])
            layer.posterior.contrasts.copy_(layer.posterior.basis.T @ (copies - copies.mean(0)))
    return bnn, layers


@pytest.mark.parametrize("crossed", [False, True])
def test_the_twin_takes_the_steps_of_model_patch(crossed):
    """With the draws of `lb.ModelPatch`, losses and copies agree step by step.

    The library trains centre c and contrasts u, the twin the copies c + B u (B orthonormal, orthogonal to ones). Then
    SGD at a rate r on the copies is SGD at r on u and at r / K on c.
    """
    net, rate, generator = networks(crossed), 0.05, torch.Generator().manual_seed(3)
    models = [patched(net, t, crossed) for t in range(NETS)]
    sgd = torch.optim.SGD(net.parameters(), lr=rate)
    centres = [layer.base.parameters() for _, layers in models for layer in layers.values()]
    slow = {parameter for part in centres for parameter in part}
    rest = [p for bnn, _ in models for p in bnn.parameters() if p not in slow and p.requires_grad]
    theirs = torch.optim.SGD([{"params": list(slow), "lr": rate / COPIES}, {"params": rest}], lr=rate)
    for step in range(4):
        x, y = (torch.randn(NETS, n, ROWS, generator=generator).double() for n in (INPUTS, 1))
        noise = []
        for name in NORMS.values():
            copies = getattr(net, name).copies.detach()
            features = copies.shape[-1]
            chosen_by = [dict(lb.draw(bnn.eval(), seed=0, index=step).named_modules()) for bnn, _ in models]
            position = next(p for p, n in NORMS.items() if n == name)
            picked = [torch.stack([m[f"layers.{position}"].weight, m[f"layers.{position}"].bias]) for m in chosen_by]
            distances = (copies - torch.stack(picked, 1).detach()[None]).abs()
            assert distances.min(0).values.max() < 1e-9, "a draw is one of the copies"
            noise.append(distances.argmin(0)[None].expand(1, 2, NETS, features))
        loss = F.mse_loss(net(x[None], tuple(noise))[0], y, reduction="sum") / ROWS
        losses = []
        for t, (bnn, _) in enumerate(models):
            with lb.draws(bnn.train(), seed=0, index=step):
                losses.append(F.mse_loss(bnn(x[t].T), y[t].T))
        torch.testing.assert_close(loss, sum(losses))
        for optimizer, value in ((sgd, loss), (theirs, sum(losses))):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    for t, (_, layers) in enumerate(models):
        for layer, name in zip(layers.values(), NORMS.values(), strict=True):
            torch.testing.assert_close(layer.every_copy(), getattr(net, name).copies[:, :, t].flatten(1))
            torch.testing.assert_close(layer.base.running_var, getattr(net, name).running_var[t])


def test_a_chunk_holds_rows_of_the_right_network():
    x = torch.arange(2 * 8 * 3.0).view(2, 8, 3)
    net = BatchedRegression(Nothing(), Nothing(), nets=2, inputs=3, hidden=4)
    optimizer = torch.optim.Adam(net.parameters())
    training = Training(net, (x, x[..., 0] * 10), optimizer, torch.Generator().manual_seed(0), steps=4, batch=6)
    training.advance()
    for t in range(2):
        rows = training.inputs[:4, t].transpose(1, 2).reshape(-1, 3)  # 24 rows: three epochs
        assert torch.equal(rows[:, 0].sort().values, x[t, :, 0].repeat_interleave(3))
        assert torch.equal(rows[:, 2], rows[:, 0] + 2)
        assert torch.equal(training.targets[:4, t, 0].flatten(), rows[:, 0] * 10)


def test_all_steps_are_made_whatever_the_chunks():
    net = networks()
    data = torch.randn(NETS, 6, INPUTS).double(), torch.randn(NETS, 6).double()
    optimizer = Protocol().optimizer(net)
    training = Training(net, data, optimizer, torch.Generator().manual_seed(0), steps=2 * CHUNK + 3, batch=100)
    assert training.batch == 6  # all rows, where there are fewer than a batch
    assert [training.advance() for _ in range(3)] == [3, CHUNK, CHUNK]
    assert training.done == training.steps
    assert not training.finish().training
    assert {int(state["step"]) for state in optimizer.state.values()} == {2 * CHUNK + 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("kind", ["EMP", "ECMP", "Dropout", "Ensemble"])
def test_captured_steps_beside_others_are_the_plain_ones(kind, monkeypatch):
    def begin(seed: int) -> Training:
        torch.manual_seed(seed)
        net = Protocol().network(kind, nets=4, inputs=5, hidden=8).cuda()
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(4, 60, 5, device="cuda", generator=generator)
        y = torch.randn(4, 60, device="cuda", generator=generator)
        return Training(net, (x, y), Protocol().optimizer(net), generator, steps=4 * CHUNK + 7, batch=20)

    captured = [begin(seed) for seed in range(3)]
    while captured[0].done < captured[0].steps:
        for training in captured:
            training.advance()
    assert all(training.graph is not None for training in captured)
    monkeypatch.setattr(batched, "WARM_UP", 10**9)
    for seed, training in enumerate(captured):
        plain = begin(seed)
        while plain.done < plain.steps:
            plain.advance()
        torch.testing.assert_close(training.finish().state_dict(), plain.finish().state_dict(), rtol=1e-3, atol=1e-4)
