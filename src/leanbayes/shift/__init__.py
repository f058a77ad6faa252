"""Distribution shift: image corruptions, a sweep over them with its scores, and adversarial attacks."""

from leanbayes.shift.attacks import Attack, attack, Attacked, fast_sign, fgsm, Iteration, pgd, pixel_units, Units
from leanbayes.shift.corruptions import all_names, corrupt, enlarge, names
from leanbayes.shift.sweep import (
    corrupted_means,
    mean_corruption_error,
    relative_mean_corruption_error,
    severity_curve,
    Shift,
)

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
