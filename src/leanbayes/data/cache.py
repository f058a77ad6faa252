"""Where data lie on disk: the root with the `.npz` files, and decoded copies of what is slow to read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from leanbayes.data.checks import Array
from leanbayes.data.files.npz import ArrayHeader, check_memory, read_array_header
from leanbayes.runtime._files import local

_WORTH_A_COPY = 1 << 20  # bytes; below, decompressing is quick anyway


def cache_folder() -> Path:
    """Return the user's cache folder of leanbayes: in ``$XDG_CACHE_HOME``, or in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "leanbayes"


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder with the data sets: `root`, else ``$LEANBAYES_DATA``, else one in the user's cache folder."""
    wanted = root or os.environ.get("LEANBAYES_DATA")
    return local(wanted).expanduser() if wanted else cache_folder() / "data"


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in an `.npz` file."""
    with _readable(path), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_array(path: Path, name: str) -> Array:
    """Read one array of an `.npz` file; nothing in the file is ever executed, and no more is read than fits."""
    array_header(path, name)
    with _readable(path), np.load(path, allow_pickle=False) as arrays:
        array: Array = arrays[name]
        return array


def array_header(path: Path, name: str) -> ArrayHeader:
    """Read shape and type of one array of an `.npz` file; refuse one that memory cannot hold."""
    with _readable(path):
        header = read_array_header(path, name)
    check_memory(header.bytes, f"{path} has the array {name}", f"in the shape {header.shape}")
    return header


def read_cached(path: Path, name: str) -> Array:
    """Read one array of an `.npz` file, from a decoded copy after the first time.

    LZMA takes 20 seconds for CIFAR-10. The copy lies in the user's cache folder (the root may be read-only), is
    named after the file with its size and time, and is mapped into memory, so that processes share it. Without a
    place to write there is no copy, and nothing else changes.
    """
    with _readable(path), zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type == zipfile.ZIP_STORED or entry.file_size < _WORTH_A_COPY:
        return read_array(path, name)
    state = path.stat()
    copy = cache_folder() / "decoded" / f"{path.name}-{state.st_size}-{state.st_mtime_ns}-{name}.npy"
    with contextlib.suppress(OSError, ValueError):
        return _mapped(copy)
    array = read_array(path, name)
    with contextlib.suppress(OSError), written(copy) as file:
        np.save(file, array, allow_pickle=False)
    return array


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a compressed `.npz` file, whole or not at all."""
    with written(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


@contextlib.contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Open a file under a temporary name in the same folder; rename it when all went well, else remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the bytes of several files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def sha256_of_arrays(arrays: Iterable[Array]) -> str:
    """Return the SHA-256 of arrays: type, shape and values of each in turn."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _mapped(path: Path) -> Array:
    """Map an array into memory; what is written to it stays in this process."""
    array: Array = np.load(path, mmap_mode="c", allow_pickle=False)
    return array


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say which file is broken, and how."""
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except KeyError as error:
        raise ValueError(f"{path} lacks an array: {error.args[0]}. Save it with that name.") from error
    except Exception as error:  # each decompressor has errors of its own
        raise ValueError(
            f"{path} cannot be read as an .npz file of plain arrays ({error}). "
            "Save numbers or text with numpy.savez; copy or prepare the file anew if it was cut short."
        ) from error
