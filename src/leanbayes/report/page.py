"""The report as one self-contained HTML file: a section for each group of results.

`Section` holds everything that the template `report.html` shows of a group. Galleries are cards of test inputs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TYPE_CHECKING

from leanbayes.evaluation.statistics import number
from leanbayes.report.figures import figures
from leanbayes.report.load import Contender, cut, Group, load_results, Results, Run
from leanbayes.report.provenance import Provenance, provenance
from leanbayes.report.svg import Figure, key_symbol
from leanbayes.report.table import Comparison, comparison
from leanbayes.report.verdict import RULE, Verdict, verdict
from leanbayes.runtime._files import local, write_text

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
CARDS = 4  # on a shelf of a gallery
CLASSES = 4  # bars on a card
IMAGE_LIMIT = 60_000  # characters of one image; larger ones would make the page heavy
SHELVES = {"certain": "Most certain", "uncertain": "Least certain", "epistemic": "Most epistemic uncertainty"}
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Bar:
    """The probability of one class, in percent, with one standard deviation between draws on either side."""

    name: str
    percent: float
    low: float
    high: float
    is_label: bool


@dataclass(frozen=True)
class Card:
    """One test input: image, true class, predicted class, probabilities and uncertainties."""

    image: str | None
    label: str
    predicted: str
    right: bool
    bars: list[Bar]
    uncertainties: list[tuple[str, str]]


@dataclass(frozen=True)
class Gallery:
    """The cards of one contender and one seed, by shelf."""

    contender: Contender
    seed: str
    shelves: list[tuple[str, list[Card]]]


@dataclass(frozen=True)
class Section:
    """The content of the page for one group."""

    id: str
    group: Group
    verdict: Verdict
    table: Comparison
    figures: list[Figure]
    galleries: list[Gallery]
    provenance: Provenance

    @property
    def sentence(self) -> tuple[str, str, str]:
        """The recommendation, split around the recommended method."""
        found = self.verdict
        return found.sentence.partition(found.choice) if found.choice else (found.sentence, "", "")

    @property
    def open_gallery(self) -> str:
        """The contender whose examples are open at first: the recommended one, else the first stochastic one."""
        labels = [gallery.contender.label for gallery in self.galleries]
        stochastic = [g.contender.label for g in self.galleries if not g.contender.is_reference]
        return self.verdict.choice if self.verdict.choice in labels else [*stochastic, *labels][0]


def build(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of all results under a folder.

    Args:
        folder: the output folder of `leanbayes compare`.
        out: the file to write, or a folder for `report.html`; default the folder of the results.

    Returns:
        The path of the page.
    """
    out = local(folder if out is None else out)
    results = load_results(folder)
    if out.is_dir():
        out /= "report.html"
    write_text(render(results), out)
    return out


def render(results: Results) -> str:
    """Return the page; equal results give equal pages."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,  # texts in a result are not trusted
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "short": _short, "cut": cut}
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        sections=[
            Section(f"group{i}", g, verdict(g), comparison(g), figures(g), galleries(g), provenance(g))
            for i, g in enumerate(results.groups, 1)
        ],
        damaged=results.damaged,
        rule=RULE,
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        # this one script and no requests
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
        key_symbol=key_symbol,
    )


def _breakable(text: str) -> Markup:
    """Allow line breaks after underscores and opening brackets, and none around ±."""
    from markupsafe import escape, Markup

    return Markup(str(escape(text)).replace("_", "_<wbr>").replace("[", "[<wbr>").replace(" ± ", "&nbsp;±&nbsp;"))


def _short(text: str) -> Markup:
    """Cut a long text; the whole text shows on hover."""
    from markupsafe import escape, Markup

    shown = cut(text)
    return escape(text) if shown == text else Markup('<span title="{}">{}</span>').format(text, shown)


def galleries(group: Group) -> list[Gallery]:
    """Return a gallery for each contender with examples, from its first seed that has some."""
    found = []
    for contender in group.contenders:
        for run in contender.runs:
            shelves = [(title, _cards(run, name)) for name, title in SHELVES.items()]
            if any(cards for _, cards in shelves):
                found.append(Gallery(contender, run.seed, [(title, cards) for title, cards in shelves if cards]))
                break
    return found


def _cards(run: Run, shelf: str) -> list[Card]:
    names = run.part("data", "classes")
    names = [str(name) for name in names] if isinstance(names, list) else []
    return [_card(row, names) for row in run.rows("figures", "examples", shelf)[:CARDS]]


def _card(row: Mapping[str, Any], names: list[str]) -> Card:
    label, predicted = row.get("label"), row.get("predicted")
    measured = ((kind, number(row.get(kind))) for kind in ("epistemic", "aleatoric"))
    return Card(
        image=_image(row.get("image")),
        label=_name(label, names),
        predicted=_name(predicted, names),
        right=label == predicted,
        bars=_bars(row, names),
        uncertainties=[(kind, f"{value:.3f}") for kind, value in measured if value is not None],
    )


def _name(index: Any, names: list[str]) -> str:
    return names[index] if isinstance(index, int) and 0 <= index < len(names) else str(index)


def _bars(row: Mapping[str, Any], names: list[str]) -> list[Bar]:
    """Return bars of the most probable classes; the true class is always among them."""
    given = (row.get(name) for name in ("probabilities", "spread"))
    chances, stds = ([number(v) or 0.0 for v in values] if isinstance(values, list) else [] for values in given)
    stds += [0.0] * (len(chances) - len(stds))
    order = sorted(range(len(chances)), key=lambda i: -chances[i])[:CLASSES]
    label = row.get("label")
    if isinstance(label, int) and 0 <= label < len(chances) and label not in order:
        order[-1] = label
    bars = []
    for i in order:
        low, high = max(chances[i] - stds[i], 0.0), min(chances[i] + stds[i], 1.0)
        bars.append(Bar(_name(i, names), 100 * chances[i], 100 * low, 100 * high, i == label))
    return bars


def _image(text: Any) -> str | None:
    """Return an image as a data address; None if it is no PNG or too large."""
    if not isinstance(text, str) or len(text) > IMAGE_LIMIT:
        return None
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return f"data:image/png;base64,{text}" if content.startswith(PNG) else None
