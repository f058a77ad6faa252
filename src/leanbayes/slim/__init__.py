"""Narrower networks out of a wide one whose channels are ordered (`lb.NestedDropout`)."""

from leanbayes.slim.correlate import correlate as correlate
from leanbayes.slim.correlate import Correlation as Correlation
from leanbayes.slim.discrepancy import mmd as mmd
from leanbayes.slim.distill import Cooling as Cooling
from leanbayes.slim.distill import distill as distill
from leanbayes.slim.narrow import extract as extract
from leanbayes.slim.narrow import narrow as narrow
from leanbayes.slim.student import student as student
from leanbayes.slim.sweep import usage as usage
from leanbayes.slim.sweep import widths as widths

__all__ = [
    "Cooling",
    "Correlation",
    "correlate",
    "distill",
    "extract",
    "mmd",
    "narrow",
    "student",
    "usage",
    "widths",
]
