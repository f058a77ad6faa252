"""Metrics: pure functions on predictions and targets, grouped by task into submodules.

`__all__` lists the submodules, so that the page stays short; each name is also here, such as `lb.metrics.ece`.
Metrics return float64 scalars (0-dim tensors) on the device of their input; metrics of masks, one number per image.
Wrong input raises. A value that correct input leaves undefined, such as a ratio to a zero error, is NaN.
"""

from leanbayes.metrics import calibration, classification, generation, regression, segmentation
from leanbayes.metrics._validate import flatten as flatten
from leanbayes.metrics.calibration import adaptive_ece as adaptive_ece
from leanbayes.metrics.calibration import aurc as aurc
from leanbayes.metrics.calibration import best_joint_temperature as best_joint_temperature
from leanbayes.metrics.calibration import best_temperature as best_temperature
from leanbayes.metrics.calibration import Bin as Bin
from leanbayes.metrics.calibration import calibrated_nll as calibrated_nll
from leanbayes.metrics.calibration import classwise_ece as classwise_ece
from leanbayes.metrics.calibration import ece as ece
from leanbayes.metrics.calibration import mce as mce
from leanbayes.metrics.calibration import reliability as reliability
from leanbayes.metrics.calibration import risk_coverage as risk_coverage
from leanbayes.metrics.calibration import RiskCoverage as RiskCoverage
from leanbayes.metrics.calibration import temper as temper
from leanbayes.metrics.classification import accuracy as accuracy
from leanbayes.metrics.classification import aupr as aupr
from leanbayes.metrics.classification import auroc as auroc
from leanbayes.metrics.classification import brier as brier
from leanbayes.metrics.classification import detect as detect
from leanbayes.metrics.classification import Detection as Detection
from leanbayes.metrics.classification import disagreement as disagreement
from leanbayes.metrics.classification import doubt as doubt
from leanbayes.metrics.classification import ensemble_equivalent as ensemble_equivalent
from leanbayes.metrics.classification import Equivalent as Equivalent
from leanbayes.metrics.classification import fpr95 as fpr95
from leanbayes.metrics.classification import nll as nll
from leanbayes.metrics.classification import pairwise_disagreement as pairwise_disagreement
from leanbayes.metrics.classification import top_k_accuracy as top_k_accuracy
from leanbayes.metrics.generation import classifier_features as classifier_features
from leanbayes.metrics.generation import compare_images as compare_images
from leanbayes.metrics.generation import Diversity as Diversity
from leanbayes.metrics.generation import Features as Features
from leanbayes.metrics.generation import frechet_distance as frechet_distance
from leanbayes.metrics.generation import Generation as Generation
from leanbayes.metrics.generation import inception_features as inception_features
from leanbayes.metrics.generation import inception_score as inception_score
from leanbayes.metrics.generation import InceptionScore as InceptionScore
from leanbayes.metrics.generation import reconstruction_error as reconstruction_error
from leanbayes.metrics.generation import sample_diversity as sample_diversity
from leanbayes.metrics.generation import Seen as Seen
from leanbayes.metrics.regression import crps as crps
from leanbayes.metrics.regression import crps_gaussian as crps_gaussian
from leanbayes.metrics.regression import interval_coverage as interval_coverage
from leanbayes.metrics.regression import interval_factor as interval_factor
from leanbayes.metrics.regression import lpd as lpd
from leanbayes.metrics.regression import rmse as rmse
from leanbayes.metrics.regression import scaled_interval as scaled_interval
from leanbayes.metrics.segmentation import dice as dice
from leanbayes.metrics.segmentation import energy_distance as energy_distance
from leanbayes.metrics.segmentation import iou as iou
from leanbayes.metrics.segmentation import matched_iou as matched_iou
from leanbayes.metrics.segmentation import pixel_calibration as pixel_calibration
from leanbayes.metrics.segmentation import PixelCalibration as PixelCalibration

__all__ = [
    "calibration",
    "classification",
    "flatten",
    "generation",
    "regression",
    "segmentation",
]
