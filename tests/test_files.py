"""Files appear whole or not at all, with the rights of any other file."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from leanbayes.runtime._files import read_tensors, remove_leftovers, tied, untied, write_tensors, write_text


def test_a_text_replaces_the_old_one_whole(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "result.json"
    write_text("first", path)
    write_text("zweite Fassung: ü", path)
    assert path.read_text(encoding="utf-8") == "zweite Fassung: ü"
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode

    def fail(handle):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_text("third", path)
    assert path.read_text(encoding="utf-8") == "zweite Fassung: ü"
    assert list(path.parent.iterdir()) == [path]


def test_tensors_with_shared_names_come_back(tmp_path):
    a, path = torch.randn(3, 2), tmp_path / "t.safetensors"
    tensors, others = untied({"a": a, "b": a, "c": a.T, "d": torch.empty(0), "e": torch.empty(0)})
    assert others == {"b": "a"}
    write_tensors(tensors, path, {"note": "one"})
    metadata, back = read_tensors(path)
    assert metadata == {"note": "one"}
    back = tied(back, others)
    assert back.keys() == {"a", "b", "c", "d", "e"}
    assert torch.equal(back["b"], a)
    assert torch.equal(back["c"], a.T)
    assert read_tensors(path, tensors=False) == ({"note": "one"}, {})


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_tensors_have_the_rights_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_tensors({"a": torch.ones(2)}, tmp_path / "t.safetensors", {})
        write_tensors({"a": torch.ones(2)}, tmp_path / "t.safetensors", {})  # also where one is replaced
    finally:
        os.umask(before)
    assert (tmp_path / "t.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert list(tmp_path.iterdir()) == [tmp_path / "t.safetensors"]


def test_what_safetensors_says_of_a_broken_write_is_an_os_error(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors({"a": torch.zeros(2**16)}, tmp_path / "t.safetensors", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_one_file_are_removed_and_nothing_else(tmp_path):
    path = tmp_path / "last.safetensors"
    for name in ("last.safetensors", ".last.safetensors.12.tmp", ".other.12.tmp"):
        (tmp_path / name).write_text("x")
    remove_leftovers(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".other.12.tmp", "last.safetensors"]
