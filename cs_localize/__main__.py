"""``python -m cs_localize``."""

import sys

from cs_localize.cli import main

sys.exit(main())
