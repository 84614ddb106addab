from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from cs_localize.errors import UsageError
from cs_localize.submit import package as packages
from cs_localize.submit.package import pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {
        "study.yaml": 10,
        "task.py": 20,
        "runs/demo/ledger/part.parquet": 3000,
        "runs/demo/heads.json": 5,
        "weights/model.bin": 2000,
        "data/a.csv": 600,
        "data/b.csv": 400,
        "ignored/big.bin": 9000,
    }.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "folder" / ".gitignore").write_text("ignored/\n", encoding="utf-8")
    (tmp_path / "folder" / "data" / ".rayignore").write_text("b.csv\n", encoding="utf-8")
    return tmp_path / "folder"


def test_what_is_weighed_is_what_ray_packs(folder: Path, tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package

    package = pack(folder, ["weights"])
    create_package(str(folder), tmp_path / "package.zip", include_gitignore=True, excludes=["weights"])

    with ZipFile(tmp_path / "package.zip") as archive:
        assert {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()} == {
            str(path): size for path, size in package.sizes.items()
        }
    assert package.size == (tmp_path / "package.zip").stat().st_size


def test_a_folder_that_is_too_large_is_refused_with_its_three_largest_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "LARGEST", 4000)

    with pytest.raises(UsageError, match="--exclude") as refused:
        pack(folder)

    largest = str(refused.value).partition("the largest: ")[2]
    assert [part.split(" (")[0] for part in largest.split(", ")] == [
        "runs/demo/ledger/part.parquet",
        "weights/model.bin",
        "data/a.csv",
    ]
    assert pack(folder, ["runs"]).size < 4000
