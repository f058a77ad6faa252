"""Narrower networks cut out of a wide one whose channels are ordered (`lb.NestedDropout`)."""

from leanbayes.slim.discrepancy import mmd
from leanbayes.slim.distillation import Cooling, distill, student
from leanbayes.slim.narrowing import extract, narrow
from leanbayes.slim.sweep import correlate, Correlation, usage, widths

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
