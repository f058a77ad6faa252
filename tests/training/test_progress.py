"""The display: a bar on a terminal, ten lines elsewhere, nothing if asked."""

from __future__ import annotations

import io
import sys

import pytest

from leanbayes.training import progress as shown
from leanbayes.training.fit import fit

from .problems import images, network, short


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_ten_lines_where_there_is_no_terminal(capsys):
    fit(network(), images(32), short(epochs=40), validation=images(20))
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == ""
    assert len(lines) == 10
    assert lines[-1].startswith("epoch 40 of 40: loss ")
    assert all(word in lines[0] for word in ("kl 0", "lr ", "valid nll", "valid accuracy", "s left"))
    fit(network(), images(32), short(), progress=False)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(shown, "REFRESHES", 1e9)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    fit(network(), images(), short())
    text = terminal.getvalue()
    assert "epoch 3 of 3" in text
    assert "loss " in text
    assert "left" in text


def test_lines_where_rich_is_missing(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    fit(network(), images(), short())
    assert terminal.getvalue().count("epoch") == 3


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations_are_written_as_people_say_them(seconds, text):
    assert shown.duration(seconds) == text
