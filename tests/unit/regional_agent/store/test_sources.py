"""The scripts and all that they require are one library, whose name tells its text."""

import shutil
from pathlib import Path

import pytest

from regional_agent.store.sources import LUA, library_in, read_library, shipped_library


def test_the_library_has_every_script_and_every_file() -> None:
    library, text = shipped_library(), shipped_library().source.decode()
    assert set(library.functions) == {path.stem for path in LUA.glob("*.lua")}
    assert text.startswith(f"#!lua name={library.name}\n")
    assert all(f"'{library.functions[name]}', '{name}'" in text for name in library.functions)
    assert all(f"files['{path.relative_to(LUA).with_suffix('').as_posix()}']" in text for path in LUA.rglob("*.lua"))


def test_a_name_has_the_release_and_a_digest_of_the_text() -> None:
    library, other = shipped_library(), shipped_library().with_text(lambda text: f"{text}local _ = 1\n")
    assert library.name != other.name
    assert library.name.rpartition("_")[0] == other.name.rpartition("_")[0]
    assert all(function.startswith(f"{other.name}_") for function in other.functions.values())
    assert other.with_text(lambda text: text.replace("local _ = 1\n", "")) == library


def test_a_comment_makes_no_other_version(tmp_path: Path) -> None:
    shutil.copytree(LUA, tmp_path / "lua")
    check = tmp_path / "lua" / "check.lua"
    check.write_text(f"-- Another word.\n{check.read_text()}")
    assert library_in(tmp_path / "lua") == shipped_library()
    check.write_text(check.read_text().replace("local POLICY,", "local _\nlocal POLICY,"))
    assert read_library(tmp_path / "lua").name != shipped_library().name


def test_a_directory_without_a_script_is_no_library(tmp_path: Path) -> None:
    shutil.copytree(LUA, tmp_path / "lua")
    (tmp_path / "lua" / "settle.lua").unlink()
    with pytest.raises(ValueError, match=r"has no settle\.lua"):
        read_library(tmp_path / "lua")


@pytest.mark.parametrize("path", [*LUA.glob("parts/*.lua"), *LUA.glob("algorithms/*.lua")], ids=lambda path: path.stem)
def test_every_part_returns_something_and_is_required(path: Path) -> None:
    name = path.relative_to(LUA).with_suffix("").as_posix()
    assert "\nreturn " in path.read_text()
    assert f"require('{name}')" in shipped_library().source.decode()
