"""Memory: a network is copied once to be drawn."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.methods import all_methods

MEASURE = """
import torch, leanbayes as lb
from torch import nn

def kilobytes(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(384, 4, 1536), 6, enable_nested_tensor=False)
linear = nn.Sequential(*(nn.Linear(768, 768) for _ in range(16)))
for network, method in ((linear, lb.MeanField()), (layers, lb.Rank1(components=2)), (linear, lb.ModelPatch())):
    bnn = lb.convert(network, method)
    weights = sum(p.numel() for p in network.parameters()) * 4 / 1024
    for take in (lb.mean, lb.draw):
        before = kilobytes("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # the highest use so far is forgotten
        plain = take(bnn)
        print((kilobytes("VmHWM") - before) / weights)
        del plain
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux says how much memory was used")
def test_a_draw_and_a_mean_take_one_copy_of_the_weights():
    # Memory that is given back at once, so that the highest use is the need.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=True)
    added = [float(line) for line in run.stdout.split()]
    assert len(added) == 6
    assert max(added) < 1.3
    assert min(added) > 0.9


def memory(model: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", sorted(name for name, kind in all_methods().items() if kind.targets))
def test_a_draw_shares_no_memory_with_its_model_or_within_itself(name):
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 6), nn.LayerNorm(6)
    )
    net.append(nn.Linear(6, 6))
    bnn = lb.convert(net, all_methods()[name](**({"min_cut": 0} if name == "nested" else {})))
    for plain in (lb.draw(bnn), lb.mean(bnn)):
        assert not memory(plain) & memory(bnn)
        assert len(memory(plain)) == len([*plain.parameters(), *plain.buffers()])
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in plain.parameters())


def test_ties_and_untouched_layers_survive_a_draw():
    net = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 9, bias=False))
    net[3].weight = net[0].weight
    bnn = lb.convert(net, lb.Rank1(), where="1")
    plain = lb.draw(bnn)
    assert plain[3].weight is plain[0].weight
    assert not memory(plain) & memory(bnn)
    assert torch.equal(plain[0].weight, net[0].weight)
