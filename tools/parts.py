"""Send a folder of runs in parts of a limited size, and put it together elsewhere, to the same bits.

python -m tools.parts split runs/wide --out parts --size 15MiB      # a comparison, one run of it, or any folder
python -m tools.parts take parts --from 1 --count 4 --out away      # the index and four parts, to fetch a few at a time
python -m tools.parts join parts --out runs/wide                    # checks all sums; parts may be in several folders

The files are written one after the other, in the order of their names, and the bytes are cut into parts. `index.json`
has the names, sizes and SHA-256 sums of files and parts. With `--compress` the bytes are one zlib stream. A block of
64 KiB at a time is in memory. Nothing is pickled. Left out are files that a resumed comparison does not read: reports,
progress files and what a killed process left half-written. `--only` and `--without` select further.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from leanbayes.compare import progress
from leanbayes.runtime._files import check_fields, parse_json, write_text

INDEX, FORMAT = "index.json", 1
BLOCK = 1 << 16
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?)?B?", re.IGNORECASE)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
NEVER = (".*.tmp", "report.html", progress.FILE)
"""Names of files that are not sent."""
ITEM = {"name": str, "size": int, "sha256": str}
HEADER = {"format": int, "compressed": bool, "files": list[dict[str, Any]], "parts": list[dict[str, Any]]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return 2 with one sentence if it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split", help="write the parts of a folder and their index")
    one.add_argument("folder", type=Path)
    one.add_argument("--size", default="15MiB", help="largest size of a part, such as 15MiB or 500kB")
    one.add_argument("--compress", action="store_true", help="as one zlib stream; no bit is lost")
    one.add_argument("--only", default="", help="globs on the paths in the folder, separated by commas")
    one.add_argument("--without", default="", help="likewise, of files to leave out")
    some = commands.add_parser("take", help="copy the index and some parts into another folder")
    some.add_argument("folder", type=Path)
    some.add_argument("--from", dest="first", type=int, default=1, help="number of the first part, from 1")
    some.add_argument("--count", type=int, default=4)
    many = commands.add_parser("join", help="check the parts and restore the folder")
    many.add_argument("folders", type=Path, nargs="+")
    for command in (one, some, many):
        command.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        if given.command == "split":
            chosen = {"only": _globs(given.only), "without": _globs(given.without)}
            index = split(given.folder, given.out, bytes_of(given.size), compress=given.compress, **chosen)
        elif given.command == "take":
            index = take(given.folder, given.out, given.first, given.count)
        else:
            index = join(given.folders, given.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"parts: {error}\n")
        return 2
    size = sum(part["size"] for part in index["parts"])
    sys.stdout.write(f"{len(index['files'])} files, {len(index['parts'])} parts, {size:,} bytes\n")
    return 0


def bytes_of(text: str) -> int:
    """Return a size such as 15MiB or 500kB in bytes."""
    found = SIZE.fullmatch(text.strip())
    size = round(float(found[1]) * UNITS[(found[2] or "").lower()]) if found else 0
    if size < 1:
        raise ValueError(f"expected a size such as 15MiB or 500kB, got {text!r}")
    return size


def split(
    folder: Path,
    out: Path,
    size: int,
    *,
    compress: bool = False,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the files of a folder as parts of at most `size` bytes, then the index, and return the index."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if links := [str(path) for path in files if path.is_symlink()]:
        raise ValueError(f"expected plain files, got the links {_listed(links)}")
    names = {path.relative_to(folder).as_posix(): path for path in files}
    names = {name: path for name, path in names.items() if _wanted(name, only, without)}
    if not names:
        raise ValueError(f"expected files to send in '{folder}', found none")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"expected '{out}' to be a new folder, or an empty one")
    out.mkdir(parents=True, exist_ok=True)
    parts, items = _Parts(out, size), []
    packed = zlib.compressobj(1) if compress else None
    for name, path in names.items():
        summed, length = hashlib.sha256(), 0
        for block in _blocks(path):
            summed.update(block)
            length += len(block)
            parts.write(block if packed is None else packed.compress(block))
        items.append({"name": name, "size": length, "sha256": summed.hexdigest()})
    if packed is not None:
        parts.write(packed.flush())
    index = {"format": FORMAT, "compressed": compress, "files": items, "parts": parts.end()}
    write_text(json.dumps(index, indent=1) + "\n", out / INDEX)
    return index


class _Parts:
    """The parts that are written: each is full but for the last one."""

    def __init__(self, out: Path, size: int) -> None:
        self.out, self.size = out, size
        self.found: list[dict[str, Any]] = []
        self.file: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while len(rest):
            if self.file is None:
                name = f"part{len(self.found) + 1:04d}"
                self.file, self.sum = (self.out / name).open("wb"), hashlib.sha256()
                self.found.append({"name": name, "size": 0})
            fits = rest[: self.size - self.found[-1]["size"]]
            self.file.write(fits)
            self.sum.update(fits)
            self.found[-1]["size"] += len(fits)
            rest = rest[len(fits) :]
            if self.found[-1]["size"] == self.size:
                self.end()

    def end(self) -> list[dict[str, Any]]:
        """Close the part in work, and return all parts."""
        if self.file is not None:
            self.file.close()
            self.found[-1]["sha256"] = self.sum.hexdigest()
            self.file = None
        return self.found


def take(folder: Path, out: Path, first: int, count: int) -> dict[str, Any]:
    """Copy the index and `count` parts from number `first` on; return the index with these parts alone."""
    index = read_index(folder)
    last = len(index["parts"])
    if count < 1 or not 1 <= first <= last:
        raise ValueError(f"expected parts from 1 to {last}, at least one, got {count} from {first} on")
    chosen = index["parts"][first - 1 : first - 1 + count]
    out.mkdir(parents=True, exist_ok=True)
    for name in (INDEX, *(part["name"] for part in chosen)):
        shutil.copyfile(folder / name, out / name)
    return index | {"parts": chosen}


def join(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Check all parts, restore the files in `out`, and return the index.

    The folders have the index and each of the parts somewhere. Files appear in `out` when all are whole; there must be
    no such file before.
    """
    index = read_index(next((folder for folder in folders if (folder / INDEX).is_file()), folders[0]))
    if there := [item["name"] for item in index["files"] if (out / item["name"]).exists()]:
        raise ValueError(f"expected none of the files in '{out}', found {_listed(there)}; choose another --out")
    paths = _checked(index, folders)
    building = out.with_name(f".{out.name}.{secrets.token_hex(4)}.joining")
    try:
        _restore(index, paths, building)
        for item in index["files"]:
            (out / item["name"]).parent.mkdir(parents=True, exist_ok=True)
            (building / item["name"]).replace(out / item["name"])
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index in a folder; one that is missing, damaged, or that names a file elsewhere raises."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"no {INDEX} in '{folder}'")
    try:
        index = parse_json(path.read_text(encoding="utf-8"), INDEX)
        check_fields(index, HEADER, required=tuple(HEADER))
        if index["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {index['format']}")
        for kind in ("files", "parts"):
            for number, item in enumerate(index[kind]):
                check_fields(item, ITEM, required=tuple(ITEM), within=f"{kind}.{number}")
                _check_name(item["name"], alone=kind == "parts")
            if len({item["name"] for item in index[kind]}) < len(index[kind]):
                raise ValueError(f"expected each of the {kind} once")
    except ValueError as error:
        raise ValueError(f"the index '{path}' is damaged: {error}") from error
    return dict(index)


