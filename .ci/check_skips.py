"""Fails a test run that ran nothing, or that skipped a test for a reason CI does not accept."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ACCEPTED = ("no GPU", "no ../shared")


def read_run(junit: str) -> tuple[int, int, dict[str, str]]:
    """Reads the text of a JUnit file that pytest wrote.

    Returns:
        How many tests passed, how many failed, and the reason of each skip by test. An expected failure is a skip.
    """
    passed = failed = 0
    skips: dict[str, str] = {}
    for case in ET.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skipped is not None:
            skips[name] = reason_of(skipped)
        else:
            passed += 1
    return passed, failed, skips


def reason_of(skipped: ET.Element) -> str:
    """The reason given for a skip; for a module skipped as a whole it stands in the text, after ``Skipped: ``."""
    message = skipped.get("message", "")
    if skipped.get("type") == "pytest.xfail":
        return f"expected to fail: {message}"
    if message == "collection skipped":
        return (skipped.text or "").partition("Skipped: ")[2].rstrip("')")
    return message


def objections(passed: int, failed: int, skips: dict[str, str]) -> list[str]:
    """What is wrong with a run, one line each; empty for a run that may count as green."""
    lines = [
        f"skipped for a reason CI does not accept: {name}: {reason}"
        for name, reason in skips.items()
        if not reason.startswith(ACCEPTED)
    ]
    if not passed:
        lines.append("no test passed")
    if failed:
        lines.append(f"{failed} tests failed")
    return lines


def main(path: str) -> int:
    """Prints every skip, every objection and a closing line; returns the exit code."""
    passed, failed, skips = read_run(Path(path).read_text(encoding="utf-8"))
    for name, reason in skips.items():
        print(f"skip: {name}: {reason}")
    wrong = objections(passed, failed, skips)
    for line in wrong:
        print(f"ci: {line}", file=sys.stderr)
    print(f"ci: {passed} passed, {failed} failed, {len(skips)} skipped")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
