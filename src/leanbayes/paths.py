"""Paths that users give: all of them are on this machine, and an address of a bucket is refused as it was spelt."""

from __future__ import annotations

import os
import re
from pathlib import Path

PathLike = str | os.PathLike[str]

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""How an address begins, such as s3://. One slash will do: a `Path` keeps one of two. C:/ is a Windows drive."""


def local(path: PathLike) -> Path:
    """Return a path on this machine; every path that a user gives goes through here.

    Raises:
        ValueError: if it has a scheme, such as s3://, gs://, hf:// or file://; `Path` would make a folder of it.
    """
    if SCHEME.match(os.fspath(path)):
        raise ValueError(
            f"expected a path on this machine, got '{os.fspath(path)}'; paths with a scheme do not work yet: copy "
            "the files, or mount the bucket as a folder"
        )
    return Path(path)
