"""Files that appear whole or not at all: written under a temporary name, flushed to disk, renamed.

Tensors go into safetensors files, which hold only numbers and strings. The string `leanbayes.checksums` holds a
checksum of each tensor, so that a flipped bit is an error; older files have none. With the words w of a tensor (64
bits, the last one filled with zeros), word j of block i of chunk k, and odd factors a, b, c,

    checksum = sum_kij c_k a_i b_j w_kij  modulo 2^64.

It detects every change of one word and almost every exchange of words. It is no protection against an attacker.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, Literal, Union

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open, SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_LONGEST = 60  # characters of a value in a message
_LARGEST = 2**63  # larger whole numbers overflow as floats or as sizes


def check_fields(values: Any, kinds: Mapping[str, Any], *, required: tuple[str, ...] = (), within: str = "") -> None:
    """Raise unless `values` is an object whose fields have the types of `kinds`; other fields are allowed.

    Args:
        values: a value from JSON.
        kinds: type hints by name; tuples are lists in JSON.
        required: names of required fields.
        within: prefix of the names in the message, such as "chain.0".
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected {within or 'the header'} to be an object, got {_short(values)}")
    for name in required:
        if name not in values:
            raise ValueError(f"the field {_joined(within, name)} is missing")
    for name, kind in kinds.items():
        if name in values and not conforms(values[name], kind):
            raise ValueError(f"expected {_joined(within, name)} to be {_described(kind)}, got {_short(values[name])}")


def conforms(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON has the type of a hint: a union, Literal, list, tuple, dict, or a class."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(conforms(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        fits = isinstance(value, (list, tuple)) and len(value) == len(inner)
        return fits and all(conforms(one, own) for one, own in zip(value, inner, strict=True))
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(conforms(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(conforms(one, inner[1]) for one in value.values())
    return kind is Any or _is_one(value, NoneType if kind is None else kind)


def _is_one(value: Any, kind: type) -> bool:
    """Return whether a value is of a class; booleans are no numbers, and whole numbers are floats, too."""
    if kind not in (int, float):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        return False
    return isinstance(value, float) or abs(value) < _LARGEST


def _joined(within: str, name: str) -> str:
    return f"{within}.{name}" if within else name


def _described(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _short(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > _LONGEST:  # it may also be nested deeply
        return f"{type(value).__name__} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


PathLike = str | os.PathLike[str]

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The start of an address such as s3://. One slash suffices: `Path` keeps one of two. C:/ is a Windows drive."""


def local(path: PathLike) -> Path:
    """Return a path on this machine; every path of a user passes this check."""
    if SCHEME.match(os.fspath(path)):
        raise ValueError(
            f"expected a path on this machine, got '{os.fspath(path)}'; paths with a scheme do not work yet: copy "
            "the files, or mount the bucket as a folder"
        )
    return Path(path)


CHECKSUMS = "leanbayes.checksums"  # metadata of a file with tensors: {name: checksum in 16 hexadecimal digits}, as JSON

_BLOCK = 1024  # words
_CHUNK = 8 * _BLOCK * 128  # bytes at a time, which fit the processor's cache
_STEP = 0x1E3779B97F4A7C15  # an odd number whose multiples are spread over 64 bits


def write_text(text: str, path: Path) -> None:
    """Write a text file; an existing one stays whole until it is replaced."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors without shared memory (see `untied`), strings by name, and a checksum of every tensor."""
    checksums = json.dumps({name: checksum(tensor) for name, tensor in tensors.items()})

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata | {CHECKSUMS: checksums})
        except SafetensorError as error:  # raised by safetensors for a full disk
            raise OSError(str(error)) from error

    write_whole(path, write)


def read_tensors(path: Path, *, tensors: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the strings and (unless `tensors` is False) the tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            found = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"'{path}' is damaged or not a safetensors file ({error})") from error
    checksums = metadata.pop(CHECKSUMS, None)
    if tensors and checksums is not None:
        _compare_checksums(found, checksums, path)
    return metadata, found


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text from a file."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is damaged (its JSON is nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{where} is damaged ({error})") from error


def finite(number: float) -> float | None:
    """Return a finite number unchanged, else None: JSON has no nan."""
    return number if math.isfinite(number) else None


def checksum(tensor: Tensor) -> str:
    """Return the checksum of a tensor's bytes, see above, in 16 hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    total = 0
    for number, start in enumerate(range(0, len(data), _CHUNK)):
        total += (number * _STEP | 1) * _chunk_sum(_words(data[start : start + _CHUNK]))
    return f"{total % 2**64:016x}"


def _words(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return bytes as words of 64 bits; a copy if a view would be cut off or unaligned."""
    if len(data) % 8 == 0 and (words := data.view("<u8")).flags.aligned:
        return words
    return np.concatenate([data, np.zeros(-len(data) % 8, np.uint8)]).view("<u8")


def _chunk_sum(words: npt.NDArray[Any]) -> int:
    """Return sum_ij a_i b_j w_ij of at most 128 blocks; the last may be shorter."""
    in_block, of_block = _factors()
    whole = len(words) // _BLOCK
    last = words[whole * _BLOCK :]
    total = int(of_block[whole]) * int(last @ in_block[: len(last)])
    if whole:  # einsum is the fastest product of 64-bit integers in NumPy and torch
        sums = np.einsum("ij,j->i", words[: whole * _BLOCK].reshape(whole, _BLOCK), in_block)
        total += int(sums @ of_block[:whole])
    return total


@cache
def _factors() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return odd factors for the words of a block and the blocks of a chunk; arithmetic wraps at 64 bits."""
    numbers = np.arange(2 * _BLOCK, dtype=np.uint64) * np.uint64(_STEP)
    mixed = (numbers ^ (numbers >> np.uint64(29))) * np.uint64(_STEP) | np.uint64(1)
    return mixed[:_BLOCK], mixed[_BLOCK:]


def _compare_checksums(tensors: Mapping[str, Tensor], text: str, path: Path) -> None:
    expected = parse_json(text, f"the list of checksums in '{path}'")
    if not isinstance(expected, dict) or expected.keys() != tensors.keys():
        raise ValueError(f"'{path}' is damaged: its checksums are not those of its tensors; copy or save it again")
    for name, tensor in tensors.items():
        if expected[name] != checksum(tensor):
            raise ValueError(
                f"'{path}' is damaged: the numbers of '{name}' are not those that were written (the checksum differs); "
                "copy or save it again"
            )


def untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return copies on the CPU with one name per tensor, and a map from its other names to that name.

    Safetensors refuses shared memory; `tied` restores the other names.
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
    """Return tensors with the names that `untied` removed."""
    return tensors | {name: tensors[other] for name, other in others.items() if other in tensors}


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file next to `path`, flush it, and rename it."""
    path = local(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        rights = temporary.stat().st_mode  # those of a new file; safetensors replaces it by a private one
        write(temporary)
        temporary.chmod(stat.S_IMODE(rights))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed processes next to `path`."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
