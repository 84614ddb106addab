"""Entry point of a Ray job: ``ray job submit -- python jobs/sweep.py GRID.yaml --out DIR``."""

import sys

from cs_localize.cli import main

sys.exit(main(["sweep", *sys.argv[1:]]))
