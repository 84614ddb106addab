"""Fails a test run that ran nothing, or that skipped a test for a reason CI does not accept."""

from __future__ import annotations

import ast
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SHARED = Path(__file__).resolve().parents[2] / "shared"
GPU = Path("/dev/nvidiactl")
ACCEPTED = {"no GPU": GPU, "no ../shared": SHARED}
"""The reasons CI accepts, alone or before a colon and details, and what must then be missing on this machine."""


class Run(NamedTuple):
    """What became of the tests of a run.

    Attributes:
        passed: how many passed.
        failed: how many failed or had an error, a file that cannot be collected among them.
        skips: each skipped test and the reason given; an expected failure is a skip.
    """

    passed: int
    failed: int
    skips: tuple[tuple[str, str], ...]


def read_run(junit: str) -> Run:
    """Reads the text of a JUnit file that pytest wrote.

    Raises:
        ValueError: if it is none, or only the beginning of one.
    """
    try:
        root = ET.fromstring(junit)
    except ET.ParseError as error:
        raise ValueError(f"not a JUnit file ({error})") from None
    passed = failed = 0
    skips: list[tuple[str, str]] = []
    for case in root.iter("testcase"):
        reasons = [reason_of(skipped) for skipped in case.findall("skipped")]
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif not reasons:
            passed += 1
        skips += [(f"{case.get('classname')}::{case.get('name')}", reason) for reason in reasons]
    return Run(passed, failed, tuple(skips))


def reason_of(skipped: ET.Element) -> str:
    """The reason given for a skip; for a module skipped as a whole it stands in the text, after file and line."""
    message, text = skipped.get("message", ""), skipped.text or ""
    if skipped.get("type") == "pytest.xfail":
        return f"expected to fail: {message}"
    if message == "collection skipped":
        try:
            _, _, message = ast.literal_eval(text)
        except (SyntaxError, TypeError, ValueError):
            return text
        return str(message).removeprefix("Skipped: ")
    return message


def accepted(reason: str) -> bool:
    """Whether CI accepts a skip: its reason is one of the two, and it is true."""
    kind, _, _ = reason.partition(":")
    return kind in ACCEPTED and not ACCEPTED[kind].exists()


def objections(run: Run) -> Sequence[str]:
    """What is wrong with a run, one line each; empty for a run that may count as green."""
    lines = [
        f"skipped for a reason CI does not accept: {name}: {reason}"
        for name, reason in run.skips
        if not accepted(reason)
    ]
    if not run.passed:
        lines.append("no test passed")
    if run.failed:
        lines.append(f"{run.failed} tests failed")
    return lines


def main(path: str) -> int:
    """Prints every skip, every objection and a closing line; returns the exit code."""
    try:
        run = read_run(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"ci: the results of the tests cannot be read: {error}", file=sys.stderr)
        return 1
    for name, reason in run.skips:
        print(f"skip: {name}: {reason}")
    wrong = objections(run)
    for line in wrong:
        print(f"ci: {line}", file=sys.stderr)
    print(f"ci: {run.passed} passed, {run.failed} failed, {len(run.skips)} skipped")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
