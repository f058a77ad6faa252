"""`python -m leanbayes` is the command line."""

import sys

from leanbayes.cli.main import main

sys.exit(main())
