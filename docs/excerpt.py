"""Puts a finished demo's closing lines and heat map into the README and prints how long the demo took.

python docs/excerpt.py runs/demo
"""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from pathlib import Path

from cs_localize.folder import load_result
from cs_localize.report import heatmap_svg, summary_lines

ROOT = Path(__file__).parent.parent


def main(study: Path) -> None:
    """Rewrites the marked block of the README and docs/heatmap.svg."""
    result = load_result(study)
    lines = [*summary_lines(result.heads, result.confirm, result.crosscheck), "", f"report: {result.report}"]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    block = "\n".join(line.rstrip() for line in lines)
    text, found = re.subn(r"(?<=```text\n).*?(?=```\n<!-- /demo -->)", lambda _: f"{block}\n", text, flags=re.DOTALL)
    if found != 1:
        raise SystemExit("README.md has no block between '<!-- demo' and '<!-- /demo -->'")
    readme.write_text(text, encoding="utf-8")
    (ROOT / "docs" / "heatmap.svg").write_text(heatmap_svg(result.heads, "antonyms"), encoding="utf-8")
    events = (study / "events.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = (datetime.fromisoformat(json.loads(line)["time"]) for line in (events[0], events[-1]))
    print(f"from its first event to its last: {(last - first).total_seconds():.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
