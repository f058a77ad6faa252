"""How records look at a prompt and in a notebook: a line or a short table, on any device, for every task."""

from __future__ import annotations

import xml.etree.ElementTree as Xml

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.runtime.display import average
from leanbayes.training import History
from tests.test_prediction import normal, record


def network(outputs=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def predicted(**kwargs):
    return lb.predict(lb.convert(network(), lb.Rank1()), torch.randn(64, 8), **kwargs)


def test_a_prediction_is_one_line():
    p = predicted()
    total, aleatoric, epistemic = (f"{each.mean():.3g}" for each in (p.total, p.aleatoric, p.epistemic))
    assert str(p) == repr(p)
    assert repr(p) == (
        f"Prediction(64 examples, 10 classes, 16 draws; total {total}, aleatoric {aleatoric}, epistemic {epistemic} "
        "nats on average)"
    )


def test_a_prediction_without_draws_says_so():
    assert "64 examples, 10 classes, draws not kept; total" in repr(predicted(keep_samples=False))


def test_a_prediction_of_weighted_draws_says_so():
    p = predicted(samples=4)
    fitted = lb.recalibrate.Stacking().fit(p, torch.zeros(64, dtype=torch.long))
    assert "4 weighted draws" in repr(fitted(p))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "told"),
    [
        (lb.Gaussian(), (5, 1), "5 examples, 1 target, 3 draws; total"),
        (lb.Gaussian(heteroscedastic=True), (5, 4), "5 examples, 2 targets, 3 draws; total"),
        (lb.Bernoulli(), (5, 1), "5 examples, yes or no, 3 draws; total"),
        (lb.Bernoulli(), (5, 7), "5 examples, 7 times yes or no, 3 draws; total"),
        (lb.Categorical(), (1, 4), "1 example, 4 classes, 3 draws; total"),
        (lb.Categorical(), (5, 4, 6, 7), "5 examples of 6 x 7, 4 classes, 3 draws; total"),
        (lb.Categorical(axis=-1), (5, 6, 4), "5 examples of 6, 4 classes, 3 draws; total"),
    ],
)
def test_a_prediction_tells_its_task(likelihood, outputs, told):
    p = record(likelihood, normal(3, *outputs))
    unit = "nats on average)" if likelihood.measure == "entropy" else "on average, variances)"
    assert repr(p).startswith(f"Prediction({told} ")
    assert repr(p).endswith(unit)
    assert Xml.fromstring(p._repr_html_()) is not None


def test_a_prediction_with_gradients_or_without_numbers_is_shown():
    mean = torch.full((2, 3), 1 / 3, requires_grad=True)
    parts = [mean.log().sum(1)] * 3
    assert "total -3.3" in repr(lb.Prediction(mean, *parts, None, None, lb.Categorical()))
    nowhere = [each.detach().to("meta") for each in (mean, *parts)]
    shown = repr(lb.Prediction(*nowhere, None, None, lb.Categorical()))
    assert (
        shown == "Prediction(2 examples, 3 classes, draws not kept; total ?, aleatoric ?, epistemic ? nats on average)"
    )
    half = [each.detach().bfloat16() for each in (mean, *parts)]
    assert "total -3.3" in repr(lb.Prediction(*half, None, None, lb.Categorical()))
    none = lb.Prediction(mean[:0], *[part[:0] for part in parts], None, None, lb.Categorical())
    assert "0 examples, 3 classes" in repr(none)
    assert "total ?" in repr(none)


def test_a_notebook_shows_the_first_examples_of_a_prediction():
    p = predicted()
    page = Xml.fromstring(p._repr_html_())
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows[0] == ["example", "class", "probability", "total", "aleatoric", "epistemic"]
    assert len(rows) == 1 + 8
    assert rows[1][:3] == ["0", str(int(p.mean[0].argmax())), f"{p.mean[0].max():.3g}"]
    assert "56 more" in p._repr_html_()
    real = lb.predict(lb.convert(network(1), lb.Rank1()), torch.randn(3, 8), lb.Gaussian())
    rows = [[cell.text for cell in row] for row in Xml.fromstring(real._repr_html_()).iter("tr")]
    assert rows[0] == ["example", "mean", "std", "total", "aleatoric", "epistemic"]
    assert rows[3][1] == f"{real.mean[2, 0]:.3g}"


def test_a_summary_is_shown_as_it_is_printed():
    found = lb.summary(lb.convert(network(), lb.Rank1()))
    assert repr(found) == str(found)
    assert "Row(" not in repr(found)


def test_the_terms_of_the_bound_are_one_line():
    bnn, x, y = lb.convert(network(), lb.Rank1()), torch.randn(64, 8), torch.randint(10, (64,))
    terms = lb.elbo(bnn, x, y, num_data=1000)
    nll, kl, loss = (f"{each.item():.4g}" for each in terms[:3])
    assert repr(terms) == f"ElboTerms(nll {nll}, kl {kl}, loss {loss}; outputs of shape (64, 10))"
    nll, *_ = terms
    assert nll is terms.nll


