"""docs/study.md, the page of all options of a study."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path

from cs_localize.config import dump_study, parse_study
from cs_localize.options import read_options

DOCS = Path(__file__).parent.parent / "docs"


def paths(options: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Every option of a study as --set names it; what users name themselves is one option."""
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_the_page_is_what_the_classes_say() -> None:
    page = runpy.run_path(str(DOCS / "options.py"))["page"]()

    assert (DOCS / "study.md").read_text(encoding="utf-8") == page, "run python docs/options.py"


def test_every_option_that_a_study_writes_down_is_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(dump_study(parse_study({"model": "m", "tasks": ["a"]})), encoding="utf-8")
    written = read_options(tmp_path / "study.yaml")
    page = (DOCS / "study.md").read_text(encoding="utf-8")

    assert isinstance(written, dict)
    found = list(paths(written))
    assert len(found) > 70
    assert [path for path in found if f"| `{path}` |" not in page] == []
