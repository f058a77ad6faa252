"""Methods as the command line names them: `plain,rank1,patch[crossed=true,components=3]`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from typing import Any

from leanbayes.experiments.config import PLAIN
from leanbayes.methods import all_methods

WORD = re.compile(r"\s*([\w-]+)\s*(?:\[([^\]]*)\])?\s*(?:,|$)")


@dataclass(frozen=True)
class Version:
    """A method with fields of its own.

    Attributes:
        name: the method's name, or "plain".
        fields: those that were given in brackets.
        label: what its folder and its row in the report are called; empty where the name says all.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    label: str = ""


def wanted(text: str) -> list[Version]:
    """Return the methods that a text names, each once, in their order.

    Raises:
        ValueError: in one sentence, if a method or a field is unknown.
    """
    known = [PLAIN, *all_methods()]
    if text.strip() == "all":
        return [Version(name) for name in known]
    found: dict[str, Version] = {}
    at = 0
    while at < len(text):
        word = WORD.match(text, at)
        if word is None:
            raise ValueError(f"expected methods such as plain,rank1,patch[crossed=true], got {text[at:]!r}")
        version = _version(word[1].replace("-", "_"), word[2], known)
        found.setdefault(version.label or version.name, version)
        at = word.end()
    if not found:
        raise ValueError(f"expected at least one method among {', '.join(known)}, got none")
    return list(found.values())


def _version(name: str, inside: str | None, known: list[str]) -> Version:
    if name not in known:
        raise ValueError(f"expected methods among {', '.join(known)}, got {name!r}")
    given = dict(_pair(name, part) for part in (inside or "").split(",") if part.strip())
    if not given:
        return Version(name)
    written = ",".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in given.items())
    return Version(name, given, f"{name}[{written}]")


def _pair(name: str, part: str) -> tuple[str, Any]:
    """Read `field=value`; a value is JSON where it can be, else a word."""
    key, _, value = (piece.strip() for piece in part.partition("="))
    key = key.replace("-", "_")
    there = () if name == PLAIN else tuple(own.name for own in fields(all_methods()[name]))
    if key not in there or not value:
        raise ValueError(
            f"expected FIELD=VALUE with a field among {', '.join(there) or 'none'} of {name}, got {part!r}"
        )
    try:
        return key, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except json.JSONDecodeError:
        return key, value
