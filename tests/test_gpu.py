"""On an accelerator: the same draws as on a CPU, mixed precision, compiled training steps."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import leanbayes as lb
from tests import test_recomputation as recomputation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHODS = {
    "rank1": lb.Rank1(),
    "batch_ensemble": lb.BatchEnsemble(),
    "implicit": lb.ImplicitNodes(),
    "cauchy": lb.Rank1(posterior="cauchy", prior="cauchy"),
    "patch": lb.ModelPatch(),
    "mean_field": lb.MeanField(),
    "variance": lb.VarianceLayers(),
    "nested": lb.NestedDropout(),
    "dropconnect": lb.DropConnect(),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@each_method
def test_a_draw_is_the_same_function_on_every_device(method):
    bnn = lb.convert(lb.models.LeNet(), method)
    x = torch.randn(8, 1, 28, 28)
    here = lb.predict(bnn, x, samples=6)
    there = lb.predict(bnn.cuda(), x, samples=6)
    torch.testing.assert_close(there.to("cpu").samples, here.samples, atol=1e-4, rtol=1e-3)


@each_method
def test_a_compiled_bfloat16_training_step_runs_with_fresh_noise(method):
    torch.compiler.reset()  # torch compiles a function at most eight times
    bnn = lb.convert(lb.models.WideResNet(depth=10, widen=1), method).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(10, (8,), device="cuda")
    compiled = torch.compile(bnn, fullgraph=True)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(compiled(x).float(), y) + lb.kl(bnn) / 1000
        bnn.zero_grad()
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters())


@each_method
def test_activations_stay_in_bfloat16_and_channels_last(method):
    bnn = lb.convert(lb.models.WideResNet(depth=10, widen=1), method).cuda().to(memory_format=torch.channels_last)
    seen = []

    def look(layer, inputs, output):
        if output.dim() == 4:
            seen.append((output.dtype, output.is_contiguous(memory_format=torch.channels_last)))

    for _, layer in lb.stochastic_layers(bnn):
        layer.register_forward_hook(look)
    with torch.autocast("cuda", torch.bfloat16):
        bnn(torch.randn(8, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last))
    assert set(seen) == {(torch.bfloat16, True)}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", recomputation.METHODS.values(), ids=recomputation.METHODS)
def test_checkpointing_has_the_gradients_without_it(method, reentrant):
    """Recomputation runs in a thread of the device there."""
    torch.manual_seed(0)
    model, x = lb.convert(recomputation.Blocks().cuda(), method), torch.randn(12, 8, device="cuda")
    model.reentrant = reentrant
    for how, passes in (("blocks", 1), ("nested", 1), ("blocks", 2)):
        wanted = recomputation.run(model, x, "none", passes=passes)
        recomputation.assert_same(recomputation.run(model, x, how, passes=passes), wanted)
    wanted = recomputation.run(model, x, "none", passes=2)
    recomputation.assert_same(recomputation.run(model, x, "none", whole=True, passes=2), wanted)
    found = None
    with contextlib.suppress(RuntimeError):  # nested reentrant regions of several passes may be refused, not wrong
        found = recomputation.run(model, x, "nested", passes=2)
    assert found is not None or reentrant
    if found is not None:
        recomputation.assert_same(found, wanted)


@each_method
def test_fresh_noise_of_a_captured_step_differs_between_replays(method):
    torch.manual_seed(0)
    bnn, x = lb.convert(lb.models.LeNet().cuda(), method), torch.randn(8, 1, 28, 28, device="cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            bnn(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = bnn(x)
    replays = []
    for _ in range(8):
        graph.replay()
        replays.append(y.clone())
    assert any(not torch.equal(replays[0], other) for other in replays[1:])
