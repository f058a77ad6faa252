"""The list of planted faults stays in step with the source."""

from __future__ import annotations

from collections import Counter

from tools.mutants import Fault, faults, first_failure, lost, Outcome, planted, ranked_tests, ROOT


def test_most_faults_still_have_their_text_in_the_source():
    listed = faults()
    assert max(Counter((fault.file, fault.note) for fault in listed).values()) == 1
    assert {fault.file.split("/")[0] for fault in listed} == {"core", "methods", "layers", "runtime", "distributions"}
    assert sum(planted(fault, ROOT) is not None for fault in listed) >= 60


def test_a_fault_needs_a_text_that_occurs_once(tmp_path):
    source = tmp_path / "src" / "leanbayes"
    source.mkdir(parents=True)
    (source / "one.py").write_text("a = 1\nb = 1\n")
    assert planted(Fault("one.py", "a = 1", "a = 2", ""), tmp_path) == "a = 2\nb = 1\n"
    for old, new in (("= 1", "= 2"), ("c = 1", "c = 2"), ("a = 1", "a = 1")):
        assert planted(Fault("one.py", old, new, ""), tmp_path) is None
    assert planted(Fault("other.py", "a = 1", "a = 2", ""), tmp_path) is None


def test_the_closest_tests_run_first():
    first = ranked_tests(Fault("distributions/divergence.py", "", "", ""), ROOT)[0]
    assert first == "tests/distributions/test_divergence.py"


def test_faults_that_are_no_longer_caught_are_listed():
    before = [Outcome("a.py", "x", "caught"), Outcome("a.py", "y", "survived"), Outcome("b.py", "z", "caught")]
    now = [Outcome("a.py", "x", "survived"), Outcome("a.py", "y", "survived"), Outcome("b.py", "z", "caught")]
    assert lost(now, before) == ["x"]


def test_the_first_failure_is_named_with_the_spaces_of_its_case():
    said = (
        "1 failed\nFAILED tests/test_a.py::test_b[batch first-x] - AssertionError: 1 - 2\nFAILED tests/test_a.py::c\n"
    )
    assert first_failure(said) == "tests/test_a.py::test_b[batch first-x]"
    assert first_failure("ERROR tests/test_a.py::c\n") == "tests/test_a.py::c"
    assert first_failure("1 passed\n") is None
