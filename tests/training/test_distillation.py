"""`lb.distill`: a student of one pass, against closed forms, quadrature and its teacher."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

import leanbayes as lb
from leanbayes.core.student import Place, Student, student_of, widened
from leanbayes.training import distillation
from tests.networks import small_net

QUICK = lb.Recipe(epochs=1, optimizer="adam", lr=1e-3, weight_decay=0.0)


def mlp(outputs: int = 3, inputs: int = 4, hidden: int = 24) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def made(likelihood, outputs: int = 3, extra: int = 1) -> Student:
    """Return a student whose outputs are its inputs: usual ones first, then further ones."""
    layer = nn.Linear(outputs + extra, outputs + extra, bias=False)
    nn.init.eye_(layer.weight)
    return Student(nn.Sequential(layer), likelihood, Place("0", 1, outputs, extra))


class Disagreeing(nn.Module):
    """Logits whose draws differ where the first input is large, and agree where it is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 32)
        self.last = nn.Linear(32, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def teacher_of_size(x: torch.Tensor) -> lb.Ensemble:
    """Return an ensemble of networks that agree near zero: the k-th has logits (+-x0 / 2 + x1, 0)."""
    members = []
    for sign in (1, -1, 1, -1):
        net = Disagreeing()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
            net.first.weight[0], net.first.weight[1] = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
            net.first.weight[2], net.first.weight[3] = torch.tensor([0.0, 1.0]), torch.tensor([0.0, -1.0])
            net.last.weight[0, :4] = torch.tensor([sign, -sign, 1.0, -1.0])
            noise = torch.Generator().manual_seed(0)
            net.first.weight[4:] = torch.randn(28, 2, generator=noise)  # unused by the teacher, of use to a student
        members.append(net)
    return lb.Ensemble(members)


def test_the_parts_of_a_categorical_prediction_are_those_of_one_dirichlet():
    logits, further = torch.randn(6, 3), torch.linspace(-4, 3, 6)
    p = lb.predict(made(lb.Categorical()), torch.cat([logits, further[:, None]], 1))
    torch.testing.assert_close(p.mean, logits.softmax(1))
    torch.testing.assert_close(p.total, torch.from_numpy(stats.entropy(p.mean.numpy(), axis=1)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    torch.testing.assert_close(p.epistemic / p.total, further.sigmoid())
    for row in range(6):
        # The Dirichlet of this mean and this expected entropy, by bisection; its draws have the same decomposition.
        mean = p.mean[row].double()
        low, high = -12.0, 12.0
        for _ in range(60):
            middle = (low + high) / 2
            a = torch.tensor(middle).double().exp()
            expected = torch.digamma(a + 1) - (mean * torch.digamma(a * mean + 1)).sum()
            low, high = (middle, high) if expected < p.aleatoric[row] else (low, middle)
        draws = torch.from_numpy(stats.dirichlet.rvs((a * mean).numpy(), 20_000, random_state=0)).clamp(min=1e-300)
        own = -(draws * draws.log()).sum(1)
        error = own.std() / len(own) ** 0.5
        assert abs(own.mean() - p.aleatoric[row]) < 4 * error + 1e-6


def test_the_parts_of_a_gaussian_prediction_follow_the_law_of_total_variance():
    x = torch.randn(5, 6)
    p = lb.predict(made(lb.Gaussian(heteroscedastic=True), 4, 2), x)
    noise, between = torch.nn.functional.softplus(x[:, 2:4]) + 1e-6, x[:, 4:].exp()
    torch.testing.assert_close(p.aleatoric, noise)
    torch.testing.assert_close(p.epistemic, between)
    means = x[:, :2] + between.sqrt() * torch.randn(200_000, 5, 2)  # draws of the function, then of the target
    y = means + noise.sqrt() * torch.randn_like(means)
    torch.testing.assert_close(y.var(0), p.total, rtol=4 * (2 / 200_000) ** 0.5, atol=0)
    target = torch.randn(5, 2)
    expected = torch.distributions.Normal(x[:, :2], (noise + between).sqrt()).log_prob(target).sum(1)
    torch.testing.assert_close(p.log_prob(target), expected)
    low, high = p.interval(0.9)
    torch.testing.assert_close((high - low) / 2, 1.6448536 * p.std)


def test_the_parts_of_a_bernoulli_prediction_are_entropies_of_each_answer():
    x = torch.randn(5, 4)
    p = lb.predict(made(lb.Bernoulli(), 2, 2), x)
    q = x[:, :2].sigmoid()
    entropy = torch.distributions.Bernoulli(q).entropy()
    torch.testing.assert_close(p.mean, q)
    torch.testing.assert_close(p.total, entropy)
    torch.testing.assert_close(p.epistemic, x[:, 2:].sigmoid() * entropy)


def test_a_new_student_has_the_outputs_of_its_network_and_few_more_weights():
    net = small_net().eval()
    x = torch.randn(4, 1, 8, 8)
    student = student_of(net, lb.Categorical(), x)
    torch.testing.assert_close(student.eval()(x), net(x))
    found = lb.summary(student)
    assert found.extra_parameters == student.extra_parameters == net[-1].in_features + 1
    assert found.parameters == sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d], ids=lambda kind: kind.__name__)
def test_a_wider_layer_keeps_its_outputs_and_adds_zeros(kind, bias):
    sizes, rows = ((3, 5), (2, 3)) if kind is nn.Linear else ((3, 5, 2), (2, 3, *[4] * (1 if kind is nn.Conv1d else 2)))
    layer = kind(*sizes, bias=bias)
    wide = widened(layer, "", 2)
    x = torch.randn(rows)
    torch.testing.assert_close(wide(x)[:, :5], layer(x))
    assert wide(x).shape[1] == 7
    assert not wide(x)[:, 5:].any()
    assert sum(p.numel() for p in layer.parameters()) < sum(p.numel() for p in wide.parameters())


def test_a_student_learns_where_its_teacher_disagrees():
    torch.manual_seed(0)
    x = torch.randn(600, 2)
    teacher = teacher_of_size(x)
    student = lb.distill(
        teacher,
        (x, torch.zeros(600)),
        perturbed=1,
        recipe=lb.Recipe(epochs=25, optimizer="adam", lr=1e-2),
        progress=False,
    )
    assert student.report["rows"] == 60
    assert student.report["spearman"] > 0.8
    assert student.report["divergence"] < 0.02
    new = torch.randn(500, 2)
    p, q = lb.predict(teacher, new, samples=4), lb.predict(student, new)
    assert stats.spearmanr(p.epistemic, q.epistemic).statistic > 0.8
    start = student_of(lb.mean(teacher, component=0), lb.Categorical(), x[:2])
    assert distillation.divergence(p, q) < 0.2 * distillation.divergence(p, lb.predict(start, new))


def test_a_student_of_real_targets_learns_the_variance_between_draws():
    torch.manual_seed(0)
    x = 2 * torch.rand(300, 1) - 1
    bnn = lb.convert(mlp(1, 1), lb.MeanField(init_std=0.2), likelihood=lb.Gaussian(std=0.3))
    student = lb.distill(
        bnn, (x, x), recipe=lb.Recipe(epochs=50, optimizer="adam", lr=2e-2), perturbed=1, progress=False
    )
    new = 2 * torch.rand(300, 1) - 1
    p, q = lb.predict(bnn, new), lb.predict(student, new)
    assert stats.spearmanr(p.epistemic.flatten(), q.epistemic.flatten()).statistic > 0.8
    assert 0.8 < student.report["epistemic"] < 1.25
    torch.testing.assert_close(q.aleatoric, torch.full_like(q.aleatoric, 0.09))
    assert (p.mean - q.mean).square().mean() < 0.1 * p.total.mean()
    assert abs(p.log_prob(new).mean() - q.log_prob(new).mean()) < 0.1


class Dense(nn.Module):
    """Logits per pixel at half the size, then enlarged."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, stride=2)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        return nn.functional.interpolate(self.last(self.first(x).relu()), scale_factor=2)


def test_a_student_of_pixels_predicts_and_is_saved(tmp_path):
    x = torch.randn(24, 1, 6, 6)
    bnn = lb.convert(Dense(), lb.Rank1(components=2, init_spread=0.5), likelihood=lb.Categorical())
    student = lb.distill(bnn, (x, torch.zeros(24)), recipe=QUICK, progress=False)
    p = lb.predict(student, x)
    assert p.mean.shape == (24, 3, 6, 6)
    assert p.epistemic.shape == (24, 6, 6)
    assert p.log_prob(torch.zeros(24, 6, 6, dtype=torch.long)).shape == (24, 6, 6)
    lb.save(student, tmp_path / "student.safetensors")
    again = lb.load(tmp_path / "student.safetensors", Dense())
    q = lb.predict(again, x)
    assert all(torch.equal(getattr(p, name), getattr(q, name)) for name in ("mean", "total", "aleatoric", "epistemic"))
    assert again.report == student.report


@pytest.mark.parametrize(
    "likelihood", [lb.Gaussian(std=0.5, learn=True), lb.Bernoulli()], ids=["gaussian", "bernoulli"]
)
def test_a_student_comes_back_from_its_file_with_its_likelihood(likelihood, tmp_path):
    x = torch.randn(30, 4)
    bnn = lb.convert(mlp(2), lb.ImplicitNodes(components=2), likelihood=likelihood)
    student = lb.distill(bnn, (x, x), recipe=QUICK, progress=False)
    lb.save(student, tmp_path / "student.safetensors", extra={"note": "mine"})
    again = lb.load(tmp_path / "student.safetensors", mlp(2))
    p, q = lb.predict(student, x), lb.predict(again, x)
    assert type(q.likelihood) is type(likelihood)
    assert torch.equal(p.total, q.total)
    assert torch.equal(p.log_prob(p.mean.round()), q.log_prob(p.mean.round()))
    assert isinstance(again, Student)
    assert torch.equal(again(x), student(x))


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    x = torch.randn(30, 4)
    student = lb.distill(lb.convert(mlp(), lb.Rank1(components=2)), (x, x), recipe=QUICK, progress=False)
    path = tmp_path / "student.safetensors"
    lb.save(student, path)
    with pytest.raises(ValueError, match="does not fit this network"):
        lb.load(path, nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"does not fit this network: 'network\.0\.weight'"):
        lb.load(path, mlp(hidden=9))
    with pytest.raises(ValueError, match="no posterior next to its weights"):
        lb.save(student, path, only="posterior")
    from safetensors.torch import load_file, save_file

    from leanbayes.core.checkpoint import header_of

    for change in ({"extra": 0}, {"axis": "one"}, {"extra": 10**9}, {"report": {"a": "b"}}, {"other": 1}):
        header = header_of(path)
        header["fields"] |= change
        damaged = tmp_path / "damaged.safetensors"
        save_file(load_file(path), damaged, {"leanbayes": json.dumps(header)})
        with pytest.raises(ValueError, match=r"damaged\.safetensors"):
            lb.load(damaged, mlp())


@pytest.mark.filterwarnings("ignore:init='random_sign' discards")
def test_a_student_starts_from_component_zero_where_the_mean_means_little():
    x = torch.randn(64, 4)
    bnn = lb.convert(mlp(), lb.BatchEnsemble(components=2, init="random_sign"))
    known = lb.predict(bnn, x)
    start = distillation._start(bnn, lb.Categorical(), x, known, None)
    gaps = {
        k: distillation.divergence(known, lb.predict(student_of(lb.mean(bnn, component=k), lb.Categorical(), x), x))
        for k in (None, 0)
    }
    best = min(gaps, key=gaps.get)
    torch.testing.assert_close(start.eval()(x), lb.mean(bnn, component=best).eval()(x))


def test_distillation_keeps_norm_statistics_and_the_teacher(tmp_path):
    x = torch.randn(40, 1, 8, 8)
    net = small_net()
    bnn = lb.convert(net, lb.Rank1(components=2, init_spread=0.3)).train()
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    student = lb.distill(bnn, (x, torch.zeros(40)), recipe=QUICK, progress=False)
    assert bnn.training
    assert all(torch.equal(before[name], tensor) for name, tensor in bnn.state_dict().items())
    norms = [module for module in student.modules() if isinstance(module, nn.BatchNorm2d)]
    first = [module for module in lb.mean(bnn).modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all(torch.equal(a.running_mean, b.running_mean) for a, b in zip(norms, first, strict=True))


def test_equal_calls_give_equal_students_also_after_an_interrupt(tmp_path):
    x = torch.randn(40, 4)
    bnn = lb.convert(mlp(), lb.Rank1(components=2, init_spread=0.3))
    given = {"recipe": replace(QUICK, epochs=3), "progress": False}

    def interrupt(state):
        if state.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lb.distill(bnn, (x, x), folder=tmp_path, callbacks=[interrupt], **given)
    one, two = lb.distill(bnn, (x, x), **given), lb.distill(bnn, (x, x), folder=tmp_path, resume=True, **given)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.report == two.report
    assert one.history[0]["seconds"] > 0


def test_nested_inputs_and_tokens_are_taken():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(7, 4), nn.Linear(6, 3)

        def forward(self, tokens, numbers):
            return self.last(torch.cat([self.words(tokens).mean(1), numbers], 1))

    x = {"tokens": torch.randint(7, (30, 5)), "numbers": torch.randn(30, 2)}
    bnn = lb.convert(Two(), lb.Rank1(components=2, init_spread=0.3), where="last")
    student = lb.distill(bnn, (x, torch.zeros(30)), recipe=QUICK, progress=False)
    assert lb.predict(student, x).epistemic.shape == (30,)
    moved = distillation.perturb(x, torch.Generator().manual_seed(0))
    assert torch.equal(moved["tokens"], x["tokens"])
    assert not torch.allclose(moved["numbers"], x["numbers"])


def test_perturbed_rows_have_the_moments_of_their_formula():
    x = torch.randn(40_000, 3)
    moved = distillation.perturb(x, torch.Generator().manual_seed(0))
    # E t^2 = E (1 - t)^2 = 1 for U(-1, 2); E s^2 = (16 - 1 / 16) / (4 log 4); E b^2 = 1 / 3; E e^2 by its integral.
    s, e = (16 - 1 / 16) / (4 * 1.3862944), (9 - 0.0009) / (2 * 4.6051702)
    found = moved.square().mean()
    error = moved.square().std() / len(x) ** 0.5
    assert abs(found - (2 * s + 1 / 3 + e)) < 5 * error


@pytest.mark.parametrize("shape", [(2, 9), (1, 28, 28), (1, 5, 6, 7)], ids=["series", "image", "volume"])
def test_coarse_noise_has_unit_variance_and_equal_neighbours(shape):
    noise = distillation._coarse_noise(torch.zeros(2000, *shape), torch.Generator().manual_seed(0))
    assert noise.shape == (2000, *shape)
    torch.testing.assert_close(noise.square().mean(), torch.tensor(1.0))
    if shape[-1] == 28:
        assert (noise[..., 1:] - noise[..., :-1]).square().mean() < 0.5  # of independent pixels: 2


def test_rank_correlation_equals_that_of_scipy():
    a, b = torch.randn(50).round(decimals=1), torch.randn(50).round(decimals=1)
    assert distillation.rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert distillation.rank_correlation(a, torch.ones(50)) == 0


class Softmax(nn.Sequential):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Reordered(nn.Sequential):
    def forward(self, x):
        return super().forward(x).flip(1)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Softmax(nn.Linear(4, 8), nn.Linear(8, 3)), "unchanged"),
        (Reordered(nn.Linear(4, 8), nn.Linear(8, 3)), "unchanged"),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Unflatten(1, (3, 2))), "more outputs"),
        (
            nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten()),
            "group",
        ),
    ],
)
def test_a_network_that_does_not_return_its_last_layer_is_refused(net, message):
    bnn = lb.convert(net, lb.Rank1(components=2, init_spread=0.3), where="0" if isinstance(net[0], nn.Linear) else "1")
    with pytest.raises(ValueError, match=f"({message}).*let the network end in a linear layer"):
        lb.distill(bnn, (torch.randn(30, 4), torch.zeros(30)), recipe=QUICK, progress=False)


def test_wrong_arguments_are_refused():
    x = torch.randn(30, 4)
    bnn = lb.convert(mlp(), lb.Rank1(components=2))
    with pytest.raises(ValueError, match="plain network, which has no draws"):
        lb.distill(mlp(), (x, x))
    with pytest.raises(ValueError, match="at least 2"):
        lb.distill(bnn, (x, x), samples=1)
    with pytest.raises(ValueError, match="perturbed"):
        lb.distill(bnn, (x, x), perturbed=-1)
    with pytest.raises(ValueError, match="at least 20 rows"):
        lb.distill(bnn, (x[:5], x[:5]))
    with pytest.raises(TypeError, match="expected a recipe"):
        lb.distill(bnn, (x, x), recipe=10)
    with pytest.raises(ValueError, match="all the same"):
        lb.distill(lb.convert(mlp(), lb.DropConnect(rate=0.0)), (x, x), progress=False)
    student = student_of(mlp(), lb.Categorical(), x)
    with pytest.raises(ValueError, match="got a student"):
        lb.distill(student, (x, x))
    with pytest.raises(ValueError, match="likelihood of the student, Categorical, got Gaussian"):
        lb.predict(student, x, lb.Gaussian())


def test_evaluation_reads_a_student_like_any_model():
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    bnn = lb.convert(mlp(), lb.Rank1(components=2, init_spread=0.3))
    student = lb.distill(bnn, (x, y), recipe=QUICK, progress=False)
    result = lb.evaluate(student, (x, y), ood={"far": (5 * x, None)}, plain=mlp())
    assert result.metrics["test"]["nll"] == pytest.approx(float(-lb.predict(student, x).log_prob(y).mean()), rel=1e-5)
    assert set(result.metrics["ood"]["far"]["scores"]) == {"entropy", "mutual_information", "confidence"}
    assert result.cost.passes == 1
    assert result.cost.extra_parameters == 25


def test_draws_that_are_certain_and_contradict_each_other_can_be_learned():
    """All uncertainty is epistemic then: its share is one, whose logit is infinite."""
    members = [nn.Sequential(nn.Linear(4, 2)) for _ in range(2)]
    for sign, net in zip((1.0, -1.0), members, strict=True):
        with torch.no_grad():
            net[0].weight.zero_()
            net[0].bias.copy_(torch.tensor([300.0 * sign, 0.0]))
    teacher, x = lb.Ensemble(members), torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    p = lb.predict(teacher, x, samples=2)
    assert torch.equal(p.epistemic, p.total)
    student = lb.distill(teacher, (x, torch.zeros(40)), samples=2, recipe=QUICK, progress=False)
    with torch.no_grad():
        shares = student.network(x)[:, -1].sigmoid()
    assert shares.min() > 0.99
    assert lb.predict(student, x).epistemic.isfinite().all()
