"""The command that measures a GPU works: rehearsed on a CPU with tiny networks, resumed, and shown as a table."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import cost, gpu
from benchmarks.problems import converted, PROBLEMS, train_step, VARIANTS
from leanbayes.core import answer_graphs, step_graph
from leanbayes.methods import all_methods
from tests.fake_cuda import FakeCuda


def test_a_rehearsal_writes_a_result_for_each_pair_and_is_resumed(tmp_path, capsys):
    arguments = ["--device", "cpu", "--rehearse", "--out", str(tmp_path), "--only", "wrn-16-4-eager-patch.json"]
    assert cost.main(arguments) == 0
    file = tmp_path / "wrn-16-4-eager-patch.json"
    result = json.loads(file.read_text())
    assert result["net"] == "wrn-16-4"
    assert result["ratio"] > 0
    assert result["plain_ms"] > 0
    assert "| wrn-16-4, 4, eager |" in capsys.readouterr().out
    file.write_text(json.dumps(result | {"ratio": 77.0}))
    assert cost.main(arguments) == 0  # a finished pair is not measured again
    assert "77.00" in capsys.readouterr().out


def test_a_spent_budget_begins_no_pair(tmp_path, capsys):
    arguments = ["--rehearse", "--out", str(tmp_path), "--only", "wrn-16-4-eager", "--budget", "-1"]
    assert cost.main(arguments) == 0
    assert not list(tmp_path.iterdir())
    assert "pairs are left" in capsys.readouterr().err


def test_a_pair_that_fails_is_counted(tmp_path, monkeypatch, capsys):
    """Its process ends with an error; here it runs in this process."""

    def run(command, **options):
        with pytest.raises(KeyError) as error:
            gpu.main(command[3:])
        return subprocess.CompletedProcess(command, 1, "", str(error.value))

    monkeypatch.setattr(gpu, "pairs", lambda: [gpu.Pair("wrn-16-4", "no_such_method", "eager")])
    monkeypatch.setattr(subprocess, "run", run)
    assert cost.main(["--rehearse", "--out", str(tmp_path)]) == 1
    assert "no_such_method" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_pair_has_a_network_and_a_method():
    pairs = gpu.pairs()
    assert len({pair.file for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert pair.net in PROBLEMS
        assert pair.method in all_methods() | VARIANTS
    for net in ("wrn-28-10", "wrn-16-4", "resnet-50", "bert-base"):
        for mode in ("graph", "eager") + (("compiled",) if net != "wrn-16-4" else ()):
            for method in ("rank1", "batch_ensemble", "implicit", "patch"):
                assert gpu.Pair(net, method, mode) in pairs


def test_a_pair_that_fails_among_others_is_tried_again_alone(tmp_path, monkeypatch, capsys):
    pairs = [gpu.Pair("wrn-16-4", name, "eager") for name in ("patch", "rank1")]
    waves, own = [], gpu.run_wave
    monkeypatch.setattr(gpu, "run_wave", lambda wave, options: waves.append(wave) or own(wave, options))
    monkeypatch.setattr(gpu, "pairs", lambda: pairs)
    monkeypatch.setattr(gpu, "table", lambda folder, chosen: "")

    def command(pair, options):
        text = f"import sys; print('noise\\nREADY', flush=True); assert sys.stdin.readline() == 'go\\n'; {rest[pair]}"
        return [sys.executable, "-c", text, str(options.out / pair.file)]

    write = "open(sys.argv[1], 'w').write('{}')"
    again = "import os; seen = sys.argv[1] + '.seen'; first = not os.path.exists(seen); open(seen, 'w'); "
    rest = {pairs[0]: f"{again} sys.exit('out of memory' if first else 0)", pairs[1]: write}
    monkeypatch.setattr(gpu, "_command", command)
    assert cost.main(["--rehearse", "--out", str(tmp_path)]) == 0
    assert waves == [pairs, pairs[:1]]
    assert "out of memory" in capsys.readouterr().err
    assert (tmp_path / pairs[1].file).is_file()


def test_a_pair_that_hangs_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "pairs", lambda: [gpu.Pair("wrn-16-4", "patch", "eager")])
    monkeypatch.setattr(gpu, "_command", lambda pair, options: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(gpu, "LONGEST", 1)
    assert cost.main(["--rehearse", "--out", str(tmp_path)]) == 1
    assert "exit -9" in capsys.readouterr().err


def test_a_pair_without_the_command_that_began_it_measures_nothing(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "wrn-16-4", "patch", "eager", "--rehearse", "--device", "cpu"]
    command += ["--file", str(tmp_path / "one.json")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has ended" in done.stderr
    assert not list(tmp_path.iterdir())


def test_times_are_stored_before_the_kernels(monkeypatch):
    stored = []

    def fail(step):
        raise RuntimeError("no profile")

    monkeypatch.setattr(gpu, "kernels_of", fail)
    pair = gpu.Pair("wrn-16-4", "patch", "eager")
    with pytest.raises(RuntimeError, match="no profile"):
        gpu.measure(pair, "cpu", rehearse=True, store=stored.append, kernels=True)
    assert stored[0]["ratio"] > 0


def test_a_step_is_captured_when_asked(monkeypatch):
    cuda, fork = FakeCuda(), torch.random.fork_rng
    for module in (answer_graphs, step_graph):
        monkeypatch.setattr(module, "_cuda", cuda)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    problem = PROBLEMS["wrn-16-4"].shrunk()
    model, (x, y) = converted("plain", problem.network()), problem.inputs()
    step = train_step(model, x, y, half=True, captured=True)
    step()
    assert not cuda.graphs
    step.capture()
    step()
    step()
    assert [graph.replays for graph in cuda.graphs] == [2]
