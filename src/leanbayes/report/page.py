"""The report as one self-contained HTML file: a section for each group of results.

`Section` holds everything that the template `report.html` shows of a group.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leanbayes.report.columns import TERMS
from leanbayes.report.examples import galleries, Gallery, TARGET_HEADS
from leanbayes.report.figures import figures
from leanbayes.report.load import BASELINES, cut, Group, load_results, Results, TEMPERED
from leanbayes.report.provenance import Provenance, provenance, TUNED
from leanbayes.report.svg import Figure, key_symbol
from leanbayes.report.table import Comparison, comparison
from leanbayes.report.verdict import candidates, headline, RULE, Verdict, verdict
from leanbayes.runtime._files import local, write_text

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
EXAMPLES = "Most and least certain test inputs"


@dataclass(frozen=True)
class Section:
    """The content of the page for one group; `ranked` has the labels, the recommended first, then by quality."""

    id: str
    group: Group
    verdict: Verdict
    table: Comparison
    figures: list[Figure]
    galleries: list[Gallery]
    provenance: Provenance
    ranked: tuple[str, ...]

    @property
    def sentence(self) -> tuple[str, str, str]:
        """The recommendation, split around the recommended method."""
        found = self.verdict
        return found.sentence.partition(found.choice) if found.choice else (found.sentence, "", "")

    @property
    def open_gallery(self) -> str:
        """The contender whose examples are open at first: the recommended one, else the best, else the first."""
        labels = [gallery.contender.label for gallery in self.galleries]
        return next((label for label in self.ranked if label in labels), labels[0])

    @property
    def contents(self) -> list[tuple[str, str]]:
        """The parts of the section: the end of their id, and their title."""
        parts = [("failures", "Failed runs")] if self.group.failures else []
        parts += [("comparison", "Comparison")] if self.table.columns else []
        parts += [(figure.key, figure.title.partition(" on test")[0]) for figure in self.figures]
        parts += [("examples", EXAMPLES)] if self.galleries else []
        return parts + ([("repeat", "Settings")] if self.provenance.facts else [])


@dataclass(frozen=True)
class Line:
    """One comparison in the first table of a page with several: advice, row, its deciding figure and its price."""

    section: Section
    advice: str
    label: str
    figure: str
    value: str
    against: str
    answer: str
    seeds: int


def line_of(section: Section) -> Line:
    """Return a comparison as one line."""
    group, found = section.group, section.verdict
    ranked = candidates(group)
    named = {candidate.label: candidate for candidate in ranked}
    plain = next((c for c in ranked if c.contender.name == TEMPERED), None)
    plain = plain or next((c for c in ranked if c.contender.is_reference), None)
    best = next((c for c in ranked if c.affordable), ranked[0] if ranked else None)
    seeds = max((len(contender.runs) for contender in group.contenders), default=0)
    if found.choice is not None:
        advice, row = "take", named.get(found.choice)
    elif seeds == 1:
        advice, row = "best of one seed", best
    else:
        advice, row = "no clear difference", plain or best
    passes = row.costs.get("answer_passes") if row else None
    return Line(
        section,
        advice if row else "no figures",
        row.label if row else "",
        headline(group.task).title,
        row.written if row else "",
        plain.written if plain else "",
        f"{passes.mean:.3g}" if passes else "",
        seeds,
    )


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
    sections = [_section(f"group{i}", group) for i, group in enumerate(results.groups, 1)]
    columns = {column.key: column for section in sections for column in section.table.columns}
    return environment.get_template("report.html").render(
        sections=sections,
        lines=[line_of(section) for section in sections] if len(sections) > 1 else [],
        columns={key: (f"term{i}", column) for i, (key, column) in enumerate(columns.items(), 1)},
        terms=TERMS,
        target_heads=tuple(TARGET_HEADS.values()),
        examples_title=EXAMPLES,
        damaged=results.damaged,
        rule=RULE,
        tuned_rule=TUNED,
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        # this one script and no requests
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
        key_symbol=key_symbol,
    )


def _section(identity: str, group: Group) -> Section:
    found, ranked = verdict(group), [candidate.contender for candidate in candidates(group)]
    order = sorted(ranked, key=lambda contender: contender.label != found.choice)
    shown = figures(group, next((c for c in order if not c.is_plain and c.name not in BASELINES), None))
    table, labels = comparison(group), tuple(contender.label for contender in order)
    return Section(identity, group, found, table, shown, galleries(group), provenance(group), labels)


def _breakable(text: str) -> Markup:
    """Allow line breaks after underscores and opening brackets, and none around ±."""
    from markupsafe import escape, Markup

    return Markup(str(escape(text)).replace("_", "_<wbr>").replace("[", "[<wbr>").replace(" ± ", "&nbsp;±&nbsp;"))


def _short(text: str) -> Markup:
    """Cut a long text; the whole text shows on hover."""
    from markupsafe import escape, Markup

    shown = cut(text)
    return escape(text) if shown == text else Markup('<span title="{}">{}</span>').format(text, shown)
