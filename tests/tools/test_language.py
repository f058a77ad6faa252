"""The language check finds the words of its list in prose, and leaves code alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import language

MODULE = '''"""Evaluate a model.

    law(x)   an equation, not prose
"""


def say_hello(name):  # runs beside
    # the others, as it
    # is
    raise ValueError(f"{name} is judged by `what is` alone")
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder in the place of the repository."""
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language, "ALLOWED", {})
    return tmp_path


def found(folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    """Return line and word of every hit in a file."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return [(hit.line, hit.found) for hit in language.look(file)[0]]


@pytest.mark.parametrize(
    "prose",
    [
        "It is judged by the others.",
        "Foreign inputs come anew.",
        "It stands beside, or behind, the rest.",
        "What counts is the mean.",
        "We take what is there.",
        "It stays as it is.",
        "They lie in a folder, so many of them.",
        "Three of which one is odd.",
        "The training goes on.",
        "Nobody knows the law.",
        "Composites are taken apart.",
        "The weight rests.",
    ],
)
def test_every_rule_finds_its_words(prose, project):
    assert found(project, "page.md", prose)


@pytest.mark.parametrize(
    "prose",
    [
        "The class `Law` and its table in `law.py`, `law(x)` and `what is` in code.",
        "By the law of large numbers the rest is small.",
        "The lawyer besieged the hindmost.",
        "```text\nwhat is judged anew\n```",
        "[a page](what-is-judged.md)",
    ],
)
def test_code_names_and_other_words_are_left_alone(prose, project):
    assert not found(project, "page.md", prose)


def test_lines_are_those_of_the_file(project):
    text = (
        "# Title\n\nA link over [two\nlines](a.md), and `code over\nlines`.\n\n```text\nanew\n```\n\nIt begins\nanew.\n"
    )
    assert found(project, "page.md", text) == [(12, "anew")]


def test_docstrings_comments_messages_and_names_are_read(project):
    assert found(project, "module.py", MODULE) == [(7, "say_hello"), (7, "beside"), (8, "as it is"), (10, "judged")]


def test_strings_of_tests_are_not_prose(project):
    text = 'def test_it():\n    """Check it anew."""\n    assert message == "it is judged anew"\n'
    assert found(project, "tests/test_it.py", text) == [(2, "anew")]


def test_a_changelog_is_read_down_to_the_first_release(project):
    text = "# Changelog\n\n## [Unreleased]\n- Done anew.\n\n## [0.1.0]\n- Judged.\n"
    assert found(project, "CHANGELOG.md", text) == [(4, "anew")]


def test_sentences_are_counted_without_headings_tables_and_equations():
    page = "# Heading\n\n| a |\n\nOne two three. Four five\nsix seven! By A. et al. (2020).\n\n* one item\n* two more\n"
    counts = [len(language.words(s)) for piece in language.markdown(page) for s, _ in language.sentences(piece)]
    assert counts == [3, 4, 5, 2, 2]
    tree = ast.parse(MODULE)
    spoken = [s for piece in language.python(MODULE, tree, messages=False) for s, _ in language.sentences(piece)]
    assert "Evaluate a model." in spoken
    assert not any("equation" in s for s in spoken)


def test_long_sentences_fail_and_are_shown(project, capsys):
    (project / "page.md").write_text(" ".join(["word"] * 19) + ".\n")
    assert language.main(["--only", "page.md"]) == 1
    assert "19 words, page.md:1" in capsys.readouterr().out
    (project / "page.md").write_text(" ".join(["word"] * 18) + ".\n")
    assert language.main(["--only", "page.md"]) == 0


def test_a_missing_path_is_named():
    with pytest.raises(SystemExit, match="got nowhere"):
        language.main(["--only", "nowhere"])
