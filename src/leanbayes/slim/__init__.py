"""Narrower networks out of a wide one whose channels are ordered (`lb.NestedDropout`)."""

from leanbayes.slim.cooling import Cooling as Cooling
from leanbayes.slim.correlate import correlate as correlate
from leanbayes.slim.correlate import Correlation as Correlation
from leanbayes.slim.narrow import extract as extract
from leanbayes.slim.narrow import narrow as narrow
from leanbayes.slim.sweep import usage as usage
from leanbayes.slim.sweep import widths as widths

__all__ = ["Cooling", "Correlation", "correlate", "extract", "narrow", "usage", "widths"]
