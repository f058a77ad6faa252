"""Students of nested networks: where they begin, what they are told, and what they have learned in the end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn.datasets import load_digits
from torch import nn, Tensor
from torch.distributions import Dirichlet

import leanbayes as lb
from leanbayes.methods.nested.layer import NestedLayer
from leanbayes.models import MLP, MobileNetV2, ResNeXt, SmallConvNet
from leanbayes.slim.distillation import (
    concentration_of,
    KERNEL_WIDTHS,
    Lesson,
    lesson_loss,
    LOG_PRECISION,
    ordering_units,
    SMALLEST_CONCENTRATION,
)

TRAIN = 1300
SHORT = lb.Recipe(epochs=2, batch_size=32, optimizer="adam", lr=5e-3)


def block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def conv_net() -> nn.Module:
    return nn.Sequential(
        *block(1, 16),
        nn.MaxPool2d(2),
        *block(16, 64),
        nn.MaxPool2d(2),
        *block(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def shuffle_orders(model: nn.Module) -> nn.Module:
    """Give every ordering unit keep probabilities of its own, as training would."""
    with torch.no_grad():
        for unit in ordering_units(model):
            unit.keep_logits.copy_(torch.randn(unit.keep_logits.shape))
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((lb.predict(model, x, samples=6).mean.argmax(1) == y).float().mean())


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    return x[order], torch.tensor(data.target)[order]


def trained_teacher(digits: tuple[Tensor, Tensor], rows: int, epochs: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bnn = lb.convert(conv_net(), lb.NestedDropout(groups=16))
        recipe = lb.Recipe(epochs=epochs, batch_size=64, optimizer="adam", lr=1e-2, beta=1e-3)
        lb.fit(bnn, tuple(part[:rows] for part in digits), recipe, progress=False)
        return bnn.eval()


@pytest.fixture(scope="module")
def teacher(digits) -> nn.Module:
    return trained_teacher(digits, rows=192, epochs=1)


@pytest.fixture
def few(digits) -> tuple[Tensor, Tensor]:
    return digits[0][:96], digits[1][:96]


# The discrepancy


def kernel(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.mean([np.exp(-np.sum((a - b) ** 2) / (2 * width**2)) for width in KERNEL_WIDTHS]))


def test_mmd_is_the_double_loop():
    samples, concentration = torch.rand(4, 3, 5).softmax(-1), torch.rand(3, 5) * 3
    torch.manual_seed(3)
    drawn = Dirichlet(concentration).sample((6,)).double().numpy()
    given = samples.double().numpy()
    rows = []
    for row in range(3):
        p, a = given[:, row], drawn[:, row]
        within = [np.mean([kernel(x, y) for i, x in enumerate(s) for j, y in enumerate(s) if i != j]) for s in (p, a)]
        rows.append(sum(within) - 2 * np.mean([kernel(x, y) for x in p for y in a]))
    torch.manual_seed(3)
    assert float(lb.slim.mmd(samples, concentration, draws=6)) == pytest.approx(np.mean(rows), abs=1e-6)


def test_mmd_is_zero_on_average_where_both_laws_are_one():
    concentration = torch.tensor([[2.0, 0.5, 1.0]]).expand(4000, 3)
    alike, other = (Dirichlet(torch.tensor(c)).sample((8, 4000)) for c in ([2.0, 0.5, 1.0], [0.5, 2.0, 1.0]))
    estimates = torch.stack([lb.slim.mmd(alike[:, i : i + 1], concentration[:1], draws=8) for i in range(1000)])
    error = float(estimates.std()) / math.sqrt(len(estimates))
    assert abs(float(estimates.mean())) < 4 * error
    assert float(lb.slim.mmd(other, concentration, draws=8)) > 20 * error


def expected_mmd(points: list[float], a: float, b: float) -> float:
    """Return the expectation of the estimator over Beta(a, b) draws, for two classes, by Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    nodes, weights = (nodes + 1) / 2, weights / 2
    weights = weights * stats.beta(a, b).pdf(nodes)

    def k(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        squares = 2 * (x[:, None] - y[None]) ** 2  # of (x, 1 - x) and (y, 1 - y)
        return np.mean([np.exp(-squares / (2 * width**2)) for width in KERNEL_WIDTHS], axis=0)

    given = np.array(points)
    pairs = k(given, given)[~np.eye(len(given), dtype=bool)]
    return float(pairs.mean() + weights @ k(nodes, nodes) @ weights - 2 * (k(given, nodes) @ weights).mean())


def test_mmd_and_its_gradient_are_unbiased():
    points, a, b, rows, step = [0.6, 0.7, 0.95], 2.0, 3.0, 1500, 1e-3
    samples = torch.tensor([[[x, 1 - x]] for x in points])
    concentration = torch.tensor([a, b]).repeat(rows, 1).requires_grad_()
    estimates = torch.stack([lb.slim.mmd(samples, row[None], draws=8) for row in concentration])
    (gradients,) = torch.autograd.grad(estimates.sum(), concentration)
    wanted = [
        expected_mmd(points, a, b),
        (expected_mmd(points, a + step, b) - expected_mmd(points, a - step, b)) / (2 * step),
        (expected_mmd(points, a, b + step) - expected_mmd(points, a, b - step)) / (2 * step),
    ]
    for values, truth in zip((estimates.detach(), *gradients.T), wanted, strict=True):
        error = float(values.std()) / math.sqrt(rows)
        assert abs(float(values.mean()) - truth) < 4 * error
        assert abs(truth) > 10 * error  # else the test could not tell


def test_mmd_grows_with_the_distance():
    samples = Dirichlet(torch.tensor([20.0, 2.0, 2.0])).sample((16, 200))
    found = [
        float(lb.slim.mmd(samples, torch.tensor([20.0 - moved, 2.0 + moved, 2.0]).expand(200, 3)))
        for moved in (0.0, 4.0, 8.0, 12.0, 16.0)
    ]
    assert found == sorted(found)
    assert found[-1] > 0.3


@pytest.mark.parametrize("size", [0.0, 3.0, 30.0])
def test_gradients_are_finite_and_alive_whatever_the_logits(size):
    logits = (size * torch.randn(64, 10)).requires_grad_()
    samples = torch.randn(6, 64, 10).softmax(-1)
    lb.slim.mmd(samples, concentration_of(logits)).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().sum() > 0


def test_mmd_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"samples \(S, B, C\)"):
        lb.slim.mmd(torch.rand(4, 3, 5), torch.rand(3, 4))
    with pytest.raises(ValueError, match="two draws"):
        lb.slim.mmd(torch.rand(1, 3, 5), torch.rand(3, 5))
    with pytest.raises(ValueError, match="draws=1"):
        lb.slim.mmd(torch.rand(4, 3, 5), torch.rand(3, 5), draws=1)


