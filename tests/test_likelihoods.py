"""Likelihoods against torch's losses, scipy's densities and sums written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

import leanbayes as lb
from leanbayes.distributions.likelihoods import binary_entropy, entropy

few = settings(deadline=None, derandomize=True, max_examples=30)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, count: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------- classes


def test_categorical_log_probability_is_logit_minus_logsumexp():
    outputs, y = normal(6, 3), classes(6)
    expected = [row[k] - math.log(sum(math.exp(v) for v in row)) for row, k in zip(outputs.tolist(), y, strict=True)]
    torch.testing.assert_close(lb.Categorical().log_prob(outputs, y), torch.tensor(expected))
    torch.testing.assert_close(lb.Categorical()(outputs, y), -torch.tensor(expected).mean())


@pytest.mark.parametrize("axis", [1, -1, 2])
@pytest.mark.parametrize("space", [(4,), (4, 5)])
def test_categorical_reads_classes_on_any_axis_of_dense_outputs(axis, space):
    logits, y = normal(2, 3, *space), classes(2, *space)
    outputs = logits.movedim(1, axis)
    likelihood = lb.Categorical(axis=axis)
    table = torch.from_numpy(special.log_softmax(logits.numpy(), axis=1))
    log_prob = likelihood.log_prob(outputs, y)
    assert log_prob.shape == y.shape
    for position in np.ndindex(*y.shape):
        row, place = position[0], position[1:]
        assert log_prob[position].item() == pytest.approx(table[(row, y[position].item(), *place)].item(), abs=1e-5)
    mean, own = likelihood.predictive(outputs)
    torch.testing.assert_close(mean, table.exp())
    torch.testing.assert_close(own, torch.from_numpy(stats.entropy(table.exp().numpy(), axis=1)))


def test_categorical_reads_the_vocabulary_on_the_last_axis_of_sequences():
    outputs, y = normal(2, 7, 5), classes(2, 7, count=5)
    likelihood = lb.Categorical(axis=-1)
    expected = F.cross_entropy(outputs.reshape(14, 5), y.reshape(14))
    torch.testing.assert_close(likelihood.nll(outputs, y), expected)
    assert likelihood.predictive(outputs)[0].shape == (2, 5, 7)


@pytest.mark.parametrize("space", [(), (4, 5)])
@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": 1},
        {"class_weight": [0.2, 1.0, 3.0]},
        {"label_smoothing": 0.1},
        {"ignore_index": 1, "class_weight": [0.2, 1.0, 3.0], "label_smoothing": 0.1},
    ],
    ids=["ignore", "weight", "smoothing", "all"],
)
def test_categorical_loss_is_that_of_torch(options, space):
    outputs, y = normal(6, 3, *space), classes(6, *space)
    kept = dict(options)
    if "class_weight" in kept:
        kept["weight"] = torch.tensor(kept.pop("class_weight"))
    torch.testing.assert_close(lb.Categorical(**options).nll(outputs, y), F.cross_entropy(outputs, y, **kept))


def test_ignored_targets_count_for_nothing():
    outputs, y = normal(5, 3), torch.tensor([0, -100, 2, -100, 1])
    likelihood, kept = lb.Categorical(), torch.tensor([0, 2, 4])
    each = likelihood.log_prob(outputs, y)
    assert torch.equal(each[[1, 3]], torch.zeros(2))
    torch.testing.assert_close(likelihood.average(each, y), likelihood.log_prob(outputs[kept], y[kept]).mean())
    torch.testing.assert_close(likelihood.nll(outputs, y), likelihood.nll(outputs[kept], y[kept]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_classes_are_whole_numbers_of_any_type(dtype):
    outputs, y, likelihood = normal(6, 3), classes(6, count=2), lb.Categorical()
    same, p = y.to(dtype), outputs.softmax(1)
    for what, arguments in (("log_prob", [outputs]), ("nll", [outputs]), ("log_prob_of_mixture", [p, p[None], None])):
        method = getattr(likelihood, what)
        assert torch.equal(method(*arguments, same), method(*arguments, y)), what


def test_a_byte_is_not_taken_for_a_negative_number():
    """In uint8, -100 is 156: a class like others."""
    outputs, y, likelihood = normal(4, 200), torch.tensor([156, 3, 156, 7]), lb.Categorical()
    each = likelihood.log_prob(outputs, y.byte())
    assert torch.equal(likelihood.average(each, y.byte()), each.mean())
    assert torch.equal(likelihood.nll(outputs, y.byte()), F.cross_entropy(outputs, y))
    assert likelihood.log_prob_of_mixture(outputs.softmax(1), None, None, y.byte()).all()


def test_class_weight_and_smoothing_belong_to_the_loss_not_to_the_probability():
    outputs, y = normal(5, 3), classes(5)
    odd = lb.Categorical(class_weight=[0.1, 2.0, 5.0], label_smoothing=0.3)
    torch.testing.assert_close(odd.log_prob(outputs, y), lb.Categorical().log_prob(outputs, y))


def test_categorical_mixture_is_the_log_of_the_mean_probability():
    logits, y = normal(4, 6, 3), classes(6)
    samples = logits.softmax(2)
    y[2] = -100
    expected = [
        0.0 if k == -100 else math.log(sum(samples[s, b, k].item() for s in range(4)) / 4)
        for b, k in enumerate(y.tolist())
    ]
    actual = lb.Categorical().log_prob_of_mixture(samples.mean(0), samples, None, y)
    torch.testing.assert_close(actual, torch.tensor(expected))


@pytest.mark.parametrize("shape", [(5, 1), (5,), (5, 1, 4)])
@pytest.mark.parametrize("what", ["log_prob", "nll", "predictive"])
def test_outputs_of_a_regression_are_refused_as_classes(shape, what):
    arguments = (torch.zeros(shape),) if what == "predictive" else (torch.zeros(shape), torch.zeros(5).long())
    with pytest.raises(ValueError, match=r"at least two classes on axis 1.*lb\.Gaussian\(\).*lb\.Bernoulli\(\)"):
        getattr(lb.Categorical(), what)(*arguments)


@pytest.mark.parametrize("shape", [(4,), (5, 1), (1,)])
@pytest.mark.parametrize("what", ["log_prob", "nll", "log_prob_of_mixture"])
def test_class_targets_of_another_shape_are_refused(what, shape):
    likelihood, y = lb.Categorical(), torch.zeros(shape, dtype=torch.long)
    arguments = (normal(5, 3).softmax(1), None, None, y) if what == "log_prob_of_mixture" else (normal(5, 3), y)
    with pytest.raises(ValueError, match=rf"targets of shape \(5,\).*of shape \({shape[0]},"):
        getattr(likelihood, what)(*arguments)


def test_probabilities_are_float32_under_low_precision():
    outputs = normal(5, 3).bfloat16()
    assert lb.Categorical().log_prob(outputs, classes(5)).dtype == torch.float32
    assert lb.Bernoulli().log_prob(outputs, classes(5, 3, count=2)).dtype == torch.float32
    assert lb.Gaussian().log_prob(outputs, normal(5, 3)).dtype == torch.float32


# ------------------------------------------------------------------------------- yes or no


@pytest.mark.parametrize("shape", [(6, 1), (6, 4), (2, 3, 4)])
def test_bernoulli_is_the_binary_formula(shape):
    outputs, y = normal(*shape), classes(*shape, count=2)
    p = 1 / (1 + (-outputs.double()).exp())
    expected = torch.where(y == 1, p.log(), (1 - p).log()).float()
    likelihood = lb.Bernoulli()
    torch.testing.assert_close(likelihood.log_prob(outputs, y), expected)
    torch.testing.assert_close(likelihood.nll(outputs, y), -expected.mean())
    mean, own = likelihood.predictive(outputs)
    torch.testing.assert_close(mean, p.float())
    torch.testing.assert_close(own, -(p * p.log() + (1 - p) * (1 - p).log()).float())


def test_bernoulli_equals_two_classes():
    outputs, y = normal(6, 1), classes(6, count=2)
    two = torch.cat((torch.zeros(6, 1), outputs), 1)
    torch.testing.assert_close(lb.Bernoulli().nll(outputs, y), lb.Categorical().nll(two, y))
    torch.testing.assert_close(lb.Bernoulli().predictive(outputs)[1][:, 0], lb.Categorical().predictive(two)[1])


def test_bernoulli_mixture_is_the_log_of_the_mean_probability():
    samples, y = normal(4, 6, 1).sigmoid(), classes(6, count=2)
    p = samples.double().mean(0)[:, 0]
    expected = torch.where(y == 1, p.log(), (1 - p).log()).float()
    actual = lb.Bernoulli().log_prob_of_mixture(samples.mean(0), samples, None, y)
    torch.testing.assert_close(actual[:, 0], expected)


@pytest.mark.parametrize("y", [0.0, 1.0])
@pytest.mark.parametrize("size", [5.0, 14.0, 18.0])
def test_a_confident_mistake_costs_the_same_whichever_side_it_is_on(size, y):
    # One draw is a mixture of one: its log-probability is that of the draw, also where 1 - p rounds to 0 in float32.
    outputs, target = torch.tensor([[size if y == 0 else -size]]), torch.tensor([[y]])
    likelihood = lb.Bernoulli()
    mean, _ = likelihood.predictive(outputs)
    mixed = likelihood.log_prob_of_mixture(mean, mean[None], None, target)
    torch.testing.assert_close(mixed, likelihood.log_prob(outputs, target), rtol=0.1, atol=0)


def test_certain_predictions_have_no_entropy():
    assert torch.equal(binary_entropy(torch.tensor([0.0, 1.0])), torch.zeros(2))
    assert torch.equal(entropy(torch.tensor([[0.0, 1.0, 0.0]])), torch.zeros(1))


@few
@given(count=st.integers(2, 50))
def test_equal_probabilities_have_the_entropy_log_of_their_number(count):
    assert entropy(torch.full((1, count), 1 / count)).item() == pytest.approx(math.log(count), rel=1e-5)


# ------------------------------------------------------------------------------- real targets


@pytest.mark.parametrize("shape", [(6, 1), (6, 3), (4, 3, 2)])
@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
def test_gaussian_is_the_normal_density_summed_over_targets(std, shape):
    outputs, y = normal(*shape), normal(*shape, seed=1)
    each = stats.norm(outputs.numpy(), std).logpdf(y.numpy())
    expected = torch.from_numpy(each.reshape(shape[0], -1).sum(1)).float()
    likelihood = lb.Gaussian(std=std)
    torch.testing.assert_close(likelihood.log_prob(outputs, y), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(likelihood.nll(outputs, y), -expected.mean(), rtol=1e-4, atol=1e-5)


def test_fixed_noise_is_no_parameter_and_learned_noise_is_one():
    assert list(lb.Gaussian(std=0.3).parameters()) == []
    learned = lb.Gaussian(std=0.3, learn=True)
    (log_std,) = learned.parameters()
    assert log_std.exp().item() == pytest.approx(0.3)


def test_learned_noise_converges_to_the_residuals():
    # The maximum likelihood of a normal standard deviation is the root mean square of the residuals.
    outputs, y = normal(50, 2), normal(50, 2, seed=1)
    likelihood = lb.Gaussian(std=1.0, learn=True)
    optimizer = torch.optim.LBFGS(likelihood.parameters(), line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = likelihood.nll(outputs, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    best = (outputs - y).square().mean().sqrt().item()
    assert likelihood.predictive(outputs)[1][0, 0].sqrt().item() == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("targets", [1, 3])
def test_heteroscedastic_outputs_are_means_then_raw_variances(targets):
    outputs, y = normal(6, 2 * targets), normal(6, targets, seed=1)
    mean, raw = outputs[:, :targets], outputs[:, targets:]
    variance = raw.double().exp().log1p() + 1e-6
    expected = stats.norm(mean.numpy(), variance.sqrt().numpy()).logpdf(y.numpy()).sum(1)
    likelihood = lb.Gaussian(heteroscedastic=True)
    torch.testing.assert_close(likelihood.log_prob(outputs, y), torch.from_numpy(expected).float())
    predicted, own = likelihood.predictive(outputs)
    torch.testing.assert_close(predicted, mean)
    torch.testing.assert_close(own, variance.float())


@pytest.mark.parametrize(
    ("likelihood", "output_shape", "target_shape"),
    [
        (lb.Gaussian(std=0.5), (6,), (6,)),
        (lb.Gaussian(std=0.5), (6,), (6, 1)),
        (lb.Gaussian(std=0.5), (6, 1), (6,)),
        (lb.Bernoulli(), (6,), (6,)),
        (lb.Bernoulli(), (6, 1), (6,)),
    ],
)
def test_one_target_a_row_may_come_with_or_without_its_axis(likelihood, output_shape, target_shape):
    outputs, y = normal(6), classes(6, count=2).float()
    expected = likelihood.nll(outputs[:, None], y[:, None])
    torch.testing.assert_close(likelihood.nll(outputs.view(output_shape), y.view(target_shape)), expected)


@pytest.mark.parametrize(
    ("outputs", "y"),
    [((6, 1), (5,)), ((6, 2), (6,)), ((6, 2), (2, 6)), ((6, 1), (6, 6)), ((6, 2), (6, 1)), ((6, 1), (1,))],
)
@pytest.mark.parametrize("likelihood", [lb.Gaussian(), lb.Bernoulli()], ids=["gaussian", "bernoulli"])
def test_targets_that_would_only_broadcast_are_refused(likelihood, outputs, y):
    name = type(likelihood).__name__
    expected = rf"{name} expected targets of shape \({outputs[0]}, {outputs[1]}\), got \({y[0]},"
    with pytest.raises(ValueError, match=expected):
        likelihood.nll(torch.zeros(outputs), torch.zeros(y))
    mean = torch.full(outputs, 0.5)
    with pytest.raises(ValueError, match=expected):
        likelihood.log_prob_of_mixture(mean, mean[None], mean[None], torch.zeros(y))


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3)])
def test_heteroscedastic_outputs_need_an_even_last_axis(shape):
    with pytest.raises(ValueError, match="even last axis, got outputs of shape"):
        lb.Gaussian(heteroscedastic=True).predictive(torch.zeros(shape))


@pytest.mark.parametrize("targets", [1, 2])
def test_gaussian_mixture_is_the_log_of_the_mean_joint_density(targets):
    samples, y = normal(5, 4, targets), normal(4, targets, seed=1)
    noise = normal(5, 4, targets, seed=2).square() + 0.1
    density = stats.norm(samples.numpy(), noise.sqrt().numpy()).pdf(y.numpy()).prod(2).mean(0)
    actual = lb.Gaussian().log_prob_of_mixture(samples.mean(0), samples, noise, y)
    torch.testing.assert_close(actual, torch.from_numpy(density).log().float(), rtol=1e-4, atol=1e-5)


def test_gaussian_mixture_survives_densities_below_the_smallest_float():
    samples, noise = torch.zeros(3, 1, 1), torch.full((3, 1, 1), 1e-4)
    actual = lb.Gaussian().log_prob_of_mixture(samples.mean(0), samples, noise, torch.full((1, 1), 2.0))
    assert actual.item() == pytest.approx(stats.norm(0, 0.01).logpdf(2.0), rel=1e-5)


def test_gaussian_mixture_without_draws_says_how_to_get_them():
    with pytest.raises(ValueError, match="keep_samples=True"):
        lb.Gaussian().log_prob_of_mixture(torch.zeros(3, 1), None, None, torch.zeros(3, 1))


@pytest.mark.parametrize("std", [0, -1.0, math.inf, math.nan, "1"])
def test_gaussian_refuses_a_std_that_is_no_positive_number(std):
    with pytest.raises(ValueError, match="expected std to be a positive number"):
        lb.Gaussian(std=std)


def test_gaussian_refuses_two_sources_of_noise():
    with pytest.raises(ValueError, match="learn=True and heteroscedastic=True"):
        lb.Gaussian(learn=True, heteroscedastic=True)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (lb.Categorical(axis=-1, ignore_index=0, class_weight=[1.0, 2.0], label_smoothing=0.1), classes(4, count=2)),
        (lb.Gaussian(std=0.2), normal(4, 2)),
        (lb.Gaussian(heteroscedastic=True), normal(4, 1)),
        (lb.Bernoulli(), classes(4, 2, count=2)),
    ],
    ids=["categorical", "gaussian", "heteroscedastic", "bernoulli"],
)
def test_options_rebuild_the_same_likelihood(likelihood, y):
    twin, plain = type(likelihood)(**likelihood.options), type(likelihood)()
    outputs = normal(4, 2, seed=3)
    assert twin.options == likelihood.options
    assert torch.equal(twin.nll(outputs, y), likelihood.nll(outputs, y))
    assert (likelihood.options == plain.options) == isinstance(likelihood, lb.Bernoulli)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (lb.Categorical(), (5, 4), (5,)),
        (lb.Categorical(), (5, 4, 2, 3), (5, 2, 3)),
        (lb.Categorical(axis=-1), (5, 3, 4), (5, 3)),
        (lb.Bernoulli(), (5, 1), (5,)),
        (lb.Bernoulli(), (5, 7), (5, 7)),
        (lb.Gaussian(), (5, 7), (5, 7)),
        (lb.Gaussian(), (5, 7, 2), (5, 7, 2)),
        (lb.Gaussian(heteroscedastic=True), (5, 7, 4), (5, 7, 2)),
    ],
    ids=str,
)
def test_the_nll_times_the_targets_of_all_rows_is_that_of_the_data(likelihood, outputs, targets):
    out = normal(*outputs)
    y = normal(*targets) if isinstance(likelihood, lb.Gaussian) else classes(*targets, count=2)
    whole = likelihood.nll(out, y) * 5 * likelihood.targets_per_row(y)
    torch.testing.assert_close(whole, -likelihood.log_prob(out, y).sum())


@pytest.mark.parametrize("wrong", [2.0, -1.0])
def test_yes_or_no_has_no_other_targets(wrong):
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.tensor([1.0] * 7 + [wrong])[:, None]
    bnn = lb.convert(torch.nn.Linear(3, 1), lb.Rank1(), likelihood=lb.Bernoulli())
    with pytest.raises(
        ValueError, match=rf"expected targets of lb\.Bernoulli\(\) from 0 \(no\) to 1 .*, got {wrong:g};"
    ):
        lb.predict(bnn, x).log_prob(y)
    with pytest.raises(ValueError, match=r"expected targets of lb\.Bernoulli"):
        lb.fit(bnn, (x, y), lb.Recipe(epochs=1), progress=False)
    soft = y.clamp(0.2, 0.8)
    assert lb.predict(bnn, x).log_prob(soft).isfinite().all()
    lb.fit(bnn, (x, soft), lb.Recipe(epochs=1), progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lb.Categorical(class_weight=[1.0, -1.0]), "expected class_weight to be a number of at least zero for"),
        (lambda: lb.Categorical(class_weight=[1.0, math.nan]), "expected class_weight to be a number of at least zero"),
        (
            lambda: lb.Categorical(class_weight=2.0),
            "expected class_weight to be a number of at least zero for each class",
        ),
        (lambda: lb.Categorical(label_smoothing=2.0), "expected label_smoothing to lie between 0 and 1, got 2.0"),
        (lambda: lb.Gaussian(learn="no"), "expected learn to be True or False, got 'no'"),
        (lambda: lb.Gaussian(heteroscedastic=None), "expected heteroscedastic to be True or False, got None"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
