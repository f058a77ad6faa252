"""How long `lb.load` takes for a rank-1 WRN-28-10 (146 MB), and the share of it that the checksums take.

CPU seconds of this process, best of several turns, with and without the comparison of checksums in turn.

    python -m benchmarks.load
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from torch import nn

import leanbayes as lb
from leanbayes.runtime import _files as files

TURNS = 15


def measure(turns: int = TURNS) -> dict[str, float]:
    """Return the CPU milliseconds of a load with and without checksums, and the share that they add."""
    net = lb.models.build("wrn-28-10", num_outputs=10, input_shape=(3, 32, 32))
    found: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        lb.save(lb.convert(net, lb.Rank1()), path)
        for _ in range(turns):
            found["with"].append(_seconds(path, net))
            with mock.patch.object(files, "_compare_checksums", return_value=None):
                found["without"].append(_seconds(path, net))
        size = path.stat().st_size
    best = {name: 1e3 * min(times) for name, times in found.items()}
    return {"bytes": size, **best, "share": best["with"] / best["without"] - 1}


def _seconds(path: Path, net: nn.Module) -> float:
    start = time.process_time()
    lb.load(path, net)
    return time.process_time() - start


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(), indent=2) + "\n")
