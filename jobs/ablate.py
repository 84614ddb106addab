"""Entry point of a Ray job: ``ray job submit -- python jobs/ablate.py --model M --heads L4H2 --tasks T``."""

import sys

from cs_localize.cli import main

sys.exit(main(["ablate", *sys.argv[1:]]))
