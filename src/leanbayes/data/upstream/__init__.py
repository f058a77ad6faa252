"""Convert data sets from their published files to the arrays of the cache files."""

from __future__ import annotations

import tarfile
from pathlib import Path

from leanbayes.data.dataset import Array

Files = dict[str, dict[str, Array]]
"""Arrays by name, by the name of the cache file."""


def read_tar(path: Path, *, ending: tuple[str, ...]) -> dict[str, bytes]:
    """Read the files of a tar archive with these endings; nothing is unpacked to disk."""
    contents = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(ending) else None
            if file is not None:
                contents[member.name] = file.read()
    return contents
