"""A folder of runs is sent in parts: every bit arrives, and what does not is named."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from leanbayes.cli.main import main as leanbayes
from leanbayes.compare import time_limit
from leanbayes.compare.time_limit import STOPPED
from leanbayes.training.state import header_of, STATE
from tests.compare.test_plain_state import shared_epochs
from tests.compare.test_time_limit import Clock
from tools import kills, parts
from tools.parts import INDEX, main

MIB = 2**20


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with small, empty, nested and larger files, with names that need care."""
    random = np.random.default_rng(0)
    found = tmp_path / "runs" / "wide"
    files = {
        "digits/small/rank1[components=2]/seed0/checkpoint/last.safetensors": random.bytes(300_001),
        "digits/small/plain/seed0/history.jsonl": b'{"epoch": 1}\n',
        "digits/small/plain/seed0/empty": b"",
        "digits/small/plain/seed0/zeros": bytes(200_000),
        "größe.txt": "naïve".encode(),
    }
    for name, data in files.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(data)
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("how", [(), ("--compress",)], ids=["plain", "compressed"])
@pytest.mark.parametrize("size", ["15MiB", "64KiB", "7001", "500001B"])
def test_every_bit_arrives(folder, tmp_path, size, how):
    assert run("split", folder, "--out", tmp_path / "parts", "--size", size, *how) == 0
    index = json.loads((tmp_path / "parts" / INDEX).read_text())
    sizes = [part["size"] for part in index["parts"]]
    assert max(sizes) <= parts.bytes_of(size)
    assert sizes[:-1] == [parts.bytes_of(size)] * (len(sizes) - 1)
    assert [path.stat().st_size for path in sorted((tmp_path / "parts").glob("part*"))] == sizes
    assert run("join", tmp_path / "parts", "--out", tmp_path / "there") == 0
    assert content(tmp_path / "there") == content(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "runs", "there"]  # nothing is left over


def test_compression_is_worth_it_for_zeros(folder, tmp_path):
    run("split", folder, "--out", tmp_path / "a")
    run("split", folder, "--out", tmp_path / "b", "--compress")
    a, b = (sum(part["size"] for part in parts.read_index(tmp_path / name)["parts"]) for name in "ab")
    assert b < a - 190_000


def test_many_parts_are_fetched_a_few_at_a_time(folder, tmp_path):
    run("split", folder, "--out", tmp_path / "parts", "--size", "32KiB")
    count = len(parts.read_index(tmp_path / "parts")["parts"])
    assert count > 8
    away = []
    for first in range(1, count + 1, 4):
        away.append(tmp_path / f"away{first}")
        assert run("take", tmp_path / "parts", "--from", first, "--count", 4, "--out", away[-1]) == 0
        assert len(list(away[-1].iterdir())) <= 5  # with the index
    assert run("join", *reversed(away), "--out", tmp_path / "there") == 0
    assert content(tmp_path / "there") == content(folder)
    assert run("take", tmp_path / "parts", "--from", count + 1, "--out", tmp_path / "none") == 2
    assert run("take", tmp_path / "parts", "--count", 0, "--out", tmp_path / "none") == 2


def test_missing_and_damaged_parts_are_named_in_one_sentence(folder, tmp_path, capsys):
    run("split", folder, "--out", tmp_path / "parts", "--size", "100kB")
    (tmp_path / "parts" / "part0002").unlink()
    data = bytearray((tmp_path / "parts" / "part0004").read_bytes())
    data[17] ^= 1
    (tmp_path / "parts" / "part0004").write_bytes(data)
    (tmp_path / "parts" / "part0005").write_bytes((tmp_path / "parts" / "part0005").read_bytes()[:-1])
    capsys.readouterr()
    assert run("join", tmp_path / "parts", "--out", tmp_path / "there") == 2
    said = capsys.readouterr().err
    assert said == "parts: of 6 parts are missing: part0002; damaged: part0004, part0005; fetch these again\n"
    assert not (tmp_path / "there").exists()


