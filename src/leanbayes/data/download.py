"""Downloads that resume where they broke off, and count only when the checksum is right."""

from __future__ import annotations

import errno
import hashlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all if the server tells
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
    """Fetch a file from the first address that serves it whole and right.

    Bytes are collected in ``<target>.part``; a broken connection, or a later call, goes on from there. The file gets
    its name only after its checksum was found right.

    Args:
        urls: Addresses of the same file, in order of preference.
        target: Where the file goes.
        md5: The published checksum, None where there is none.
        progress: Called after every block.
        attempts: How often to try each address.
        pause: Seconds before the second attempt, doubled each time.

    Raises:
        ConnectionError: No address served the right file; the message tells what each said.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    troubles = []
    for url in urls:
        try:
            _fetch_patiently(url, part, progress, attempts, pause)
            check_md5(part, md5)
        except ValueError as error:
            part.unlink()  # wrong bytes are no beginning to go on from
            troubles.append(f"{url}: {error}")
        except (OSError, HTTPException) as error:
            troubles.append(f"{url}: {error or type(error).__name__}")
        else:
            part.replace(target)
            return
    raise ConnectionError(f"could not download {target.name} ({'; '.join(troubles)})")


def check_md5(path: Path, expected: str | None) -> None:
    """Raise ``ValueError`` when a file has not the expected checksum."""
    if expected is None:
        return
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ValueError(f"expected md5 {expected}, got {digest.hexdigest()}")


def _fetch_patiently(url: str, part: Path, progress: Progress | None, attempts: int, pause: float) -> None:
    """Try again after a pause when the connection fails; not when there is no way to the server, or no such file."""
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
    """Tell whether no connection came about: no such name, no route, refused, or no answer."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else None
    if isinstance(reason, (socket.gaierror, ConnectionRefusedError, TimeoutError)):
        return True
    return isinstance(reason, OSError) and reason.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    """Append to `part` what is missing of it."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "leanbayes"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing lies beyond what we have: whole, or wrong as the checksum will tell
            error.close()
            return
        raise
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        start = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with part.open("ab" if resumed else "wb") as file:
            _copy(response, file, lambda done: progress and progress(part.stem, start + done, total))
    if total is not None and part.stat().st_size < total:
        raise ConnectionError(f"the connection broke after {part.stat().st_size} of {total} bytes")


def _copy(response: Any, file: Any, tell: Callable[[int], Any]) -> None:
    done = 0
    while block := response.read(_BLOCK):
        file.write(block)
        done += len(block)
        tell(done)
