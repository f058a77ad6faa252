"""Run the tables and figures of the papers: specs of trainings, records of measurements, tables and charts."""

from leanbayes_papers.harness.charts import plot_curves, plot_rows
from leanbayes_papers.harness.numbers import Printed, printed
from leanbayes_papers.harness.results import Column, group, Record, Table
from leanbayes_papers.harness.run import Run, Study, Suite
from leanbayes_papers.harness.spec import Data, evenly, Trained, TrainingSpec

__all__ = ["Column", "Data", "Printed", "Record", "Run", "evenly", "group", "plot_curves", "plot_rows", "printed"]
__all__ += ["Study", "Suite", "Table", "Trained", "TrainingSpec"]
