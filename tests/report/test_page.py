"""The page as a file: whole, self-contained, safe."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from leanbayes.report import build
from tests.report import make

HOSTILE = "</script></style><img src=x onerror='window.pwned=1'>\"&{{ 7 * 7 }}"


class Page(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = make.tree(tmp_path_factory.mktemp("full"))
    return build(folder).read_text()


def test_the_page_is_written_whole_beside_the_results(tmp_path):
    folder = make.regression_tree(tmp_path / "runs")
    assert build(folder) == folder / "report.html"
    assert build(folder, tmp_path / "other" / "page.html") == tmp_path / "other" / "page.html"
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert (folder / "report.html").read_text() == (tmp_path / "other" / "page.html").read_text()


def test_the_page_asks_for_nothing(full):
    for tag, attributes in Page(full).tags:
        assert tag not in {"link", "iframe", "object", "base", "form"}
        for name in ("src", "href", "data", "action", "srcset"):
            assert re.match(r"data:image/png;base64,|#", attributes.get(name, "#")), (tag, attributes)
    assert "url(" not in full
    assert "@import" not in full


def test_the_policy_allows_this_script_and_no_other(full):
    policy = next(a["content"] for t, a in Page(full).tags if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*)</script>", full, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in policy
    assert full.count("<script") == 1


def test_ten_methods_with_three_seeds_stay_small(full):
    assert len(full.encode()) < 2_000_000


def test_ids_are_unique(full):
    ids = [attributes["id"] for _, attributes in Page(full).tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_tells_every_figure_of_the_schema(full):
    for word in (
        "Accuracy", "NLL", "Calibrated NLL", "ECE", "Brier", "AURC", "AUROC letters", "AUROC noise", "mCE",
        "Extra params", "Train", "Train step", "Answer", "One pass", "Train time", "Passes", "Ensemble equivalent",
        "Top-5 accuracy", "Largest calibration gap", "ECE, 20 bins", "Adaptive ECE", "Classwise ECE", "Temperature",
        "Disagreement", "AUPR letters", "FPR95 noise", "AUROC noise by epistemic", "Peak memory",
        "4f1c2d7a9b3e", "cpu (x86_64), 1 thread", "torch 2.13.0", "leanbayes compare --data digits", "batch_size",
    ):  # fmt: skip
        assert word in full, word


def test_equal_results_give_equal_pages(tmp_path):
    pages = [build(make.regression_tree(tmp_path / name)).read_text() for name in ("a", "b")]
    assert pages[0] == pages[1]


def test_hostile_text_stays_text(tmp_path):
    methods = {HOSTILE: make.METHODS["rank1"], "plain": make.METHODS["plain"]}
    make.tree(tmp_path, methods, data=HOSTILE, net=HOSTILE)
    for seed in range(3):
        record = make.classification("patch", seed, make.METHODS["patch"], data=HOSTILE, net=HOSTILE)
        record["data"]["classes"] = [HOSTILE] * 10
        record["command"] = record["commit"] = record["environment"]["device"] = HOSTILE
        record["recipe"] = {HOSTILE: HOSTILE}
        record["metrics"]["ood"] = {HOSTILE: record["metrics"]["ood"]["letters"]}
        record["figures"]["histograms"]["total"]["counts"][HOSTILE] = [1 / 30] * 30
        make.write(tmp_path, record)
    failure = make.failed(HOSTILE, 3, HOSTILE)
    failure["data"]["name"] = failure["network"]["name"] = HOSTILE
    make.write(tmp_path, failure)
    (tmp_path / "result.json").write_text(HOSTILE)
    text = build(tmp_path).read_text()
    page = Page(text)
    assert all(attributes["src"].startswith("data:image/png") for tag, attributes in page.tags if tag == "img")
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert text.count("<script") == text.count("</script") == 1
    assert text.count("</style") == 1
    assert "{{ 7 * 7 }}" in text


def test_one_seed_has_no_standard_errors(tmp_path):
    text = build(make.tree(tmp_path, seeds=1)).read_text()
    table = re.search(r'<table class="comparison">.*?</table>', text, re.S)[0]
    assert "±" not in table
    assert "One seed recommends nothing" in text


def test_failures_and_damage_are_shown(tmp_path):
    make.tree(tmp_path, {"plain": make.METHODS["plain"]}, seeds=1)
    make.write(tmp_path, make.failed("nested", 2, "Traceback\nRuntimeError: loss is not finite"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "result.json").write_text("?")
    text = build(tmp_path).read_text()
    assert "1 run on digits, lenet failed" in text
    assert "RuntimeError: loss is not finite" in text
    assert "bad/result.json is not readable JSON" in text


def test_a_long_error_is_shown_whole(tmp_path):
    error = "ValueError: " + " ".join(f"word{i}" for i in range(80)) + ". Do this."
    make.write(tmp_path, make.failed("rank1", 0, error))
    (alert,) = re.findall(r'<div class="alert".*?</div>', build(tmp_path).read_text(), re.S)
    assert error in re.search(r"<summary>.*?</summary>", alert, re.S)[0]


def test_converted_and_skipped_layers_are_told(full):
    assert "<p>rank1: 3 of 12 layers converted</p>" in full
    assert "<li>lstm: LSTM, not a target of rank1</li>" in full
    assert "plain: 0 of" not in full


@pytest.mark.parametrize("layers", [None, 3, {"converted": "x", "total": 2}, {"converted": 1}])
def test_results_that_do_not_tell_of_layers_have_no_such_line(tmp_path, layers):
    record = make.classification("rank1", 0, make.METHODS["rank1"])
    record["cost"]["layers"] = layers
    make.write(tmp_path, record)
    assert "layers converted" not in build(tmp_path).read_text()


def test_rows_without_layers_to_convert_say_nothing_of_them(tmp_path):
    record = make.record("student", 0, "digits", "lenet", "classification")
    record["cost"]["layers"] = {
        "converted": 0,
        "total": 0,
        "eligible": 0,
        "things": "layers",
        "covered": 0,
        "skipped": [],
    }
    make.write(tmp_path, record | {"metrics": {"test": {"nll": 1.0}}})
    assert "layers converted" not in build(tmp_path).read_text()


def test_nothing_but_damage_still_gives_a_page(tmp_path):
    (tmp_path / "result.json").write_text("?")
    assert "1 file could not be read" in build(tmp_path).read_text()


def test_missing_parts_leave_no_headings(tmp_path):
    record = make.record("plain", 0, "digits", "lenet", "classification")
    make.write(tmp_path, record | {"metrics": {"test": {"accuracy": 0.9, "nll": 0.3}}})
    text = build(tmp_path).read_text()
    page = "".join(Page(re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.S)).text)
    for absent in (
        "Corrupted",
        "Out-of-distribution inputs",
        "Under corruption",
        "Training",
        "Most and least certain",
        "More figures",
    ):
        assert absent not in page
    assert "<figure" not in text


def test_runs_that_are_not_alike_are_remarked(tmp_path):
    make.tree(tmp_path, {"plain": make.METHODS["plain"]}, seeds=2)
    record = make.classification("rank1", 0, make.METHODS["rank1"])
    record["commit"], record["data"]["sha256"], record["recipe"]["epochs"] = "0000", "ab" * 32, 90
    make.write(tmp_path, record)
    text = build(tmp_path).read_text()
    assert "The runs used 2 different versions of the data: their figures are not comparable." in text
    assert "The runs used 2 different commits: differences may come from the code." in text
    assert "differ in epochs" in text
    assert "plain: 30; rank1: 90" in text
