"""Entry point of a Ray job: ``ray job submit -- python jobs/discover.py STUDY.yaml --out DIR``."""

import sys

from cs_localize.cli import main

sys.exit(main(["run", *sys.argv[1:]]))
