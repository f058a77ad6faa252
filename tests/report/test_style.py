"""The palette: visible on its background, and told apart by red- and green-blind readers."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from leanbayes.report.build import TEMPLATES
from leanbayes.report.figures.svg import COLOURS

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
