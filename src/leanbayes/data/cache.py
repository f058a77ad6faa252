"""The folder of the `.npz` files of known data sets, decoded copies of arrays that are slow to read, and digests."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.data.dataset import Array
from leanbayes.data.files.npz import read_array, readable
from leanbayes.runtime._files import local, write_whole

_WORTH_A_COPY = 1 << 20  # bytes; smaller arrays are decompressed quickly


def cache_folder() -> Path:
    """Return the user's cache folder of leanbayes: in ``$XDG_CACHE_HOME``, or in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "leanbayes"


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of the data sets: `root`, else ``$LEANBAYES_DATA``, else one in the user's cache folder."""
    wanted = root or os.environ.get("LEANBAYES_DATA")
    return local(wanted).expanduser() if wanted else cache_folder() / "data"


def read_cached(path: Path, name: str) -> Array:
    """Read one array of an `.npz` file, from a decoded copy after the first time.

    LZMA takes 20 seconds for CIFAR-10. The copy is stored in the user's cache folder, because the root may be
    read-only. Its name has the size and time of the file. It is mapped into memory, so that processes share it.
    Without a writable folder, no copy is made.
    """
    with readable(path), zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type == zipfile.ZIP_STORED or entry.file_size < _WORTH_A_COPY:
        return read_array(path, name)
    state = path.stat()
    copy = cache_folder() / "decoded" / f"{path.name}-{state.st_size}-{state.st_mtime_ns}-{name}.npy"
    with contextlib.suppress(OSError, ValueError):
        mapped: Array = np.load(copy, mmap_mode="c", allow_pickle=False)  # changes stay in this process
        return mapped
    array = read_array(path, name)
    with contextlib.suppress(OSError):
        _write(copy, np.save, arr=array)
    return array


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a compressed `.npz` file, whole or not at all."""
    _write(path, np.savez_compressed, **arrays)


def _write(path: Path, save: Callable[..., None], /, **arrays: Any) -> None:
    """Save to an open file, because numpy changes names without its ending."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            save(file, allow_pickle=False, **arrays)

    write_whole(path, write)


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
