"""Work on local processes: every item once, one thread each, and what goes wrong is said."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies

from leanbayes.compare.workers import on_processes, run_on_workers, split_items
from leanbayes.runtime.display import brief_warnings


@given(strategies.lists(strategies.integers(), unique=True), strategies.integers(1, 9))
def test_every_item_is_split_once(items, workers):
    shares = split_items(items, workers)
    assert sorted(item for share in shares for item in share) == sorted(items)
    assert len(shares) == min(workers, len(items))
    assert all(shares)
    assert not shares or max(map(len, shares)) - min(map(len, shares)) <= 1


def _note(path: Path, wrong: bool) -> None:
    if wrong:
        raise ValueError("this one cannot be done")
    path.write_text(f"{os.getpid()} {torch.get_num_threads()} {sys.argv[1:]}")


def test_each_task_has_a_process_and_one_thread(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["leanbayes", "typed"])
    on_processes(_note, [(tmp_path / "a", False), (tmp_path / "b", True)])
    process, threads, arguments = (tmp_path / "a").read_text().split(" ", 2)
    assert int(process) != os.getpid()
    assert (threads, arguments) == ("1", "['typed']")
    assert not (tmp_path / "b").exists()
    assert "leanbayes: this one cannot be done" in capfd.readouterr().err


def _warn(path: Path) -> None:
    for text in ("known before", f"found by {path.name}", f"found by {path.name}"):
        warnings.warn(text, stacklevel=1)


def test_warnings_of_a_worker_are_sentences_and_not_said_again(tmp_path, capfd):
    with brief_warnings():
        warnings.simplefilter("always")
        warnings.warn("known before", stacklevel=1)
        on_processes(_warn, [(tmp_path / "a",)])
    assert capfd.readouterr().err == "leanbayes: warning: known before\nleanbayes: warning: found by a\n"


def test_no_workers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one worker, got 0"):
        run_on_workers([], tmp_path, workers=0)
