"""Reports from result files: an HTML page, tables in Markdown, tables for the terminal."""

from leanbayes.report.load import load_results as load_results
from leanbayes.report.load import Results as Results
from leanbayes.report.page import build as build
from leanbayes.report.text import markdown as markdown
from leanbayes.report.text import terminal as terminal

__all__ = ["Results", "build", "load_results", "markdown", "terminal"]
