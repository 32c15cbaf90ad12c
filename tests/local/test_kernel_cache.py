"""Tests of the cache of compiled kernels under attack: engines open, and no foreign library is
loaded.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import anyio
import pytest

from atts.core import SampleRequest
from atts.errors import UnsupportedByEngine
from atts.local import LocalEngine, LocalOptions, engine
from atts.local.cpu import compiling
from atts.local.cpu.compiling import native_library
from atts.local.model_config import ModelConfig, read_model_config

Make = Callable[..., Path]
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo "$2" >> {log}
touch "$TMPDIR/ccintermediate.s"
{sleep}
cat {library} > "$2"
"""


class Builds:
    """A fake compiler that copies a prepared library into an empty cache."""

    def __init__(self, config: ModelConfig, root: Path) -> None:
        self.config = config
        self.root = root
        self.folder = root / "cache" / "atts"
        self.log = root / "log"
        self.temporary = root / "temporary"
        self.temporary.mkdir()
        self.library = shutil.copy(native_library("it", config)[0]._name, root / "prebuilt")
        self.compiler()

    def compiler(self, sleep: str = "") -> None:
        """Write the script that replaces the compiler."""
        program = self.root / "bin" / "cc"
        program.parent.mkdir(exist_ok=True)
        program.write_text(COMPILER.format(log=self.log, library=self.library, sleep=sleep))
        program.chmod(0o755)

    def load(self) -> tuple[str, str]:
        """Load the kernels, and return where they came from and the problems met while loading."""
        library, trouble = native_library("it", self.config)
        assert library.atts_row_block() > 0
        return library._name, trouble

    @property
    def count(self) -> int:
        """Count the runs of the fake compiler."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def kept(self) -> list[Path]:
        """List the libraries in the cache."""
        return sorted(self.folder.glob("*"))

    def leftovers(self) -> list[Path]:
        """List files that a finished build should have removed."""
        return [*self.temporary.iterdir(), *self.folder.glob("*build*"), *self.folder.glob(".*")]


@pytest.fixture
def builds(make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """Make an empty cache and a quick compiler."""
    made = Builds(read_model_config(make_model("llama"), "it"), tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
    engine.warn_once.cache_clear()
    return made


@pytest.mark.both
def test_kernels_are_built_once(builds: Builds) -> None:
    """A second process finds the compiled kernels in the cache, complete and owned only by this
    user.
    """
    where, trouble = builds.load()
    assert (trouble, builds.kept()) == ("", [Path(where)])
    assert Path(where).stat().st_mode & 0o777 == 0o600
    assert builds.load() == (where, "")
    assert (builds.count, builds.leftovers()) == (1, [])


def _foreign(path: Path) -> None:
    os.chown(path, 12345, -1)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere.so")
    path.symlink_to(path.parent.parent / "elsewhere.so")


def _content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        data = change(path.read_bytes())
        path.unlink()  # this process has already loaded the old file
        path.write_bytes(data)
        path.chmod(0o600)

    return apply


AS_ROOT = pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can change the owner of a file"
)
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (_content(lambda data: b""), "is damaged"),
    "truncated": (_content(lambda data: data[: len(data) // 2]), "is damaged"),
    "longer": (_content(lambda data: data + b"!"), "is damaged"),
    "one bit": (_content(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "is damaged"),
    "another library": (_content(lambda data: Path(sys.executable).read_bytes()), "is damaged"),
    "writable by the group": (lambda path: path.chmod(0o620), "can be written by others"),
    "writable by all": (lambda path: path.chmod(0o602), "can be written by others"),
    "a link": (_link, "is not a plain file"),
    "a folder": (_folder, "cannot be read"),
}


@pytest.mark.parametrize("what", [*DAMAGES, pytest.param("foreign", marks=AS_ROOT)])
def test_a_foreign_file_in_the_cache_is_replaced(what: str, builds: Builds) -> None:
    """A foreign file in the cache is replaced by a complete library, and the message names the
    file.
    """
    change, words = (_foreign, "belongs to another user") if what == "foreign" else DAMAGES[what]
    path = Path(builds.load()[0])
    change(path)
    where, trouble = builds.load()
    assert f"{path} {words}" in trouble
    assert builds.count == 2
    if what != "a folder":
        assert (where, builds.load()) == (str(path), (str(path), ""))
    assert builds.leftovers() == []


def test_a_library_removed_by_another_process_is_built_again(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a listed library is missing when it is opened, it is built again, so the kernels are still
    used.
    """
    path = Path(builds.load()[0])
    listed = Path.glob

    def glob(folder: Path, pattern: str) -> list[Path]:
        found = list(listed(folder, pattern))
        if path in found:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "glob", glob)
    assert f"{path} cannot be read" in builds.load()[1]
    assert (builds.count, path.is_file()) == (2, True)