def changed_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def larger(index):
    index["files"][0]["size"] += 1


def smaller(index):
    index["files"][-1]["size"] -= 1


def other_sum(index):
    index["files"][0]["sha256"] = hashlib.sha256(b"other").hexdigest()


def fewer_files(index):
    del index["files"][-1]


def fewer_parts(index):
    del index["parts"][-1]


def packed(index):
    index["compressed"] = True


@pytest.mark.parametrize("change", [larger, smaller, other_sum, fewer_files, fewer_parts, packed])
@pytest.mark.parametrize("size", ["15MiB", "30kB"])
def test_an_index_of_other_parts_restores_nothing(folder, tmp_path, change, size, capsys):
    run("split", folder, "--out", tmp_path / "parts", "--size", size)
    changed_index(tmp_path / "parts", change)
    capsys.readouterr()
    assert run("join", tmp_path / "parts", "--out", tmp_path / "there") == 2
    said = capsys.readouterr().err
    assert "index" in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "runs"]


BAD = ["../out", "/tmp/out", "a/../../out", "..", ".", "", "a\\..\\out", "C:/out", "a/./b", "a\0b"]


@pytest.mark.parametrize("kind", ["files", "parts"])
@pytest.mark.parametrize("name", BAD)
def test_no_name_leads_out_of_the_folder(folder, tmp_path, kind, name, capsys):
    run("split", folder, "--out", tmp_path / "parts")

    def rename(index):
        index[kind][0]["name"] = name

    changed_index(tmp_path / "parts", rename)
    capsys.readouterr()
    assert run("join", tmp_path / "parts", "--out", tmp_path / "deep" / "there") == 2
    assert "inside of the folder" in capsys.readouterr().err
    assert not (tmp_path / "deep").exists()


def test_parts_have_no_folders_and_no_name_twice(folder, tmp_path):
    run("split", folder, "--out", tmp_path / "parts", "--size", "100kB")

    def twice(index):
        index["files"][1]["name"] = index["files"][0]["name"]

    def below(index):
        index["parts"][0]["name"] = "a/part0001"

    for change in (twice, below):
        shutil.copytree(tmp_path / "parts", tmp_path / "own")
        changed_index(tmp_path / "own", change)
        assert run("join", tmp_path / "own", "--out", tmp_path / "there") == 2
        shutil.rmtree(tmp_path / "own")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": "1"}', "[" * 3000])
def test_a_damaged_index_is_one_sentence(folder, tmp_path, text, capsys):
    run("split", folder, "--out", tmp_path / "parts")
    (tmp_path / "parts" / INDEX).write_text(text)
    capsys.readouterr()
    assert run("join", tmp_path / "parts", "--out", tmp_path / "there") == 2
    said = capsys.readouterr().err
    assert "damaged" in said
    assert said.count("\n") == 1


def test_a_newer_format_is_refused(folder, tmp_path, capsys):
    run("split", folder, "--out", tmp_path / "parts")
    changed_index(tmp_path / "parts", lambda index: index.update(format=2))
    assert run("join", tmp_path / "parts", "--out", tmp_path / "there") == 2
    assert "expected format 1, got 2" in capsys.readouterr().err


def test_files_are_chosen_and_leftovers_stay(folder, tmp_path):
    for name in ("report.html", "digits/.last.safetensors.ab.tmp", "digits/small/plain/seed0/progress.json"):
        (folder / name).write_text("left over")
    index = parts.split(folder, tmp_path / "parts", MIB)
    assert len(index["files"]) == 5
    index = parts.split(folder, tmp_path / "state", MIB, only=["*/checkpoint/*", "*.jsonl"], without=["*/plain/*"])
    assert [item["name"].rpartition("/")[2] for item in index["files"]] == ["last.safetensors"]


def test_nothing_is_overwritten(folder, tmp_path, capsys):
    run("split", folder, "--out", tmp_path / "parts")
    assert run("split", folder, "--out", tmp_path / "parts") == 2
    assert "new folder" in capsys.readouterr().err
    (tmp_path / "there" / "digits/small/plain/seed0").mkdir(parents=True)
    (tmp_path / "there" / "digits/small/plain/seed0/history.jsonl").write_text("own")
    assert run("join", tmp_path / "parts", "--out", tmp_path / "there") == 2
    assert "history.jsonl" in capsys.readouterr().err
    assert list(content(tmp_path / "there").values()) == [b"own"]


@pytest.mark.parametrize(
    ("text", "size"), [("15MiB", 15 * MIB), ("16 MB", 16_000_000), ("1k", 1000), ("0.5MiB", MIB // 2)]
)
def test_sizes(text, size):
    assert parts.bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "MiB", "1TB", "0.1"])
def test_no_sizes(text, folder, tmp_path, capsys):
    assert run("split", folder, "--out", tmp_path / "parts", f"--size={text}") == 2
    assert "expected a size" in capsys.readouterr().err


def test_empty_folders_links_and_missing_ones_are_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run("split", tmp_path / "empty", "--out", tmp_path / "parts") == 2
    assert run("split", tmp_path / "none", "--out", tmp_path / "parts") == 2
    assert run("join", tmp_path / "none", "--out", tmp_path / "there") == 2
    assert "no index.json" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / "link").symlink_to(tmp_path / "file")
    assert run("split", tmp_path / "empty", "--out", tmp_path / "parts") == 2