def test_the_dirichlet_has_the_softmax_as_its_mean():
    logits = torch.randn(50, 7) * 2
    found = concentration_of(logits)
    kept = (found > SMALLEST_CONCENTRATION).all(1)
    assert kept.sum() > 20
    torch.testing.assert_close(Dirichlet(found[kept]).mean, logits[kept].softmax(1), atol=1e-5, rtol=1e-4)


def test_concentrations_are_exponentials_and_bounded():
    logits = torch.randn(50, 7)
    small = logits - logits.logsumexp(1, keepdim=True)  # a precision of one
    torch.testing.assert_close(concentration_of(small), small.exp().clamp(min=SMALLEST_CONCENTRATION))
    for shift in (-100.0, 100.0):
        found = concentration_of(logits + shift)
        assert found.min() >= SMALLEST_CONCENTRATION
        assert found.sum(1).max() <= math.exp(LOG_PRECISION) * 1.001


# Where a student begins


def mlp() -> nn.Module:
    return MLP(5, 3, hidden=(24, 24, 20))


@pytest.mark.parametrize(
    ("make", "shape", "fields"),
    [
        (conv_net, (1, 8, 8), {}),
        (SmallConvNet, (1, 8, 8), {"tail": "geometric"}),
        (SmallConvNet, (1, 8, 8), {"weight_noise": False}),
        (SmallConvNet, (1, 8, 8), {"rescale": False, "always_on": 3}),
        (mlp, (5,), {}),
        (ResNeXt, (3, 16, 16), {}),
        (MobileNetV2, (3, 16, 16), {"streams": "inner"}),
    ],
)
def test_its_full_width_is_the_teacher_at_that_width(make, shape, fields):
    torch.manual_seed(0)
    bnn = lb.convert(make(), lb.NestedDropout(groups=8, **fields)).eval()
    if "tail" not in fields:
        shuffle_orders(bnn)
    x = torch.randn(3, *shape)
    pupil = lb.slim.student(bnn, 0.25)
    with torch.no_grad():
        wanted = lb.slim.extract(bnn, 0.25)(x)
        with lb.draws(pupil, mean=True, width=1.0):
            assert torch.equal(pupil(x), wanted)
        assert torch.equal(lb.slim.extract(pupil, 1.0)(x), wanted)
        with lb.draws(bnn, mean=True, width=0.25):
            torch.testing.assert_close(bnn(x), wanted, atol=1e-5, rtol=1e-5)


