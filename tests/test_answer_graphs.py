"""Answers as CUDA graphs: the numbers of eager calls, for every shape, after changes, and where nothing is captured."""

from __future__ import annotations

import inspect
import threading
import warnings

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.core.answer_graphs import MOST_GRAPHS

from .networks import small_net

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHODS = {
    "rank1": lb.Rank1(),
    "implicit": lb.ImplicitNodes(),
    "batch_ensemble": lb.BatchEnsemble(),
    "patch": lb.ModelPatch(),
    "mean_field": lb.MeanField(),
    "mc_dropout": lb.MCDropout(),
    "deep_ensemble": lb.DeepEnsemble(components=2),
}
NAMES = ("samples", "mean", "total", "aleatoric", "epistemic")


def test_capture_has_no_effect_on_a_cpu():
    model, x = lb.convert(small_net(), lb.Rank1()), torch.randn(3, 1, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = lb.Predictor(model, samples=4, capture=True)
        assert torch.equal(captured(x).samples, lb.predict(model, x, samples=4).samples)
        assert torch.equal(lb.Predictor(model, samples=4, capture=True, tolerance=0.1)(x).mean, captured(x).mean)
    assert captured.memory == _eager_memory(model, x)


def test_predictor_takes_the_arguments_of_predict_and_two_more():
    theirs, ours = inspect.signature(lb.predict).parameters, inspect.signature(lb.Predictor).parameters
    assert set(ours) - set(theirs) == {"memory", "capture"}
    assert ours["capture"].default is False
    assert set(theirs) - set(ours) == {"x"}


def _eager_memory(model: nn.Module, x: torch.Tensor) -> int:
    predictor = lb.Predictor(model, samples=4)
    predictor(x)
    return predictor.memory


class TestOnDevice:
    pytestmark = on_gpu

    @pytest.fixture(autouse=True)
    def _exact(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        torch.manual_seed(0)

    @pytest.mark.parametrize("rows", [1, 5, 700])
    @pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
    def test_a_replay_has_the_numbers_of_an_eager_call(self, method, rows):
        model, x = lb.convert(small_net(), method).cuda(), _inputs(rows)
        captured, eager = lb.Predictor(model, samples=6, capture=True), lb.Predictor(model, samples=6)
        for inputs in (x, x + 1, x):
            _close(_quietly(captured, inputs), eager(inputs))
        assert captured.capture

    @pytest.mark.parametrize("method", [lb.Rank1(), lb.ModelPatch()], ids=lambda m: m.name)
    def test_autocast_is_part_of_the_answer(self, method):
        model, x = lb.convert(small_net(), method).cuda(), _inputs(2)
        captured = lb.Predictor(model, samples=6, capture=True)
        exact = _quietly(captured, x).mean
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                rough = _quietly(captured, x)
                _close(rough, lb.Predictor(model, samples=6)(x), atol=1e-3)
            torch.testing.assert_close(_quietly(captured, x).mean, exact, atol=1e-6, rtol=0)
        assert not torch.equal(rough.mean, exact)

    def test_few_graphs_are_kept_and_answers_do_not_share_memory(self):
        model = lb.convert(small_net(), lb.Rank1()).cuda()
        captured, eager = lb.Predictor(model, samples=4, capture=True), lb.Predictor(model, samples=4)
        answers = [(x, _quietly(captured, x)) for rows in (1, 2, 3, 4, 5, 6, 1) for x in (_inputs(rows), _inputs(rows))]
        assert len(captured.graphs.graphs) == MOST_GRAPHS
        for x, answer in answers:
            _close(answer, eager(x))
        places = [getattr(answer, name).untyped_storage().data_ptr() for _, answer in answers for name in NAMES]
        assert len(places) == len(set(places))

    def test_changed_parameters_take_effect(self):
        model, x = lb.convert(small_net(), lb.Rank1()).cuda(), _inputs(3)
        captured = lb.Predictor(model, samples=4, capture=True)
        before = _quietly(captured, x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        _close(_quietly(captured, x), lb.Predictor(model, samples=4)(x))
        model.load_state_dict({name: tensor.clone() * 0.9 for name, tensor in model.state_dict().items()})
        now = _quietly(captured, x)
        _close(now, lb.Predictor(model, samples=4)(x))
        assert not torch.allclose(now.mean, before.mean, atol=1e-4)

    def test_memory_counts_the_graphs(self):
        model, x = lb.convert(small_net(), lb.Rank1()).cuda(), _inputs(64)
        captured, eager = lb.Predictor(model, samples=4, capture=True), lb.Predictor(model, samples=4)
        eager(x)
        p = _quietly(captured, x)
        assert captured.memory >= eager.memory + x.nbytes + p.samples.nbytes
        captured.refresh()
        assert captured.memory <= eager.memory

    def test_threads_and_streams_get_their_own_answers(self):
        model = lb.convert(small_net(), lb.Rank1()).cuda()
        captured, inputs = lb.Predictor(model, samples=4, capture=True), [_inputs(2 + i % 2) for i in range(6)]
        expected = [lb.Predictor(model, samples=4)(x) for x in inputs]
        torch.cuda.synchronize()
        found: dict[int, lb.Prediction] = {}

        def work(mine: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    for i in range(mine, len(inputs), 3):
                        found[i] = captured(inputs[i])
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == len(inputs)
        for i, prediction in found.items():
            _close(prediction, expected[i])

    @pytest.mark.parametrize("why", ["reads values", "selects entries by a mask", "tolerance", "noise for every row"])
    def test_what_cannot_be_captured_runs_as_usual_with_one_warning(self, why):
        options = {"tolerance": {"tolerance": 0.01}, "noise for every row": {"noise": "activation"}}.get(why, {})
        net = {"reads values": Reads, "selects entries by a mask": Selects}.get(why, Plain)
        model, x = lb.convert(net(), lb.Rank1()).cuda(), torch.randn(4, 6, device="cuda")
        captured = lb.Predictor(model, samples=4, capture=True, **options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            answers = [captured(x), captured(x)]
        said = [str(one.message) for one in seen if "without a CUDA graph" in str(one.message)]
        assert len(said) == 1
        assert why in said[0]
        expected = lb.Predictor(model, samples=4, **options)(x)
        for answer in answers:
            torch.testing.assert_close(answer.mean, expected.mean, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("method", ["rank1", "implicit", "batch_ensemble", "patch"])
    def test_small_batches_run_as_one_batch_with_the_numbers_of_folded_draws(self, method, monkeypatch):
        from leanbayes.core import batched

        model, x = lb.convert(small_net(), METHODS[method]).cuda(), _inputs(3)
        together = lb.Predictor(model, samples=8)
        (leaf,) = together.leaves
        ours = together(x)
        assert leaf.way(x, 3) == "tiled"
        for limits in (batched.SMALL, batched.TILED):
            monkeypatch.setitem(limits, "cuda", 0)
        _close(ours, lb.Predictor(model, samples=8)(x))


class Plain(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.change(self.a(x)))

    def change(self, h):
        return h.relu()


class Reads(Plain):
    """Branches on a value."""

    def change(self, h):
        return h if float(h.mean()) > 0 else -h


class Selects(Plain):
    """Selects entries by a mask; their number is needed on the host."""

    def change(self, h):
        return h + h[h > 0].mean()


def _inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, 1, 8, 8, device="cuda")


def _quietly(predictor: lb.Predictor, x: torch.Tensor) -> lb.Prediction:
    """Return an answer that was replayed: no warning says that it was not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="answers run without a CUDA graph")
        return predictor(x)


def _close(ours: lb.Prediction, theirs: lb.Prediction, atol: float = 1e-5) -> None:
    for name in NAMES:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=atol, rtol=0)
