"""Writes the golden files anew after an intended change: ``python -m tests.confirm.regenerate``."""

from __future__ import annotations

from pathlib import Path

from cs_localize.findings import write_file
from tests.confirm.builders import crosschecked, with_pairs

GOLDEN = Path(__file__).parent / "golden"

if __name__ == "__main__":
    write_file(GOLDEN / "confirm.json", with_pairs())
    write_file(GOLDEN / "crosscheck.json", crosschecked())
