"""The package itself: a light import, a small public page, the import order of methods."""

from __future__ import annotations

import json
import subprocess
import sys

import leanbayes as lb
from leanbayes.methods import all_methods

HEAVY = (
    "matplotlib", "sklearn", "rich", "scipy", "torchmetrics", "lightning_fabric", "onnx", "pandas", "torchvision",
    "torch._dynamo", "torch._inductor", "transformers", "tyro", "PIL",
)  # fmt: skip


def test_import_is_light_and_silent():
    code = "import sys; import torch; before = set(sys.modules); import leanbayes; print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert not [name for name in loaded if name.startswith(HEAVY)]
    foreign = [name for name in loaded if not name.startswith("leanbayes")]
    assert len(foreign) < 20
    assert run.stderr == ""


def test_the_public_page_is_small_and_documented():
    public = [name for name in vars(lb) if not name.startswith("_") and callable(getattr(lb, name))]
    assert len(public) <= 32
    assert all(getattr(lb, name).__doc__ for name in public)


def test_methods_are_found_by_scanning_and_named():
    assert {"rank1", "batch_ensemble", "implicit", "patch"} <= set(all_methods())
    for name, kind in all_methods().items():
        assert kind.name == name
        assert kind().fields() == json.loads(json.dumps(kind().fields()))
        assert kind(**kind().fields()) == kind()
