"""Codes: closed forms of their divergence against samples, enumeration and brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence, Normal

from leanbayes.distributions.ordered import log_tails_of
from leanbayes.generative import ProbabilisticUNet, VNDAutoencoder
from leanbayes.generative.codes import check_length, Code, gaussian_kl, standard, truncated
from tests.oracle.codes import best_log_tails

from .problems import images, small

SAMPLES = 100_000


def random_code(rows: int = 3, dimensions: int = 5, ordered: bool = True) -> Code:
    logits = torch.randn(rows, dimensions - 1, dtype=torch.float64) if ordered else None
    mean, raw = torch.randn(2, rows, dimensions, dtype=torch.float64)
    return Code.of(mean, raw, logits)


def one_row(code: Code, copies: int) -> Code:
    """Repeat the first distribution of a code."""
    tails = None if code.log_tails is None else code.log_tails[:1].double().expand(copies, -1)
    return Code(code.mean[:1].double().expand(copies, -1), code.std[:1].double().expand(copies, -1), tails)


def check_against_samples(q: Code, p: Code) -> None:
    """Compare a divergence with the mean of log q(h, z) - log p(h, z) over samples of q, four standard errors."""
    many = one_row(q, SAMPLES)
    h = many.rsample()
    length = (h != 0).sum(1)
    ratios = Normal(many.mean, many.std).log_prob(h) - Normal(p.mean[:1].double(), p.std[:1].double()).log_prob(h)
    ratio = torch.where(torch.arange(h.shape[1]) < length[:, None], ratios, 0.0).sum(1)
    if q.log_tails is not None:
        assert p.log_tails is not None
        tails = p.log_tails.reshape(-1, h.shape[1])[0].double()
        ratio += many.log_tails[0][length - 1] - tails[length - 1]
        assert len(length.unique()) > 1
    error = ratio.std() / math.sqrt(SAMPLES)
    assert abs(q.kl(p)[0].item() - ratio.mean().item()) < 4 * error + 1e-5 * ratio.mean().abs()


@torch.no_grad()
def test_the_divergence_of_vnd_ae_agrees_with_samples():
    for prior_keep in (0.5, 0.98):
        model = small(VNDAutoencoder, prior_keep=prior_keep)
        model.keep_logits.bias.uniform_(-1, 2)
        code = model.encode(images(1))
        check_against_samples(code, standard(code.mean, model.prior_log_tails))


@torch.no_grad()
@pytest.mark.parametrize("ordered", [True, False])
def test_the_divergence_of_the_probabilistic_unet_agrees_with_samples(ordered):
    model = ProbabilisticUNet(2, (1, 8, 8), dimensions=4, ordered=ordered, widths=(4, 8)).eval()
    x, y = images(1), torch.randint(2, (1, 8, 8))
    posterior, prior = model.posterior(torch.cat([x, 1 - y[:, None], y[:, None]], 1)), model.prior(x)
    check_against_samples(posterior, prior)
    check_against_samples(random_code(1, 4, ordered), prior)


def test_gaussian_divergence_is_that_of_torch():
    q, p = random_code(), random_code()
    expected = kl_divergence(Normal(q.mean, q.std), Normal(p.mean, p.std))
    torch.testing.assert_close(gaussian_kl(q, p), expected)
    plain = random_code(ordered=False)
    torch.testing.assert_close(plain.kl(Code(p.mean, p.std)), gaussian_kl(plain, p).sum(1))


def test_the_divergence_is_a_sum_over_tails_of_cumulative_kappas():
    """The corrected equation (30), term by term."""
    q, p = random_code(), random_code()
    kappa = kl_divergence(Normal(q.mean, q.std), Normal(p.mean, p.std))
    for row in range(3):
        expected = 0.0
        for j in range(5):
            tail = q.log_tails[row, j].exp().item()
            used = kappa[row, : j + 1].sum().item()
            expected += tail * (math.log(tail) - p.log_tails[row, j].item() + used)
        assert q.kl(p)[row].item() == pytest.approx(expected)


def test_a_code_has_no_divergence_to_itself():
    for ordered in (True, False):
        code = random_code(ordered=ordered)
        torch.testing.assert_close(code.kl(code), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_keep_and_length_by_enumeration():
    code = random_code()
    keep, length = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for row, j in itertools.product(range(3), range(5)):
        tail = code.log_tails[row, j].exp()
        keep[row, : j + 1] += tail
        length[row] += (j + 1) * tail
    torch.testing.assert_close(code.keep, keep)
    torch.testing.assert_close(code.length, length)
    assert (code.keep[:, 0] == 1).all()
    plain = random_code(ordered=False)
    assert torch.equal(plain.keep, torch.ones(3, 5, dtype=torch.float64))
    assert (plain.length == 5).all()


def test_lengths_of_samples_follow_the_tails():
    code = one_row(random_code(1), SAMPLES)
    length = (code.rsample(0.3) != 0).sum(1)
    tails = code.log_tails[0].exp()
    found = torch.bincount(length - 1, minlength=5) / SAMPLES
    assert ((found - tails).abs() < 4 * (tails * (1 - tails) / SAMPLES).sqrt()).all()


def test_soft_samples_fall_with_the_index_and_approach_hard_ones():
    code = random_code(400)
    normal, uniform = torch.randn(400, 5, dtype=torch.float64), torch.rand(400, 5, dtype=torch.float64)
    unit = Code(torch.ones_like(code.mean), torch.zeros_like(code.std), code.log_tails)  # samples are the masks
    soft = unit.at(normal, uniform, 1.0, hard=False)
    assert (soft[:, 0] == 1).all()
    assert (soft.diff(dim=1) <= 0).all()
    torch.testing.assert_close(unit.at(normal, uniform, 1e-7, hard=False), unit.at(normal, uniform), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_best_tails_beat_every_other_law_and_their_divergence_is_minus_log_c(dimensions):
    """A.5, by brute force over a grid on the simplex, for kappa given."""
    steps = 400
    for seed in range(3):
        torch.manual_seed(seed)
        kappa = torch.rand(dimensions, dtype=torch.float64)
        prior = log_tails_of(torch.randn(dimensions - 1, dtype=torch.float64))
        code = code_with(kappa, best_log_tails(kappa, prior))
        log_c = (prior - kappa.cumsum(0)).logsumexp(0)
        smallest = code.kl(standard(code.mean, prior)).item()
        assert smallest == pytest.approx(-log_c.item())
        free = torch.cartesian_prod(*[torch.arange(steps + 1)] * (dimensions - 1)).view(-1, dimensions - 1)
        grid = torch.cat([free, steps - free.sum(1, keepdim=True)], 1)
        grid = grid[grid[:, -1] >= 0]
        others = code_with(kappa, (grid / steps).double().log())
        found = others.kl(standard(others.mean, prior))
        assert (found >= smallest - 1e-12).all()
        best = grid[found.argmin()] / steps
        assert (best - code.log_tails.exp()).abs().max() <= 2 / steps


def code_with(kappa: Tensor, log_tails: Tensor) -> Code:
    """Return a code whose dimensions are kappa nats from a standard normal: means sqrt(2 kappa), deviations one."""
    mean = (2 * kappa).sqrt().expand_as(log_tails)
    return Code(mean, torch.ones_like(mean), log_tails)


def test_tails_that_never_occur_cost_nothing_and_give_no_nan():
    q, p = random_code(), random_code()
    never = torch.full((3, 5), -math.inf, dtype=torch.float64)
    never[:, 4] = 0  # a chain that keeps everything
    whole, prior = Code(q.mean, q.std, never), Code(p.mean, p.std, never)
    torch.testing.assert_close(whole.kl(prior), gaussian_kl(q, p).sum(1))
    assert (whole.length == 5).all()
    h = whole.at(torch.zeros_like(q.mean), torch.rand_like(q.mean))
    assert torch.equal(h, q.mean)
    assert (q.kl(prior) == math.inf).all()


@pytest.mark.parametrize("length", range(1, 6))
def test_a_cut_code_has_this_length_and_nothing_behind_it(length):
    code, prior = random_code(), random_code()
    cut = code.cut(length)
    used = torch.arange(5) < length
    assert torch.equal(cut.keep, used.double().expand(3, -1))
    assert torch.equal(cut.mean, code.mean * used)
    h = cut.rsample()
    assert torch.equal(h != 0, used.expand(3, -1))
    normal = torch.randn_like(code.mean)
    torch.testing.assert_close(cut.at(normal, torch.rand_like(normal)), (code.mean + code.std * normal) * used)
    behind = gaussian_kl(code, prior)[:, :length].sum(1)
    torch.testing.assert_close(cut.kl(prior.cut(length)), behind)
    torch.testing.assert_close(cut.kl(prior), behind - prior.log_tails[:, length - 1])


def test_no_cut_is_no_change():
    code = random_code()
    assert code.cut(None) is code


def test_what_is_cut_off_may_be_anything():
    h = torch.tensor([[1.0, 2.0, math.nan, math.inf]])
    assert torch.equal(truncated(h, 2), torch.tensor([[1.0, 2.0, 0.0, 0.0]]))


@pytest.mark.parametrize("length", [0, -1, 6, 2.0, True, "2"])
def test_a_bad_length_is_refused(length):
    with pytest.raises(ValueError, match=r"expected a code length from 1 to 5, got "):
        check_length(length, 5)
    with pytest.raises(ValueError, match="expected a code length"):
        random_code().cut(length)


def test_a_code_with_tails_and_one_without_are_not_compared():
    for q, p in ((random_code(), random_code(ordered=False)), (random_code(ordered=False), random_code())):
        with pytest.raises(ValueError, match="expected code and prior both with tails or both without"):
            q.kl(p)


def test_extreme_outputs_of_a_network_stay_finite():
    big = torch.tensor([[1e4, -1e4, 0.0]])
    code = Code.of(torch.zeros(1, 3), big, big[:, :2])
    assert code.kl(standard(code.mean, log_tails_of(torch.zeros(2)))).isfinite().all()
    assert (code.std > 0).all()
    assert code.rsample().isfinite().all()


def test_codes_are_exact_under_autocast():
    model = small(VNDAutoencoder)
    with torch.autocast("cpu", torch.bfloat16):
        code = model.encode(images())
    assert {code.mean.dtype, code.std.dtype, code.log_tails.dtype} == {torch.float32}
    assert random_code().rsample().dtype == torch.float64
