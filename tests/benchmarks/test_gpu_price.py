"""The benchmark of answers on a GPU runs on a CPU with tiny networks, and a second call repeats nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "benchmarks.price", "--rehearse", "--only", "wrn-28-10-rank1"]


@pytest.mark.slow
def test_a_rehearsal_writes_prices_and_differences(tmp_path):
    profile = tmp_path / "profile.txt"
    command = [*COMMAND, "--out", str(tmp_path), "--profile", str(profile)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    file = tmp_path / "wrn-28-10-rank1.json"
    found, written = json.loads(file.read_text()), file.stat().st_mtime_ns
    for mode in ("eager", "graph", "predict", "throughput"):
        assert found[mode]["ratio"] > 0
        assert found[mode]["quartiles"][0] <= found[mode]["ratio"] <= found[mode]["quartiles"][1]
    assert found["eager"]["way"] == "tiled"
    assert found["replayed_difference"] == 0
    assert found["together_difference"] < 1e-5
    assert found["half_rms"]["together"] < 1.5 * found["half_rms"]["folded"]
    assert "aten::" in profile.read_text()
    subprocess.run([*COMMAND, "--out", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    assert file.stat().st_mtime_ns == written
