"""Sentences of the results pages have the numbers of their files; claims.toml lists them with references.

References are those of tools/results_page.py, and "A minus B" is the difference of two means.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import unsaid
from tools.results_page import REFERENCE, values_of, written

CLAIMS = tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))


def rendered(text: str) -> str:
    """Return a sentence with its references filled in."""
    return REFERENCE.sub(lambda match: value(match[1], match[2]), text)


def value(reference: str, form: str) -> str:
    found = [values_of(part.split(" > "), CLAIMS["files"]) for part in reference.split(" minus ")]
    if len(found) == 1:
        return written(found[0], form.split())
    first, second = (statistics.fmean(map(float, each)) for each in found)
    return written([first - second], form.split())


@pytest.mark.parametrize("page", CLAIMS["says"])
def test_sentences_have_the_numbers_of_their_files(page):
    assert unsaid(f"docs/results/{page}.md", map(rendered, CLAIMS["says"][page])) == []


def test_every_sentence_of_the_list_has_a_reference():
    assert [text for each in CLAIMS["says"].values() for text in each if not REFERENCE.search(text)] == []


def test_a_difference_is_one_of_means():
    assert (
        value(
            "law > BN3: the same, noise on weights > 1.0 > nll minus law > FN3: uniform tails, no noise > 1.0 > nll",
            "+.3f",
        )
        == "-0.007"
    )
    assert re.fullmatch(r"\d\.\d", rendered("{widths > plain > 1 > accuracy minus widths > BN3 > 1 > accuracy : .1f}"))