def _check_name(name: str, *, alone: bool) -> None:
    """Raise unless a name stays in its folder."""
    parts = PurePosixPath(name).parts
    inside = bool(parts) and not name.startswith("/") and not {"..", "."} & set(name.split("/"))
    if not inside or "\\" in name or "\0" in name or ":" in parts[0] or (alone and len(parts) > 1):
        raise ValueError(f"expected a name inside of the folder, got {name!r}")


def _checked(index: Mapping[str, Any], folders: Sequence[Path]) -> list[Path]:
    """Return the paths of all parts, after their sums were compared; missing and damaged ones raise."""
    paths, missing, damaged = [], [], []
    for part in index["parts"]:
        path = next((folder / part["name"] for folder in folders if (folder / part["name"]).is_file()), None)
        if path is None:
            missing.append(part["name"])
        elif path.stat().st_size != part["size"] or _sum_of(path) != part["sha256"]:
            damaged.append(part["name"])
        else:
            paths.append(path)
    problems = [f"missing: {_listed(missing)}"] if missing else []
    problems += [f"damaged: {_listed(damaged)}"] if damaged else []
    if problems:
        raise ValueError(f"of {len(index['parts'])} parts are {'; '.join(problems)}; fetch these again")
    return paths


def _restore(index: Mapping[str, Any], paths: Sequence[Path], folder: Path) -> None:
    """Write the files from the bytes of the parts, and compare their sums."""
    blocks = _unpacked(paths) if index["compressed"] else (block for path in paths for block in _blocks(path))
    rest = b""
    for item in index["files"]:
        path, left, summed = folder / item["name"], item["size"], hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            while left and (rest := rest or next(blocks, b"")):
                file.write(rest[:left])
                summed.update(rest[:left])
                rest, left = rest[left:], max(0, left - len(rest))
        if left or summed.hexdigest() != item["sha256"]:
            raise ValueError(f"the parts are whole, but '{item['name']}' is not as the index says: not its index")
    if rest or next(blocks, b""):
        raise ValueError("the parts have more bytes than the files of the index: not their index")


def _unpacked(paths: Sequence[Path]) -> Iterator[bytes]:
    packed = zlib.decompressobj()
    try:
        for path in paths:
            for block in _blocks(path):
                rest = block
                while rest:
                    if found := packed.decompress(rest, BLOCK):
                        yield found
                    rest = packed.unconsumed_tail
        if found := packed.flush():
            yield found
    except zlib.error as error:
        raise ValueError(f"the parts are whole, but no zlib stream ({error}): not their index") from error


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _sum_of(path: Path) -> str:
    summed = hashlib.sha256()
    for block in _blocks(path):
        summed.update(block)
    return summed.hexdigest()


def _wanted(name: str, only: Sequence[str], without: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    if any(fnmatch(last, pattern) for pattern in NEVER):
        return False
    chosen = not only or any(fnmatch(name, pattern) for pattern in only)
    return chosen and not any(fnmatch(name, pattern) for pattern in without)


def _globs(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


if __name__ == "__main__":
    sys.exit(main())
