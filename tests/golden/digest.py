"""Write numbers down so that they can be compared: a hash of their bits, and a sum for machines that round otherwise.

The record of a tensor, or of several with their names, is one line: 16 hex digits of the sha256 of names, dtypes,
shapes and bytes, then the sum and the sum of absolute values in float64 with nine digits. Text has the hash alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Records = dict[str, str]

TOLERANCE = 1e-3
"""Difference of sums on another machine, in units of the sum of absolute values."""
DRIFT = 50
"""How many times more is allowed after training, where every step enlarges the differences of the one before."""
UNTRAINED = ("/structure/", "/file/", "/posterior/", "/predict/", "/pass/", "/objective/")
"""Parts of keys whose numbers come before any training."""


def machine() -> dict[str, str]:
    """Return the torch version and the CPU; bits are compared only where both are those of the recording."""
    fields = ("model name", "cpu family", "model")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    cpu = " ".join(found.get(field, "?") for field in fields)
    return {"torch": str(torch.__version__), "cpu": f"{cpu} {torch.backends.cpu.get_cpu_capability()}"}


def tensors(values: Tensor | Mapping[str, Tensor] | Iterable[Tensor]) -> str:
    """Return the record of a tensor, of tensors by name (in any order) or of tensors in a row."""
    if isinstance(values, Tensor):
        values = [values]
    named = sorted(values.items()) if isinstance(values, Mapping) else [(str(i), v) for i, v in enumerate(values)]
    digest, total, size = hashlib.sha256(), 0.0, 0.0
    for name, value in named:
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)};".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        total += plain.sum(dtype=torch.float64).item()
        size += (plain if plain.dtype in (torch.uint8, torch.bool) else plain.abs()).sum(dtype=torch.float64).item()
    return f"{digest.hexdigest()[:16]} {total:.9g} {size:.9g}"


def text(value: str | bytes) -> str:
    """Return the record of a text."""
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]


def data(value: Any) -> str:
    """Return the record of a JSON value: the hash of it all, and the sums of the numbers in it."""
    numbers = [number for number in _numbers(value) if math.isfinite(number)]
    sums = f"{math.fsum(numbers):.9g} {math.fsum(map(abs, numbers)):.9g}"
    return f"{text(json.dumps(value, sort_keys=True))} {sums}"


def _numbers(value: Any) -> list[float]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [float(value)]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [number for part in inner for number in _numbers(part)]


def refused(record: Callable[[], str]) -> str:
    """Return a record, or a note that the library refuses to make it."""
    try:
        return record()
    except ValueError:
        return "refused: ValueError"


def differences(
    old: Mapping[str, str], new: Mapping[str, str], tolerance: Callable[[str], float] | None = None
) -> list[str]:
    """List the keys whose records differ, old and new; to the bit, or up to the tolerance of a key on the sums."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key, "missing"), new.get(key, "missing")
        if before != after and (tolerance is None or not _close(before, after, tolerance(key))):
            found.append(f"{key}: recorded {before}, now {after}")
    return found


def elsewhere(key: str) -> float:
    """Return the tolerance of a key on another machine."""
    return TOLERANCE if any(part in key for part in UNTRAINED) else TOLERANCE * DRIFT


def _close(before: str, after: str, tolerance: float) -> bool:
    one, other = before.split(), after.split()
    if len(one) != 3 or len(other) != 3:
        return False
    pairs = [(float(a), float(b)) for a, b in zip(one[1:], other[1:], strict=True)]
    size = max(map(abs, pairs[1]))
    return all(a == b or abs(a - b) <= tolerance * size or (a != a and b != b) for a, b in pairs)
