"""How predictions fare when inputs get worse: corruptions, a sweep over them and its scores; adversarial attacks."""

from leanbayes.shift.attacks import Attack as Attack
from leanbayes.shift.attacks import attack as attack
from leanbayes.shift.attacks import Attacked as Attacked
from leanbayes.shift.attacks import fast_sign as fast_sign
from leanbayes.shift.attacks import fgsm as fgsm
from leanbayes.shift.attacks import Iteration as Iteration
from leanbayes.shift.attacks import pgd as pgd
from leanbayes.shift.attacks import pixel_units as pixel_units
from leanbayes.shift.attacks import Units as Units
from leanbayes.shift.corruptions import all_names as all_names
from leanbayes.shift.corruptions import corrupt as corrupt
from leanbayes.shift.corruptions import enlarge as enlarge
from leanbayes.shift.corruptions import names as names
from leanbayes.shift.scores import corrupted_means as corrupted_means
from leanbayes.shift.scores import mean_corruption_error as mean_corruption_error
from leanbayes.shift.scores import relative_mean_corruption_error as relative_mean_corruption_error
from leanbayes.shift.scores import severity_curve as severity_curve
from leanbayes.shift.sweep import Shift as Shift

__all__ = [
    "Attack",
    "Attacked",
    "Iteration",
    "Shift",
    "Units",
    "all_names",
    "attack",
    "corrupt",
    "corrupted_means",
    "enlarge",
    "fast_sign",
    "fgsm",
    "mean_corruption_error",
    "names",
    "pgd",
    "pixel_units",
    "relative_mean_corruption_error",
    "severity_curve",
]
