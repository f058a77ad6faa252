"""Files that appear at once or not at all: written under a temporary name, flushed to disk, renamed.

Tensors go into safetensors files, which hold numbers and strings and nothing that could be executed.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open, SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from leanbayes.paths import local


def write_text(text: str, path: Path) -> None:
    """Write a text file; an existing one stays whole until the new one is."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors, of which none may share memory with another (see `untied`), and strings by name.

    Raises:
        OSError: if the disk is full or the folder cannot be written; `path` is then what it was.
    """

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # what the library makes of a full disk
            raise OSError(str(error)) from error

    write_whole(path, write)


def read_tensors(path: Path, *, tensors: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the strings and (unless `tensors` is False) the tensors of a safetensors file.

    Raises:
        ValueError: if the file is damaged or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            return metadata, {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"'{path}' is damaged or not a safetensors file ({error})") from error


def untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return copies on the CPU with one name for each tensor, and the other names by that one.

    Safetensors refuses shared memory; `tied` puts the other names back.
    """
    first: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and key in first:
            others[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, others


def tied(tensors: dict[str, Tensor], others: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors with the names that `untied` took away."""
    return tensors | {name: tensors[other] for name, other in others.items() if other in tensors}


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it, and rename it."""
    path = local(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        rights = temporary.stat().st_mode  # those of any new file; safetensors puts a private one in its place
        write(temporary)
        temporary.chmod(stat.S_IMODE(rights))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files that a killed process left beside `path`."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
