from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Runs before any import of the package: a finder that knows no module of the given names.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Block())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([str(tool), "--no-logo", "--no-cache"], cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and its contracts, to break."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "cs_localize", tmp_path / "cs_localize", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_import_respects_the_order_of_the_rooms() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("design/intruder.py", "from cs_localize.recover import make_solver", "A room imports only from the rooms"),
        ("heads.py", "from cs_localize.outcomes import Item", "A room imports only from the rooms"),
        ("a_room_nobody_declared.py", "", "A room imports only from the rooms"),
        ("recover/intruder.py", "def late() -> None:\n    import torch", "The core needs no torch"),
        ("outcomes.py", "import ray", "The core needs no torch"),
        ("measure/intruder.py", "import jobs.discover", "Jobs call the library"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tree: Path, module: str, line: str, contract: str) -> None:
    with (tree / "cs_localize" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tree)
    broken = [name for name in done.stdout.splitlines() if " BROKEN" in name]
    assert done.returncode == 1, done.stdout + done.stderr
    assert [name.startswith(contract) for name in broken] == [True], done.stdout


def test_importing_the_package_loads_neither_torch_nor_vllm_nor_ray() -> None:
    heavy = ("torch", "vllm", "ray", "transformers")
    done = python(f"import cs_localize, sys; print([name for name in {heavy} if name in sys.modules])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_core_rooms_import_where_only_the_core_is_installed() -> None:
    names = {"torch", "vllm", "ray", "transformers", "tokenizers", "safetensors", "gguf", "pyarrow", "jinja2", "rich"}
    rooms = ("cs_localize", "cs_localize.heads", "cs_localize.outcomes", "cs_localize.design", "cs_localize.recover")
    done = python(BLOCK.format(names=names) + f"import {', '.join(rooms)}")
    assert done.returncode == 0, done.stderr


def test_the_block_of_the_test_above_does_block() -> None:
    done = python(BLOCK.format(names={"pyarrow"}) + "import pyarrow")
    assert "blocked: pyarrow" in done.stderr
