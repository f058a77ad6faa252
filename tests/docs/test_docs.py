"""The documentation is true: its code runs, its links lead somewhere, and it names everything public."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

import leanbayes as lb

ROOT = Path(__file__).parents[2]
RUN = ("README.md", "docs/quickstart.md", "docs/compare.md", "docs/gotchas.md", "docs/layers.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MACHINE_PATH = re.compile(
    r"(?<![\w.~/-])/(?:Users|data|etc|home|media|mnt|opt|private|root|scratch|srv|tmp|usr|var|work)/|\b[A-Z]:\\|file://"
)


def pages() -> list[str]:
    """Return every Markdown file of the project, relative to its root."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(p.as_posix() for p in found if p.parts[0] != "runs" and not any(q.startswith(".") for q in p.parts))


def python_blocks(page: str) -> Iterator[tuple[str, int]]:
    """Yield the code of every ```python block with the number of lines above it."""
    text = (ROOT / page).read_text()
    for match in FENCE.finditer(text):
        if match.group(1) == "python":
            yield match.group(2), text[: match.start(2)].count("\n")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def public_names() -> list[str]:
    """Return the names that `leanbayes/__init__.py` re-exports on purpose, as `import x as x`."""
    tree = ast.parse(Path(lb.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [alias.asname for node in imports for alias in node.names if alias.asname is not None]


@pytest.fixture
def _clean_torch():
    """Give a page a fresh compiler, and destroy the process group when a page fails."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    if distributed.is_initialized():
        distributed.destroy_process_group()


# torch.compile looks at `.grad` of whatever passes a hook and hides the warning, which an error filter meets first.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("_clean_torch")
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for code, above in python_blocks(page):
        # Empty lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * above + code, str(ROOT / page), "exec"), namespace)  # our own documentation


@pytest.mark.parametrize("page", pages())
def test_relative_links_lead_somewhere(page):
    here = ROOT / page
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", here.read_text()))
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = here.parent / name if name else here
        assert linked.exists(), f"{page} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(linked.read_text()), f"{page} links to {target}: no such heading"


@pytest.mark.parametrize("page", pages())
def test_no_page_names_a_place_on_somebodys_machine(page):
    found = MACHINE_PATH.search((ROOT / page).read_text())
    assert found is None, f"{page} contains '{found.group()}'"


def test_every_public_name_is_mentioned_somewhere():
    text = "\n".join((ROOT / page).read_text() for page in pages())
    silent = [name for name in public_names() if not re.search(rf"\blb\.{name}\b", text)]
    assert len(public_names()) > 20
    assert silent == []


@pytest.mark.parametrize("page", RUN)
def test_every_fence_is_closed_and_says_what_it_is(page):
    text = (ROOT / page).read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))
    assert all(language for language, _ in FENCE.findall(text))


def test_the_import_order_that_contributors_read_is_the_one_that_is_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [line.replace("leanbayes.", "") for line in contracts[0]["layers"]]
    assert "\n".join(checked) in (ROOT / "CONTRIBUTING.md").read_text()


def test_every_test_that_a_design_page_names_exists():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    pages_ = "\n".join(path.read_text() for path in (ROOT / "docs" / "design").glob("*.md"))
    named = set(re.findall(r"`(test_\w+)`", pages_))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in text} == set()
