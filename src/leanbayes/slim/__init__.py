"""Narrower networks cut out of a wide one whose channels are ordered (`lb.NestedDropout`)."""

from leanbayes.slim.distillation import Cooling, distill, mmd, student
from leanbayes.slim.narrowing import correlate, Correlation, extract, narrow, usage, widths

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
