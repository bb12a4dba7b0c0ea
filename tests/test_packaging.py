"""The folders at the top install as one package, and none of them is forgotten."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from gemma_convert import __version__

ROOT = Path(__file__).parents[1]
TOP = ("convert", "surgery", "train", "serve")
PACKAGE = "gemma_convert"


def problems(root: Path, pyproject: dict[str, Any]) -> list[str]:
    """What is missing for every package folder to be installed and found by type checkers."""
    setuptools = pyproject["tool"]["setuptools"]
    listed, folders = setuptools["packages"], setuptools["package-dir"]
    there = {PACKAGE: f"src/{PACKAGE}"}
    for init in sorted(init for top in TOP for init in (root / top).rglob("__init__.py")):
        folder = init.parent.relative_to(root)
        there[".".join((PACKAGE, *folder.parts))] = folder.as_posix()
    found = [f"{name} is not in packages" for name in there if name not in listed]
    found += [f"{name} has no folder" for name in listed if name not in there]
    found += [
        f"package-dir of {name} is {folders.get(name)}"
        for name, folder in there.items()
        if folders.get(name) != folder
    ]
    for top in TOP:
        link = root / "src" / PACKAGE / top
        excluded = f"src/{PACKAGE}/{top}" in pyproject["tool"]["ruff"]["extend-exclude"]
        if f"{PACKAGE}.{top}" in there and not (
            link.is_symlink() and link.readlink() == Path("..", "..", top) and excluded
        ):
            found.append(f"{link} is no relative link to {top} that ruff leaves out")
    for name, folder in there.items():
        modules = [path for path in (root / folder).rglob("*.py") if path.parent == root / folder]
        if not modules:
            found.append(f"{name} holds no module")
    return found


def read_pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed() -> None:
    assert problems(ROOT, read_pyproject()) == []


def test_every_folder_with_modules_is_a_package() -> None:
    for top in TOP:
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module


def test_this_test_can_fail(tmp_path: Path) -> None:
    pyproject = read_pyproject()
    (tmp_path / "src" / PACKAGE).mkdir(parents=True)
    (tmp_path / "src" / PACKAGE / "__init__.py").touch()
    (tmp_path / "convert" / "new").mkdir(parents=True)
    for folder in ("convert", "convert/new"):
        (tmp_path / folder / "__init__.py").touch()
    found = problems(tmp_path, pyproject)
    assert "gemma_convert.convert.new is not in packages" in found
    assert "package-dir of gemma_convert.convert.new is None" in found
    assert "gemma_convert.surgery has no folder" in found
    assert any("is no relative link to convert" in text for text in found)


def test_the_version_is_one() -> None:
    assert read_pyproject()["project"]["version"] == __version__


def test_types_are_shipped() -> None:
    assert (ROOT / "src" / PACKAGE / "py.typed").is_file()
    package_data = read_pyproject()["tool"]["setuptools"]["package-data"]
    assert package_data == {PACKAGE: ["py.typed"]}
