"""Run the tables and figures of the papers: specs of trainings, records of measurements, tables and charts."""

from leanbayes_papers.harness.charts import plot_curves as plot_curves
from leanbayes_papers.harness.charts import plot_rows as plot_rows
from leanbayes_papers.harness.numbers import Printed as Printed
from leanbayes_papers.harness.numbers import printed as printed
from leanbayes_papers.harness.results import Column as Column
from leanbayes_papers.harness.results import group as group
from leanbayes_papers.harness.results import Record as Record
from leanbayes_papers.harness.results import Table as Table
from leanbayes_papers.harness.run import Run as Run
from leanbayes_papers.harness.run import Study as Study
from leanbayes_papers.harness.run import Suite as Suite
from leanbayes_papers.harness.spec import Data as Data
from leanbayes_papers.harness.spec import evenly as evenly
from leanbayes_papers.harness.spec import Trained as Trained
from leanbayes_papers.harness.spec import TrainingSpec as TrainingSpec