def test_a_history_is_a_short_table():
    machine = {"seconds": 0.5, "peak_memory_mb": 9.0}
    rows = [
        {"epoch": i, "loss": 1 / 3 / i, "nll": 0.3, "kl": 1234.5, "beta": 1.0, "lr": 0.1, **machine}
        for i in range(1, 10)
    ]
    history = History(rows)
    lines = repr(history).splitlines()
    assert lines[0] == "History(9 epochs, 4.5 s)"
    assert lines[1].split() == ["epoch", "loss", "nll", "kl", "beta", "lr"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3", "...", "7", "8", "9"]
    assert lines[2].split() == ["1", "0.3333", "0.3", "1234", "1", "0.1"]
    assert len(repr(History(rows[:7])).splitlines()) == 2 + 7
    assert Xml.fromstring(history._repr_html_()).find(".//tr") is not None
    assert history == rows, "it is still a list"


def test_a_history_without_rows_or_with_gaps_is_shown():
    assert repr(History()) == "History(0 epochs)"
    rows = [{"epoch": 1, "loss": None, "seconds": 1.0}, {"epoch": 2, "loss": 0.5, "valid_nll": 0.1, "seconds": 1.0}]
    lines = repr(History(rows)).splitlines()
    assert lines[0] == "History(2 epochs, 2.0 s)"
    assert [line.split() for line in lines[1:]] == [
        ["epoch", "loss", "valid_nll"],
        ["1", "-", "-"],
        ["2", "0.5", "0.1"],
    ]


def test_a_result_is_a_short_table():
    net, x, y = network(), torch.randn(64, 8), torch.randint(10, (64,))
    bnn = lb.convert(net, lb.Rank1())
    found = lb.evaluate(bnn, (x, y), ood={"noise": (torch.randn(32, 8), None)}, samples=4, plain=net)
    lines = repr(found).splitlines()
    assert lines[0] == "Result(64 examples)"
    assert lines[1].startswith(f"test       accuracy {found.metrics['test']['accuracy']:.4g}, nll ")
    assert lines[2].startswith(f"ood noise  auroc {found.metrics['ood']['noise']['auroc']:.4g}, aupr ")
    answer = found.cost.passes * found.cost.predict_ratio
    assert lines[3] == (
        f"cost       training step {found.cost.train_step_ratio:.3g} times the plain network's, an answer {answer:.3g} "
        f"plain passes, {found.cost.extra_percent:.3g} % more parameters"
    )
    assert len(lines) == 4
    assert all(len(line) < 300 for line in lines)
    assert Xml.fromstring(found._repr_html_()).find(".//tr") is not None


def test_a_result_of_real_targets_and_of_corrupted_images_is_shown():
    net, x = network(1), torch.randn(16, 8)
    found = lb.evaluate(net, (x, torch.randn(16, 1)), likelihood=lb.Gaussian())
    assert repr(found).splitlines()[1].startswith("test  rmse ")
    rows = [{"severity": s, "corruption": "fog", "accuracy": 0.5 + s / 10, "nll": 1.0} for s in (0, 1, 2)]
    found.metrics["shift"].extend(rows)
    assert repr(found).splitlines()[2] == "shift  2 corrupted sets, on average accuracy 0.65, nll 1"


def test_averages_are_short_and_never_fail():
    assert average(torch.tensor([1.0, 2.0])) == "1.5"
    assert average(torch.tensor([1, 2])) == "1.5"
    assert average(torch.empty(0)) == "?"
    assert average(torch.ones(3, device="meta")) == "?"
    shown = []
    torch.func.vmap(lambda row: shown.append(average(row)) or row)(torch.ones(2, 3))
    assert shown == ["?"]


def cells(record):
    return [[cell.text for cell in row] for row in Xml.fromstring(record._repr_html_()).iter("tr")]


def test_a_summary_in_a_notebook_has_a_row_for_each_layer():
    found = lb.summary(lb.convert(network(), lb.MCDropout()))
    assert cells(found) == [
        ["layer", "class", "weights", "method"],
        ["0", "Linear", "144", "mc_dropout"],
        ["1", "ReLU", None, "- no parameters"],
        ["2", "Linear", "170", "- not chosen"],
    ]
    lines = [each.text for each in Xml.fromstring(found._repr_html_()).iter("p")]
    assert lines == [found.headline, "an ensemble of 65,536 networks"]


def test_terms_of_the_bound_in_a_notebook_are_numbers():
    bnn = lb.convert(network(), lb.Rank1())
    terms = lb.elbo(bnn, torch.randn(4, 8), torch.zeros(4, dtype=torch.long), num_data=100)
    assert cells(terms) == [["nll", "kl", "loss"], [average(each, digits=4) for each in terms[:3]]]
    assert "outputs of shape (4, 10)" in terms._repr_html_()
