"""The report as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leanbayes.report.figures import figures
from leanbayes.report.figures.examples import galleries, Gallery
from leanbayes.report.figures.svg import Figure, key_symbol
from leanbayes.report.load import cut, Group, load_results, Results
from leanbayes.report.provenance import Provenance, provenance
from leanbayes.report.table import Comparison, comparison
from leanbayes.report.verdict import RULE, Verdict, verdict
from leanbayes.runtime._files import local, write_text

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


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
    return environment.get_template("report.html").render(
        sections=[_section(f"group{i}", group) for i, group in enumerate(results.groups, 1)],
        damaged=results.damaged,
        rule=RULE,
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        policy=_policy(script),
        key_symbol=key_symbol,
    )


def _section(id: str, group: Group) -> Section:
    return Section(id, group, verdict(group), comparison(group), figures(group), galleries(group), provenance(group))


def _breakable(text: str) -> Markup:
    """Allow line breaks after underscores and opening brackets, and none around ±."""
    from markupsafe import escape, Markup

    return Markup(str(escape(text)).replace("_", "_<wbr>").replace("[", "[<wbr>").replace(" ± ", "&nbsp;±&nbsp;"))


def _short(text: str) -> Markup:
    """Cut a long text; the whole text shows on hover."""
    from markupsafe import escape, Markup

    shown = cut(text)
    return escape(text) if shown == text else Markup('<span title="{}">{}</span>').format(text, shown)


def _policy(script: str) -> str:
    """Return a content security policy that allows this one script and no requests."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
