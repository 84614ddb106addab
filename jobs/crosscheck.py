"""Entry point of a Ray job: ``ray job submit -- python jobs/crosscheck.py STUDY_DIR``."""

import sys

from cs_localize.cli import main

sys.exit(main(["crosscheck", *sys.argv[1:]]))
