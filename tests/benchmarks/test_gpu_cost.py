"""The command that measures a GPU works: rehearsed on a CPU with tiny networks, resumed, and shown as a table."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import cost, gpu
from benchmarks.problems import PROBLEMS, VARIANTS
from leanbayes.methods import all_methods


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