@pytest.mark.parametrize("how", [(), ("--compress",)], ids=["plain", "compressed"])
def test_a_large_file_is_not_in_memory(tmp_path, how):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "large").write_bytes(np.random.default_rng(0).bytes(8 * MIB) + bytes(16 * MIB))
    tracemalloc.start()
    assert run("split", tmp_path / "runs", "--out", tmp_path / "parts", "--size", "3MiB", *how) == 0
    assert run("join", tmp_path / "parts", "--out", tmp_path / "there") == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * MIB
    assert content(tmp_path / "there") == content(tmp_path / "runs")


COMMAND = ["compare", "--data", "digits", "--methods", "plain,rank1", "--recipe.epochs", "4", "--late", "0.5"]
COMMAND += ["--no-shift", "--ood", "none", "--test-images", "20", "--train-rows", "100", "--seeds", "0"]
COMMAND += ["--device", "cpu", "--samples", "2"]


def test_a_stopped_comparison_is_sent_and_ends_at_the_same_bits(tmp_path, monkeypatch):
    """The plain network stops after three of four epochs, its state for rank-1 was kept after two."""
    assert leanbayes([*COMMAND, "--out", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(time_limit, "time", Clock())
    assert leanbayes([*COMMAND, "--out", str(tmp_path / "begun"), "--stop-after", "4"]) == STOPPED
    monkeypatch.undo()
    plain, late = (Path(f"digits/small/{name}/seed0") for name in ("plain", "rank1"))
    assert header_of(tmp_path / "begun" / plain / STATE)["epoch"] == 3
    assert run("split", tmp_path / "begun", "--out", tmp_path / "parts", "--size", "20kB", "--compress") == 0
    shutil.rmtree(tmp_path / "begun")
    there = tmp_path / "another" / "machine"
    assert run("join", tmp_path / "parts", "--out", there) == 0
    assert (there / plain / "shared" / "epoch2" / STATE).is_file()
    assert leanbayes([*COMMAND, "--out", str(there)]) == 0
    assert kills.differences(tmp_path / "whole", there) == []
    losses = [[json.loads(line)["loss"] for line in (out / plain / "history.jsonl").read_text().splitlines()]
              for out in (tmp_path / "whole", there)]  # fmt: skip
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert shared_epochs(there / plain, there / late) == 2
