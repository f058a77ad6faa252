"""The page in a real browser: every figure shows, the table sorts, nothing leaves the page, nothing complains."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from leanbayes.report import build
from tests.report import make
from tests.report.test_page import HOSTILE

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
LAPTOP, NARROW = {"width": 1200, "height": 800}, {"width": 1000, "height": 800}
METHODS = {name: make.METHODS[name] for name in ("plain", "deep_ensemble", "implicit", "mean_field", "rank1")}
FIGURES = (
    "cost", "reliability", "selective", "confusion", "severity", "ood", "total-histogram", "epistemic-histogram",
    "training",
)  # fmt: skip
DESKTOP, NARROW_PHONE = {"width": 1280, "height": 900}, {"width": 400, "height": 844}
BOXES = """() => {
  // Boxes of all visible text that is not turned, with what holds it: a chart or the page.
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, title, .hidden, .skip, [popover], th.who")) continue;
    if (parent.closest("[transform*=rotate]") || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      const scroll = parent.closest(".scroll, .command")?.getBoundingClientRect();
      if (scroll && (box.left >= scroll.right || box.right > scroll.right + 1)) continue;
      found.push([box.left, box.top, box.right, box.bottom, node.data.trim()]);
    }
  }
  return found;
}"""


def missing(what):
    """Skip where a browser cannot be had; in CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"the browser tests need {what}, and CI has to run them")
    pytest.skip(f"needs {what}")


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium")
    if executable is None:
        missing("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report on classification, regression, a failed run and hostile names."""
    folder = make.tree(tmp_path_factory.mktemp("report"), METHODS)
    make.regression_tree(folder)
    make.write(folder, make.failed("nested", 0, f"RuntimeError: {HOSTILE}"))
    make.tree(folder, {"plain": make.METHODS["plain"], HOSTILE: make.METHODS["rank1"]}, seeds=1, data=HOSTILE)
    return build(folder)


@pytest.fixture
def open_page(browser, report):
    """Return a function that opens the report; check in the end that it asked for nothing and complained of nothing."""
    opened, asked, said = [], [], []

    def open_it(viewport=WIDE, scheme="light", **options):
        context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(report.as_uri())
        page.wait_for_load_state("load")
        opened.append(context)
        return page

    yield open_it
    for context in opened:
        context.close()
    assert {url for url in asked if not url.startswith("data:image/png;base64,")} == {report.as_uri()}
    assert said == []


def names(page, table):
    return [text.strip() for text in table.locator("tbody th.who span").all_inner_texts()]


def digits_section(page):
    return page.locator("section.group", has=page.locator("h2", has_text="digits network lenet")).first


def shown(page, selector):
    """Return the boxes that a selector finds; all must be visible."""
    found = page.locator(selector)
    assert found.count() > 0, selector
    boxes = [found.nth(i).bounding_box() for i in range(found.count())]
    assert all(box and box["width"] > 20 and box["height"] > 20 for box in boxes), selector
    return boxes


def test_every_figure_is_visible_and_drawn(open_page):
    page = open_page()
    section = digits_section(page)
    identity = section.get_attribute("id")
    for key in FIGURES:
        shown(page, f"#{identity}-{key} .panel > svg")
        drawn = page.locator(f"#{identity}-{key} .panel > svg").evaluate_all(
            "all => all.map(svg => svg.querySelectorAll('polyline, polygon, path.marker, rect.cell').length)"
        )
        assert min(drawn) >= 1, key
    shown(page, f"#{identity}-comparison table.comparison >> nth=0")
    shown(page, f"#{identity}-examples details[open] .card")
    shown(page, f"#{identity}-repeat .command")
    shown(page, f"#{identity}-failures")
    images = page.locator(f"#{identity}-examples details[open] img")
    assert images.evaluate_all("all => all.every(image => image.complete && image.naturalWidth === 8)")
    regression = page.locator("section.group", has=page.locator("h2", has_text="concrete network mlp"))
    assert regression.locator(".panel > svg").count() == 3 + 4 + 1 + 4 + 2


def test_series_have_their_own_colours(open_page):
    page = open_page()
    fills = (
        digits_section(page)
        .locator("tbody th.who path.marker >> visible=true")
        .evaluate_all("all => all.map(mark => getComputedStyle(mark).fill)")
    )
    assert len(set(fills)) == len(METHODS)


def test_the_table_sorts_by_click(open_page):
    page = open_page()
    table = digits_section(page).locator("table.comparison").first
    before = names(page, table)
    head = table.locator("thead th", has_text="NLL").first
    head.locator("button.sort").click()
    ascending = names(page, table)
    assert head.get_attribute("aria-sort") == "ascending"
    assert ascending[:3] == ["deep_ensemble", "rank1", "implicit"]
    assert sorted(ascending) == sorted(before)
    head.locator("button.sort").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert names(page, table) == ascending[::-1]
    accuracy = table.locator("thead th", has_text="Accuracy").first
    accuracy.locator("button.sort").click()
    assert accuracy.get_attribute("aria-sort") == "descending", "where more is better, the best comes first"
    assert head.get_attribute("aria-sort") == "none"
    assert names(page, table)[0] == "deep_ensemble"
    table.locator("thead th.who button").click()
    assert names(page, table) == before


def test_the_table_sorts_by_keyboard(open_page):
    page = open_page()
    table = digits_section(page).locator("table.comparison").first
    table.locator("thead th.who button").focus()
    for _ in range(3):  # accuracy, its explanation, NLL
        page.keyboard.press("Tab")
    assert "NLL" in page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    assert names(page, table)[0] == "deep_ensemble"
    page.keyboard.press("Space")
    assert names(page, table)[-1] == "deep_ensemble"


def test_what_is_missing_sorts_last(open_page):
    page = open_page()
    table = digits_section(page).locator("table.comparison").first
    table.locator("tbody tr").nth(3).locator("td").nth(1).evaluate("cell => delete cell.dataset.value")
    name = names(page, table)[3]
    button = table.locator("thead th", has_text="NLL").first.locator("button.sort")
    for _ in range(2):
        button.click()
        assert names(page, table)[-1] == name


def test_a_name_in_the_legend_shows_its_series_alone(open_page):
    page = open_page()
    section = digits_section(page)
    button = section.locator("#" + section.get_attribute("id") + "-severity .legend button", has_text="rank1")
    faint = section.locator(".panels .curve.faint")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert faint.count() > 0
    assert section.locator(".panels:not(.small) .curve.n4.faint").count() == 0
    button.press("Enter")
    assert faint.count() == 0


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_colours_follow_the_system_until_the_button_is_pressed(open_page):
    light, dark = open_page(scheme="light"), open_page(scheme="dark")
    by_system = background(light), background(dark)
    assert by_system[0] != by_system[1]
    assert light.locator("#theme").get_attribute("aria-label") == "Switch to dark colours"
    for page in (light, dark):
        page.locator("#theme").press("Enter")
    assert (background(light), background(dark)) == by_system[::-1]
    light.emulate_media(color_scheme="dark")
    assert background(light) == by_system[1], "a choice outlives a change of the system"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_and_not_sideways(open_page, scheme):
    page = open_page(PHONE, scheme)
    page.locator("details").evaluate_all(
        "all => all.forEach(each => { each.removeAttribute('name'); each.open = true; })"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    table = digits_section(page).locator(".scroll").first
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    table.evaluate("box => { box.scrollLeft = 400; }")
    first = table.locator("tbody th.who").first.bounding_box()
    assert abs(first["x"] - table.bounding_box()["x"]) < 2, "the names stay where they are"


def test_the_table_fits_a_laptop(open_page):
    section = digits_section(open_page(LAPTOP))
    scroll = section.locator(".scroll").first
    assert scroll.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert section.locator(".sideways").first.is_hidden()


def edge(page, scroll):
    """Return how bright a bare spot at the right edge of a table is: just above its last line."""
    from PIL import Image

    box = scroll.bounding_box()
    spot = {"x": box["x"] + box["width"] - 2, "y": box["y"] + box["height"] - 6, "width": 1, "height": 1}
    return Image.open(io.BytesIO(page.screenshot(clip=spot, full_page=True))).convert("L").getpixel((0, 0))


@pytest.mark.parametrize("viewport", [NARROW, PHONE], ids=["narrow", "phone"])
def test_a_table_that_does_not_fit_says_that_it_scrolls(open_page, viewport):
    page = open_page(viewport)
    section = digits_section(page)
    hint, scroll = section.locator(".sideways").first, section.locator(".scroll").first
    hint.wait_for(state="visible")
    shaded = edge(page, scroll)
    scroll.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    assert shaded < edge(page, scroll) - 20, "a shadow until the last column is in sight"
    page.set_viewport_size(WIDE)
    hint.wait_for(state="hidden")


@pytest.mark.parametrize(("viewport", "rows"), [(WIDE, [4]), (LAPTOP, [2, 2]), (PHONE, [1, 1, 1, 1])])
def test_shelves_of_examples_have_no_ragged_row(open_page, viewport, rows):
    page = open_page(viewport)
    cards = digits_section(page).locator(".gallery[open] .cards").first.locator(".card")
    tops = [cards.nth(i).bounding_box()["y"] for i in range(cards.count())]
    assert [tops.count(top) for top in sorted(set(tops))] == rows


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_names_of_axes_stand_clear_of_their_numbers(open_page, viewport):
    gaps = (
        open_page(viewport)
        .locator(".panel > svg:has(.name[transform])")
        .evaluate_all(
            """all => all.map(svg => {
          const box = (text) => text.getBoundingClientRect();
          const numbers = [...svg.querySelectorAll(".number[text-anchor=end]")];
          return Math.min(...numbers.map(n => box(n).left)) - box(svg.querySelector(".name[transform]")).right;
        })"""
        )
    )
    assert gaps
    assert min(gaps) >= 0


def overlapping(boxes, least=2.0):
    """Return pairs of texts whose boxes share more than `least` pixels in both directions."""
    found, active = [], []
    for box in sorted(boxes, key=lambda box: box[1]):
        active = [other for other in active if other[3] - least > box[1]]
        for other in active:
            across = min(box[2], other[2]) - max(box[0], other[0])
            down = min(box[3], other[3]) - max(box[1], other[1])
            if across > least and down > least:
                found.append((box[4], other[4]))
        active.append(box)
    return found


def test_overlaps_are_found():
    boxes = [[0, 0, 10, 10, "a"], [5, 4, 20, 14, "b"], [9, 0, 30, 10, "c"], [0, 9, 8, 20, "d"]]
    assert overlapping(boxes) == [("b", "a"), ("b", "c"), ("d", "b")]


@pytest.mark.parametrize("viewport", [DESKTOP, NARROW_PHONE], ids=["1280", "400"])
def test_nothing_overflows_and_no_text_covers_another(open_page, viewport):
    page = open_page(viewport)
    page.locator("details").evaluate_all(
        "all => all.forEach(each => { each.removeAttribute('name'); each.open = true; })"
    )
    page.evaluate("document.querySelectorAll('.numbers .scroll').forEach(box => { box.style.maxHeight = 'none'; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    boxes = page.evaluate(BOXES)
    assert len(boxes) > 500
    assert max(box[2] for box in boxes) <= viewport["width"]
    assert overlapping(boxes) == []


@pytest.mark.parametrize(("count", "rows"), [(8, [4, 4]), (7, [4, 3]), (6, [6]), (5, [5])])
def test_small_charts_fill_their_rows(open_page, count, rows):
    page = open_page(DESKTOP)
    panels = digits_section(page).locator(".panels.small").first
    panels.evaluate(
        """(grid, count) => {
          while (grid.children.length < count) grid.append(grid.children[0].cloneNode(true));
          grid.style.setProperty("--columns", Math.ceil(count / Math.ceil(count / 6)));
        }""",
        count,
    )
    tops = panels.evaluate("grid => [...grid.children].map(panel => panel.getBoundingClientRect().top)")
    assert [tops.count(top) for top in sorted(set(tops))] == rows


def test_an_explanation_opens_on_a_tap(open_page):
    page = open_page(PHONE, has_touch=True)
    head = digits_section(page).locator("thead th", has_text="NLL").first
    button = head.locator("button.ask")
    term = page.locator(f"#{button.get_attribute('popovertarget')}")
    assert term.is_hidden()
    button.tap()
    assert term.is_visible()
    assert "-log p(true class)" in term.inner_text()
    page.touchscreen.tap(5, 5)
    assert term.is_hidden()
    assert page.locator("#terms dt", has_text="NLL").first.is_visible()


def test_the_first_table_has_a_line_for_each_comparison_and_leads_there(open_page):
    page = open_page()
    lines = page.locator("table.overview tbody tr")
    assert lines.count() == page.locator("section.group").count() == 3
    targets = lines.locator("a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert targets == page.locator("section.group").evaluate_all("all => all.map(s => '#' + s.id)")


def test_every_link_of_the_contents_leads_somewhere(open_page):
    page = open_page()
    targets = page.locator(".contents a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert len(targets) > 15
    assert all(page.locator(target).count() == 1 for target in targets)


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """Return the source of axe-core, from npm; skip where it cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, for axe-core")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "axe-core@4", "--no-save", "--no-audit", "--no-fund", "--prefix", str(folder)]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"needs axe-core from npm ({type(error).__name__})")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, NARROW_PHONE], ids=["1280", "400"])
def test_the_page_is_accessible(open_page, axe, viewport, scheme):
    page = open_page(viewport, scheme, bypass_csp=True)
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert {each["id"]: [node["html"][:200] for node in each["nodes"]][:3] for each in found["violations"]} == {}


def test_without_script_everything_but_sorting_works(open_page):
    page = open_page(java_script_enabled=False)
    assert page.locator("table.comparison").first.is_visible()
    assert page.locator(".panel > svg").first.is_visible()
    assert page.locator("#theme").is_hidden()
    assert page.get_by_text("Press the head of a column to sort").first.is_hidden()


def test_hostile_names_are_read_as_text(open_page):
    page = open_page()
    assert page.evaluate("window.pwned") is None
    assert page.locator("h2", has_text="</script></style><img src=x").first.is_visible()


def test_print_is_light_and_whole(open_page):
    page = open_page(scheme="dark")
    page.emulate_media(media="print", color_scheme="light")
    assert page.locator("#theme").is_hidden()
    assert page.locator(".panel > svg").first.is_visible()


@pytest.mark.skipif("LEANBAYES_SHOTS" not in os.environ, reason="for people: set LEANBAYES_SHOTS to a folder")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, LAPTOP, PHONE], ids=["wide", "laptop", "phone"])
def test_take_screenshots(open_page, viewport, scheme):
    page = open_page(viewport, scheme)
    folder = Path(os.environ["LEANBAYES_SHOTS"])
    page.screenshot(path=folder / f"report-{viewport['width']}-{scheme}.png", full_page=True)