def test_it_takes_over_the_keep_probabilities_of_the_first_groups(teacher):
    pupil = lb.slim.student(teacher, 0.25)
    pairs = list(zip(ordering_units(pupil), ordering_units(teacher), strict=True))
    assert len(pairs) == 2
    for own, unit in pairs:
        assert own.groups == 4
        torch.testing.assert_close(own.keep, unit.keep[:4])


def test_the_share_that_is_always_on_stays():
    bnn = lb.convert(conv_net(), lb.NestedDropout(groups=16, always_on=8))
    pupil = lb.slim.student(bnn, 0.5)
    for unit in ordering_units(pupil):
        assert (unit.groups, unit.always_on) == (8, 4)
        assert unit.keep[-1] > 0.97  # always on in the teacher


def test_noise_stays_in_the_last_layer_alone(teacher):
    pupil = lb.slim.student(teacher, 0.25)
    noisy = [
        path for path, layer in lb.stochastic_layers(pupil) if "log_alpha" in dict(layer.posterior.named_parameters())
    ]
    assert noisy == ["13"]
    last, whole = pupil.get_submodule("13"), teacher.get_submodule("13")
    assert isinstance(last, NestedLayer)
    assert torch.equal(last.posterior.log_alpha, whole.posterior.log_alpha[:, :16])
    torch.testing.assert_close(lb.kl(pupil), last.kl())
    assert last.kl() > 0


def test_a_teacher_without_noise_has_a_student_without():
    bnn = lb.convert(conv_net(), lb.NestedDropout(groups=16, weight_noise=False))
    pupil = lb.slim.student(bnn, 4)
    assert not any("log_alpha" in name for name, _ in pupil.named_parameters())
    assert lb.kl(pupil) == 0


def test_a_student_with_one_channel_for_each_group_of_a_convolution():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, groups=2), nn.ReLU()]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 3))
    bnn = lb.convert(net, lb.NestedDropout(groups=4, weight_noise=False)).eval()
    small, x = lb.slim.student(bnn, 0.5).eval(), torch.randn(5, 3, 3, 3)
    assert (small[2].out_channels, small[4].base.out_channels) == (2, 4)
    with torch.no_grad(), lb.draws(small, mean=True, width=1.0):
        torch.testing.assert_close(small(x), lb.slim.extract(bnn, 0.5)(x))


def test_a_student_can_be_cut_saved_and_loaded(teacher, few, tmp_path):
    pupil = lb.slim.student(teacher, 0.25).eval()
    x = few[0][:5]
    small = lb.slim.extract(pupil, 0.5)
    assert small[4].out_channels == 8
    with torch.no_grad(), lb.draws(pupil, mean=True, width=0.5):
        torch.testing.assert_close(pupil(x), small.eval()(x), atol=1e-5, rtol=1e-5)
    lb.save(pupil, tmp_path / "student.safetensors")
    again = lb.load(tmp_path / "student.safetensors", lb.slim.extract(pupil, 1.0)).eval()
    torch.testing.assert_close(lb.predict(again, x).samples, lb.predict(pupil, x).samples)


def test_the_teacher_stays_as_it_is_and_shares_nothing(teacher):
    pupil = lb.slim.student(teacher, 0.5)
    assert not {p.data_ptr() for p in pupil.parameters()} & {p.data_ptr() for p in teacher.parameters()}
    assert teacher.get_submodule("13").posterior.log_alpha.shape == (10, 64)


def test_the_likelihood_is_kept():
    own = lb.Categorical(label_smoothing=0.1)
    bnn = lb.convert(conv_net(), lb.NestedDropout(groups=4), likelihood=own)
    found = [layer.likelihood for _, layer in lb.stochastic_layers(lb.slim.student(bnn, 0.5)) if layer.likelihood]
    assert [one.label_smoothing for one in found] == [0.1]


# Widths that go together


def test_teacher_and_student_are_narrowed_together(teacher, few):
    pupil = lb.slim.student(teacher, 0.25).train()
    lesson = Lesson(pupil, teacher, 2, "uniform", [few], 0)
    seen: dict[str, Tensor] = {}
    for name in ("5", "9"):  # the norms of the ordered streams
        pupil.get_submodule(name).register_forward_hook(
            lambda module, args, y, name=name: seen.update({name: (y != 0).any(0).flatten(1).any(1)})
        )
    per_group = 64 // 16
    for groups in (1, 2, 3, 4):
        outputs = lesson.at(groups, few[0])
        assert outputs.shape == (96, 3, 10)
        small = lesson.teachers[groups]
        for name in ("5", "9"):
            assert int(seen[name].sum()) == groups * per_group
            assert bool(seen[name][: groups * per_group].all())
            assert small.get_submodule(name).num_features == 4 * groups * per_group  # r = 16 / 4
        torch.testing.assert_close(outputs[:, 1:].sum(-1), torch.ones(96, 2))
        assert not torch.equal(outputs[:, 1], outputs[:, 2])