def test_a_library_with_a_wrong_digest_is_not_loaded(builds: Builds) -> None:
    """atts does not load a library with a wrong digest, or a file with a correct digest that the
    loader refuses.
    """
    path = Path(builds.load()[0])
    data = b"not a library"
    wrong = path.with_name(f"{path.stem[:-32]}{blake2b(data, digest_size=16).hexdigest()}.so")
    path.unlink()
    wrong.write_bytes(data)
    wrong.chmod(0o600)
    assert "cannot be loaded" in builds.load()[1]
    assert builds.kept() == [path]


@pytest.mark.parametrize(
    "what", ["writable by all", "writable by the group", pytest.param("foreign", marks=AS_ROOT)]
)
def test_a_folder_others_can_write_is_neither_read_nor_written(what: str, builds: Builds) -> None:
    """If other users can write the cache folder, each process builds its own kernels and leaves no
    file behind.
    """
    path = Path(builds.load()[0])
    _content(lambda data: b"a trap")(path)
    if what == "foreign":
        _foreign(builds.folder)
    else:
        builds.folder.chmod(0o707 if what == "writable by all" else 0o770)
    for _ in range(2):
        where, trouble = builds.load()
        assert not Path(where).exists()
        assert f"the kernel cache {builds.folder} " in trouble
    assert path.read_bytes() == b"a trap"
    assert (builds.count, builds.leftovers()) == (3, [])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_kernels_run_although_the_cache_cannot_be_written(
    code: int, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cache is full, read-only or broken, the kernels run nevertheless and the problem is
    reported.
    """

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(compiling, "replace_file", refuse)
    where, trouble = builds.load()
    assert not Path(where).exists()
    assert f"{builds.folder}/kernels-" in trouble
    assert f"cannot be written ({os.strerror(code)})" in trouble
    assert builds.leftovers() == []


def test_a_file_in_place_of_the_cache_folder_is_reported(builds: Builds) -> None:
    """atts reports a file in place of the cache folder and does not overwrite the file."""
    builds.folder.parent.mkdir()
    builds.folder.write_text("mine")
    assert f"the kernel cache {builds.folder} cannot be used (File exists)" in builds.load()[1]
    assert builds.folder.read_text() == "mine"


def test_an_unusable_home_is_named(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no cache folder can be made in the home directory, the warning names the folder."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/dev/null")
    assert "the kernel cache /dev/null/.cache/atts cannot be used" in builds.load()[1]


def test_a_relative_cache_path_is_ignored(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """atts ignores a relative path to the cache, because a data folder could then supply the
    libraries.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert builds.load()[0].startswith(str(tmp_path / "home" / ".cache" / "atts"))


def test_without_a_compiler_torch_computes_with_a_warning(
    builds: Builds,
    make_model: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a compiler two engines compute with torch and give one warning with the reason.

    Kernels that the user requested by name are refused.
    """
    builds.compiler(sleep="echo 'disk full' >&2; exit 1")

    async def open_two() -> str:
        options = LocalOptions(worker="thread", kv_tokens=256)
        async with (
            LocalEngine(make_model("llama"), options=options) as one,
            LocalEngine(make_model("llama"), options=options) as two,
        ):
            await one.sample(SampleRequest((5, 6), 2))
            return f"{one.kernel} {two.kernel}"

    with caplog.at_level(logging.WARNING, "atts"):
        assert anyio.run(open_two) == "cpu cpu"
    (said,) = caplog.messages
    assert "could not be built (disk full): atts uses torch operations" in said
    with pytest.raises(UnsupportedByEngine, match="disk full"):
        builds.load()
    assert builds.leftovers() == []


def test_kernels_are_built_in_the_cache_without_a_temporary_folder(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are built inside the cache folder, and afterwards the library is its only file."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    where, _ = builds.load()
    assert builds.kept() == [Path(where)]


def test_files_of_killed_builds_are_removed(builds: Builds) -> None:
    """Old files that a killed build left behind are removed if they belong to this user. Files of a
    running build stay.
    """
    builds.folder.mkdir(parents=True)
    old = builds.folder / "atts-build-old"
    young = builds.temporary / "atts-build-young"
    for folder in (old, young):
        folder.mkdir(mode=0o700)
        (folder / "kernels.so").touch()
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    builds.load()
    assert (old.exists(), young.exists()) == (False, True)


LOAD = """
import sys, time
from pathlib import Path
from atts.local.cpu.compiling import cached_library

log, prebuilt = map(Path, sys.argv[1:])
def build(library):
    with log.open("a") as file:
        file.write("+")
    while log.stat().st_size < 3:
        time.sleep(0.01)
    library.write_bytes(prebuilt.read_bytes())

library, trouble = cached_library("key", build)
assert library.atts_row_block() > 0
print(trouble)
"""


def test_simultaneous_builds_do_not_conflict(builds: Builds) -> None:
    """If all processes finish their builds before any of them stores its library, one file remains
    and all processes work.
    """
    environment = {**os.environ, "TMPDIR": str(builds.temporary)}
    command = [sys.executable, "-c", LOAD, str(builds.log), builds.library]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    assert [(process.communicate()[0], process.returncode) for process in processes] == [
        ("\n", 0)
    ] * 3
    assert (len(builds.kept()), builds.leftovers()) == (1, [])
