"""The folder of the `.npz` files of known data sets: downloads, decoded copies of slow arrays, and digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.data.dataset import Array
from leanbayes.data.files.npz import read_array, readable
from leanbayes.runtime._files import local, write_whole

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in total if known
_BLOCK = 1 << 18
_TIMEOUT = 60  # seconds without a byte
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


def download(
    urls: tuple[str, ...],
    target: Path,
    *,
    md5: str | None = None,
    progress: Progress | None = None,
    attempts: int = 4,
    pause: float = 1.0,
) -> None:
    """Download a file from the first address that serves it with the right checksum.

    Bytes are collected in ``<target>.part``; a later attempt or call resumes there. The file gets its name only after
    its checksum was verified. Between two attempts is a pause (seconds), doubled each time. If no address serves the
    right file, a ``ConnectionError`` has the error of each.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    troubles = []
    for url in urls:
        try:
            _fetch_patiently(url, part, progress, attempts, pause)
            check_md5(part, md5)
        except ValueError as error:
            part.unlink()  # wrong bytes cannot be resumed
            troubles.append(f"{url}: {error}")
        except (OSError, HTTPException) as error:
            troubles.append(f"{url}: {error or type(error).__name__}")
        else:
            part.replace(target)
            return
    raise ConnectionError(f"could not download {target.name} ({'; '.join(troubles)})")


def check_md5(path: Path, expected: str | None) -> None:
    """Raise ``ValueError`` if a file has another checksum than expected."""
    if expected is None:
        return
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ValueError(f"expected md5 {expected}, got {digest.hexdigest()}")


def _fetch_patiently(url: str, part: Path, progress: Progress | None, attempts: int, pause: float) -> None:
    """Try again after a pause if the connection breaks, but not if the server or the file cannot be found."""
    for attempt in range(attempts):
        try:
            _fetch(url, part, progress)
            return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 or attempt + 1 == attempts:
                raise
        except (OSError, HTTPException) as error:
            if _unreachable(error) or attempt + 1 == attempts:
                raise
        time.sleep(pause * 2**attempt)


def _unreachable(error: Exception) -> bool:
    """Return whether no connection was made: unknown name, no route, refused, or no answer."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else None
    if isinstance(reason, (socket.gaierror, ConnectionRefusedError, TimeoutError)):
        return True
    return isinstance(reason, OSError) and reason.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    """Append the missing bytes to `part`."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "leanbayes"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # no further bytes: the checksum decides
            error.close()
            return
        raise
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        start = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        done = start
        with part.open("ab" if resumed else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                done += len(block)
                if progress is not None:
                    progress(part.stem, done, total)
    if total is not None and part.stat().st_size < total:
        raise ConnectionError(f"the connection broke after {part.stat().st_size} of {total} bytes")
