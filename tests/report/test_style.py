"""The palette: visible on its background, and told apart by red- and green-blind readers."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from leanbayes.methods import all_methods
from leanbayes.report import load_results
from leanbayes.report.load import BASELINES, COLOURS, FIXED, looks_of, UNKNOWN_SHAPE
from leanbayes.report.page import TEMPLATES
from tests.report import make

# How linear RGB looks without red or green cones (Machado et al., 2009, severity 1).
SIGHT = {
    "all colours": np.eye(3),
    "no red": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "no green": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def palette(mode):
    style = (TEMPLATES / "report.css").read_text()
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    return {name: linear((light, dark)[mode]) for name, light, dark in found}


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x, y, z = np.cbrt(TO_XYZ @ np.clip(rgb, 1e-4, 1) / [0.9505, 1, 1.0888])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    low, high = sorted(TO_XYZ[1] @ colour + 0.05 for colour in (one, other))
    return high / low


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_and_series_are_visible(mode):
    colours = palette(mode)
    for name in ("ink", "soft", "accent", "alert"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
        assert contrast(colours[name], colours["raised"]) >= 4.5, name
    for i in range(COLOURS):
        assert contrast(colours[f"s{i}"], colours["paper"]) >= 3, i


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_series_are_told_apart(mode, sight):
    """A difference of about 2 in CIE Lab can just be seen; ask for many times that."""
    seen = [lab(SIGHT[sight] @ palette(mode)[f"s{i}"]) for i in range(COLOURS)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


def test_every_method_has_a_look_of_its_own():
    """Four rows share the colour of a relative, with another marker and dashed lines."""
    assert set(FIXED) >= {"plain", "tempered", "laplace", "swag", "seed_ensemble", *BASELINES, *all_methods()}
    assert len(set(FIXED.values())) == len(FIXED)
    shared = ("tempered", "mean", "student", "seed_ensemble")
    colours = sorted(colour for name, (colour, _) in FIXED.items() if name not in shared)
    assert colours == list(range(COLOURS))
    assert all(shape != UNKNOWN_SHAPE for _, shape in FIXED.values())


def look(folder, label):
    (group,) = load_results(folder).groups
    return next(contender.look for contender in group.contenders if contender.label == label)


def test_a_method_looks_the_same_whatever_it_is_compared_with(tmp_path):
    make.tree(tmp_path / "all", seeds=1)
    make.tree(tmp_path / "two", {name: make.METHODS[name] for name in ("plain", "variance")}, seeds=1)
    one, other = look(tmp_path / "all", "variance"), look(tmp_path / "two", "variance")
    assert one.series != other.series
    assert (one.colour, one.shape, one.version) == (other.colour, other.shape, other.version)


def test_versions_keep_colour_and_marker_and_are_told_apart(tmp_path):
    for label in ("patch", "patch[crossed=true]", "patch[components=3]"):
        record = make.classification("patch", 0, make.METHODS["patch"])
        record["method"]["label"] = label
        make.write(tmp_path, record, label)
    found = [look(tmp_path, label) for label in ("patch", "patch[components=3]", "patch[crossed=true]")]
    assert {(each.colour, each.shape) for each in found} == {FIXED["patch"]}
    assert [each.version for each in found] == [0, 1, 2]
    assert [each.classes for each in found] == ["n0 s2", "n1 s2 v1", "n2 s2 v2"]


def test_an_unknown_method_looks_the_same_in_every_report_and_like_no_known_one():
    (one,), (_, other) = looks_of([("mine", "mine")]), looks_of([("rank1", "rank1"), ("mine", "mine")])
    assert (one.colour, one.shape) == (other.colour, other.shape)
    assert (one.colour, one.shape) not in FIXED.values()


def test_the_style_sheet_knows_every_look():
    style = (TEMPLATES / "report.css").read_text()
    for i in range(COLOURS):
        assert f".s{i} {{ --c: var(--s{i}); }}" in style
    many = looks_of([("patch", f"patch[components={i}]") for i in range(9)])
    for each in many:
        assert f".curve.v{each.version} " in style


def test_rows_of_one_colour_have_lines_of_their_own():
    """A student and the plain network with its temperature are both of the colour of the plain network."""
    pairs = [("plain", "plain"), ("tempered", "plain + temperature"), ("student", "student[of=rank1]")]
    assert len({(look.colour, look.version) for look in looks_of(pairs)}) == 3