def test_the_teacher_listens_with_norms_of_its_width(teacher, few):
    lesson = Lesson(lb.slim.student(teacher, 0.25), teacher, 2, "uniform", [few], 0)
    before = torch.get_rng_state()
    lesson._teacher(0.5, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    wanted = lb.slim.narrow(teacher, 0.5, data=few)
    lesson.at(2, few[0])
    for name in ("5", "9"):
        torch.testing.assert_close(
            lesson.teachers[2].get_submodule(name).running_mean, wanted.get_submodule(name).running_mean
        )


def test_only_the_student_is_part_of_a_lesson(teacher, few):
    pupil = lb.slim.student(teacher, 0.25)
    lesson = Lesson(pupil, teacher, 2, "uniform", [few], 0)
    lesson.at(3, few[0])
    assert {id(p) for p in lesson.parameters()} == {id(p) for p in pupil.parameters()}
    assert torch.equal(lb.kl(lesson), lb.kl(pupil))
    lesson.train()
    assert not lesson.teachers[3].training
    assert not teacher.training


def test_laws_of_the_width():
    bnn = shuffle_orders(lb.convert(conv_net(), lb.NestedDropout(groups=16, always_on=8)))
    pupil = lb.slim.student(bnn, 0.5)
    uniform, own = (Lesson(pupil, bnn, 2, law, [], 0).law for law in ("uniform", "own"))
    torch.testing.assert_close(uniform, torch.tensor([0.0, 0, 0, 0.2, 0.2, 0.2, 0.2, 0.2]))
    torch.testing.assert_close(own, torch.stack([unit.log_tails.exp() for unit in ordering_units(pupil)]).mean(0))
    torch.testing.assert_close(own.sum(), torch.tensor(1.0))


def test_units_of_fewer_groups_count_by_their_share():
    bnn = lb.convert(MLP(5, 3, hidden=(8, 8, 2)), lb.NestedDropout(groups=8))
    pupil = lb.slim.student(bnn, 0.5)
    wide, narrow = ordering_units(pupil)
    assert (wide.groups, narrow.groups) == (4, 1)
    law = Lesson(pupil, bnn, 2, "own", [], 0).law
    torch.testing.assert_close(law, wide.log_tails.exp() / 2 + torch.tensor([0.0, 0, 0, 0.5]))


# Training of a student


def test_the_teacher_stays_unchanged_and_the_units_of_the_student_are_trainable(teacher, few):
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    pupil = lb.slim.distill(teacher, few, width=0.25, recipe=lb.Recipe(epochs=1, lr=1e-2), progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert all(unit.keep_logits.requires_grad for unit in ordering_units(pupil))


@pytest.mark.slow
def test_a_student_of_a_quarter_answers_like_its_teacher(digits):
    x, y = digits
    teacher = trained_teacher(digits, TRAIN, epochs=6)
    recipe = lb.Recipe(epochs=7, batch_size=64, optimizer="adam", lr=1e-2, beta=1e-3)
    pupil = lb.slim.distill(teacher, (x[:TRAIN], y[:TRAIN]), width=0.25, recipe=recipe, progress=False)
    data, test = x[:TRAIN], (x[TRAIN:], y[TRAIN:])
    slice_, start = lb.slim.narrow(teacher, 0.25, data=data), lb.slim.student(teacher, 0.25)
    whole = lb.slim.narrow(teacher, 1.0, data=data)
    assert accuracy(lb.slim.narrow(pupil, 1.0), *test) > accuracy(whole, *test) - 0.04
    assert accuracy(lb.slim.narrow(pupil, 1.0), *test) > accuracy(slice_, *test) + 0.05
    smallest = [accuracy(lb.slim.narrow(one, 0.25, data=data), *test) for one in (pupil, start)]
    assert smallest[0] > smallest[1] + 0.05
    believed = lb.predict(whole, test[0], samples=6).mean
    errors = [(lb.predict(one, test[0], samples=6).mean - believed).abs().sum(1).mean() for one in (pupil, slice_)]
    assert errors[0] < 0.6 * errors[1]
    results = lb.slim.widths(pupil, test, [0.5, 1.0], data=data, samples=2)
    assert results[1].metrics["test"]["accuracy"] > results[0].metrics["test"]["accuracy"]
    assert lb.evaluate(pupil, test, samples=2).metrics["test"]["accuracy"] > 0.85


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])


