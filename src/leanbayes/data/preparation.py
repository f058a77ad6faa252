"""`prepare`: download published files, verify them, and convert them to the files of the cache."""

from __future__ import annotations

import errno
import hashlib
import socket
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from leanbayes.data.cache import data_root, sha256_of_arrays, write_npz
from leanbayes.data.catalogue import find, Origin, Upstream
from leanbayes.data.upstream import Files
from leanbayes.runtime._files import local

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in total if known
_BLOCK = 1 << 18
_TIMEOUT = 60  # seconds without a byte


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


def prepare(
    name: str,
    root: str | Path | None = None,
    source: str | Path | None = None,
    *,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> list[Path]:
    """Download the upstream files of a set, verify them, and write the files of the cache.

    A broken download resumes. Files in the folder are verified and used. A set in the cache is not changed: delete its
    files to prepare it again.

    Args:
        name: A known set; "uci" means all UCI sets, which share a file.
        root: The cache, as in ``load``.
        source: A folder with the upstream files; then nothing is downloaded.
        say: Called with a sentence about every step.
        progress: Called with (file name, bytes so far, bytes in total or None) during downloads.

    Returns:
        The files of the cache; empty for a set that needs no preparation.
    """
    known = find("uci-yacht" if name.lower() == "uci" else name)
    if known.origin is None:
        say(f"{known.name} {known.note}: nothing to prepare")
        return []
    folder = data_root(root)
    paths = [folder / file for file in known.files]
    if all(path.is_file() for path in paths):
        say(f"{known.name} is already in {folder}")
        return paths
    upstream = local(source) if source is not None else folder / "upstream" / known.origin.name
    _collect(known.origin, upstream, source is None, say, progress)
    return _convert(known.origin, upstream, folder, say)


def _collect(
    origin: Origin, folder: Path, may_download: bool, say: Callable[[str], None], progress: Progress | None
) -> None:
    """Download the upstream files that are not in the folder, and verify all of them."""
    for file in origin.files:
        path = folder / file.name
        if file.unpacked and (folder / file.unpacked).is_dir():
            say(f"found {folder / file.unpacked}")
            continue
        if path.is_file():
            _verify(file, path)
        elif may_download:
            say(f"downloading {file.urls[0]}")
            _download(origin, file, path, progress)
        else:
            raise FileNotFoundError(f"{path} is missing; {_advice(_missing(origin, folder), folder)}")
        say(f"verified {path}" if file.md5 else f"found {path}; its content is checked after conversion")


def _download(origin: Origin, file: Upstream, path: Path, progress: Progress | None) -> None:
    try:
        download(file.urls, path, md5=file.md5, progress=progress)
    except ConnectionError as error:
        advice = _advice(_missing(origin, path.parent), path.parent)
        raise ConnectionError(f"{error}. Run the command again to resume, or {advice}") from error
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _verify(file: Upstream, path: Path) -> None:
    try:
        check_md5(path, file.md5)
    except ValueError as error:
        raise ValueError(
            f"{path} is not the published file: {error}. Delete it; {_advice([file], path.parent)}"
        ) from error


def _missing(origin: Origin, folder: Path) -> list[Upstream]:
    """Return the upstream files that are in the folder neither packed nor unpacked."""
    return [
        file
        for file in origin.files
        if not (folder / file.name).is_file() and not (file.unpacked and (folder / file.unpacked).is_dir())
    ]


def _advice(files: list[Upstream], folder: Path) -> str:
    """Return where to get files, and the folder to put them into."""
    each = [f"{file.name}{f' (md5 {file.md5})' if file.md5 else ''} from {file.urls[0]}" for file in files]
    return f"get {', '.join(each)} and put {'it' if len(files) == 1 else 'them'} into {folder}."


def _convert(origin: Origin, upstream: Path, folder: Path, say: Callable[[str], None]) -> list[Path]:
    try:
        files = origin.convert(upstream)
    except (KeyError, EOFError, OSError, tarfile.TarError, zlib.error) as error:
        raise ValueError(
            f"the files in {upstream} are not what {origin.name} publishes ({error}). Delete them and get them again."
        ) from error
    _check_content(origin, files, upstream)
    paths = []
    for file, arrays in files.items():
        path = folder / file
        try:
            write_npz(path, arrays)
        except OSError as error:
            raise _unwritable(folder, error) from error
        say(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")
        paths.append(path)
    return paths


def _check_content(origin: Origin, files: Files, upstream: Path) -> None:
    """Compare arrays without published checksum with the digest of a verified copy."""
    arrays = {name: array for contents in files.values() for name, array in contents.items()}
    for prefix, expected in origin.content.items():
        digest = sha256_of_arrays(array for name, array in arrays.items() if name.startswith(prefix))
        if digest != expected:
            raise ValueError(
                f"{upstream} differs from the known {origin.name} {prefix.rstrip('_')}: expected content with SHA-256 "
                f"{expected}, got {digest}. Delete the upstream files and run the command again."
            )


def _unwritable(folder: Path, error: OSError) -> OSError:
    return OSError(
        f"cannot write to {folder} ({error}). Pass another root, or set LEANBAYES_DATA to a folder of yours."
    )
