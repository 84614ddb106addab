from __future__ import annotations

from pathlib import Path, PurePath
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


@pytest.mark.parametrize(("link", "target"), [("data/up", ".."), ("data/up", "."), ("a/up", "../b"), ("up", "..")])
def test_a_link_that_leads_back_is_refused_by_name_unless_it_stays_here(
    link: str, target: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    (folder / "b" / "beyond").symlink_to("../a")
    (folder / link).symlink_to(target)
    with pytest.raises(UsageError, match=r"^--working-dir .*folder: the link \S+ points to a folder that holds it; "):
        pack(folder)
    assert caplog.messages == []
    assert pack(folder, ["up"]).sizes
    (folder / ".gitignore").write_text("ignored/\nup\n", encoding="utf-8")
    assert pack(folder).sizes


def test_links_to_files_and_folders_that_do_not_hold_them_travel_as_what_they_point_to(folder: Path) -> None:
    (folder / "weights" / "more").symlink_to("../data")
    (folder / "weights" / "same.bin").symlink_to("model.bin")
    (folder / "weights" / "gone").symlink_to("nowhere")
    (folder / "weights" / "itself").symlink_to("itself")
    below = {path for path in pack(folder).sizes if path.parts[0] == "weights"}
    assert below == {PurePath("weights", name) for name in ("model.bin", "same.bin", "more/a.csv", "more/.rayignore")}
