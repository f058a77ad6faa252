"""`python -m leanbayes` is the command line."""

import sys

from leanbayes.cli import main

sys.exit(main())