def test_the_same_recipe_gives_the_same_student(teacher, few):
    first, second, other = (
        weights(lb.slim.distill(teacher, few, recipe=lb.Recipe(**(SHORT.fields() | {"seed": seed})), progress=False))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


class Stopped(Exception):
    """The power is cut."""


def test_a_stopped_lesson_goes_on_as_if_nothing_had_happened(teacher, few, tmp_path):
    def stop(state):
        assert isinstance(state.model.student, nn.Sequential)
        raise Stopped

    wanted = weights(lb.slim.distill(teacher, few, recipe=SHORT, progress=False))
    with pytest.raises(Stopped):
        lb.slim.distill(teacher, few, recipe=SHORT, folder=tmp_path, callbacks=[stop], progress=False)
    resumed = lb.slim.distill(teacher, few, recipe=SHORT, folder=tmp_path, resume=True, progress=False)
    assert torch.equal(weights(resumed), wanted)


def test_labels_count_only_where_they_weigh(teacher, few):
    x, y = few
    (without, same), (taught, other) = (
        [weights(lb.slim.distill(teacher, (x, z), recipe=SHORT, labels=labels, progress=False)) for z in (y, 9 - y)]
        for labels in (0.0, 1.0)
    )
    assert torch.equal(without, same)
    assert not torch.equal(taught, other)


def test_the_loss_is_the_discrepancy_and_the_weighted_cross_entropy():
    logits, beliefs, y = torch.randn(8, 1, 5), torch.randn(8, 3, 5).softmax(-1), torch.randint(5, (8,))
    found = []
    for labels in (0.0, 2.0):
        torch.manual_seed(1)
        found.append(float(lesson_loss(torch.cat([logits, beliefs], 1), y, labels=labels)))
    torch.manual_seed(1)
    wanted = float(lb.slim.mmd(beliefs.transpose(0, 1), concentration_of(logits[:, 0])))
    picked = logits[:, 0].double().softmax(1)[torch.arange(8), y]
    assert found[0] == pytest.approx(wanted)
    assert found[1] - found[0] == pytest.approx(-2 * float(picked.log().mean()), abs=1e-5)


def test_the_law_of_the_keep_probabilities_can_be_used(teacher, few):
    pupil = lb.slim.distill(teacher, few, width=4, recipe=SHORT, law="own", samples=2, progress=False)
    for own, unit in zip(ordering_units(pupil), ordering_units(teacher), strict=True):
        torch.testing.assert_close(own.keep, unit.keep[:4])


def test_progress_is_shown(teacher, few, capsys):
    lb.slim.distill(teacher, few, recipe=SHORT)
    assert "epoch 2 of 2" in capsys.readouterr().err


class TwoInputs(nn.Module):
    """Called with keywords; returns more than the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.left(a)) + F.relu(self.right(b))
        return self.head(hidden), a


@pytest.mark.parametrize("named", [True, False])
def test_inputs_may_be_several(named):
    bnn = lb.convert(TwoInputs(), lb.NestedDropout(groups=4, first=True))
    a, b, y = torch.randn(64, 3), torch.randn(64, 2), torch.randint(4, (64,))
    x = {"a": a, "b": b} if named else (a, b)
    pupil = lb.slim.distill(bnn, (x, y), width=0.5, recipe=SHORT, progress=False)
    assert lb.predict(pupil, x, width=0.5).mean.shape == (64, 4)


def test_wrong_input_says_what_was_expected(teacher, few):
    regression = lb.convert(conv_net(), lb.NestedDropout(groups=4), likelihood=lb.Gaussian())
    for model, arguments, words in (
        (regression, {}, "predicts classes, got one with Gaussian"),
        (conv_net(), {}, "channels are ordered"),
        (teacher, {"recipe": lb.Recipe(compile=True)}, "compile=False"),
        (teacher, {"recipe": lb.Recipe(epochs=5, convert_at_epoch=2)}, "convert_at_epoch=0"),
        (teacher, {"samples": 1}, "at least 2"),
        (teacher, {"labels": -1.0}, "labels"),
        (teacher, {"law": "normal"}, "law"),
        (teacher, {"width": 1.5}, "width"),
    ):
        with pytest.raises(ValueError, match=words):
            lb.slim.distill(model, few, progress=False, **arguments)
