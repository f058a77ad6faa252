"""How predictions fare when images get worse: corruptions, a sweep over them, and its scores."""

from leanbayes.shift.corruptions import all_names as all_names
from leanbayes.shift.corruptions import corrupt as corrupt
from leanbayes.shift.corruptions import enlarge as enlarge
from leanbayes.shift.corruptions import names as names
from leanbayes.shift.scores import corrupted_means as corrupted_means
from leanbayes.shift.scores import mce as mce
from leanbayes.shift.scores import relative_mce as relative_mce
from leanbayes.shift.scores import severity_curve as severity_curve
from leanbayes.shift.sweep import Shift as Shift

__all__ = [
    "Shift",
    "all_names",
    "corrupt",
    "corrupted_means",
    "enlarge",
    "mce",
    "names",
    "relative_mce",
    "severity_curve",
]
