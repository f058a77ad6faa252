"""Libraries that some tests need: the tests skip, with the reason, where one is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion


def need_torch(release: str, why: str) -> None:
    """Skip where torch is older than a release: the oldest that leanbayes supports cannot do all that it offers."""
    if TorchVersion(torch.__version__) < release:
        pytest.skip(f"needs torch {release}: {why}")


def need_transformers() -> Any:
    """Return the library, or skip: where it is missing, or too new for this torch, and then has no networks."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the dev extra")
    if not transformers.is_torch_available():
        pytest.skip(f"needs a transformers that accepts torch {torch.__version__}; {transformers.__version__} does not")
    return transformers
