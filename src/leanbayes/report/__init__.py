"""From result files to a page, a table in Markdown, a table in the terminal."""

from leanbayes.report.build import build as build
from leanbayes.report.load import load_results as load_results
from leanbayes.report.load import Results as Results
from leanbayes.report.text import markdown as markdown
from leanbayes.report.text import terminal as terminal
