"""Tests of the zoo's directory: exported models are unchanged, equal blocks are stored once, and
nothing is lost.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atts.accel import SharedPart, Zoo
from atts.errors import ATTSError, ModelLoadError, OptionError, StorageError, ZooError
from atts.local.model_config import FAMILIES
from tests.local.test_families import CASES

from .conftest import Tune, contents

Make = Callable[..., Path]


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    """Return the path of a zoo that does not exist yet."""
    return Zoo(tmp_path / "zoo")


def blocks_of(zoo: Zoo) -> dict[str, str]:
    """Return the digests of the block files of a zoo."""
    return contents(zoo.directory / "blocks")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[] if f in ("llama", "phi3", "gemma2") else [pytest.mark.slow])
        for f in FAMILIES
    ],
)
def test_export_returns_every_model_byte_for_byte(
    family: str, zoo: Zoo, make_model: Make, tmp_path: Path
) -> None:
    """The exported folder of each architecture equals the added folder byte for byte, whether the
    zoo stores it whole or cut into blocks; equal models are stored once.
    """
    changes = next((changes for kind, changes in CASES.values() if kind == family), {})
    folder = make_model(family, **changes)
    assert zoo.add("first", folder).is_whole
    zoo.export("first", tmp_path / "whole")
    assert contents(tmp_path / "whole") == contents(folder)
    assert not zoo.add("second", folder).is_whole
    for name in ("first", "second"):
        zoo.export(name, tmp_path / name)
        assert contents(tmp_path / name) == contents(folder)
    found = zoo.show()
    assert len(blocks_of(zoo)) == found.blocks == 2 * 3 + 2
    assert [part.models for part in found.tree] == [("first", "second")]
    assert zoo.damage() == []


def test_a_changed_bit_adds_one_block(zoo: Zoo, base: Path, tune: Tune) -> None:
    """A model that differs in the lowest bit of one number has one block of its own, wherever that
    number is.
    """
    known = zoo.add("base", base).digests
    rng = random.Random(1)
    path = base / "model.safetensors"
    names = sorted(load_file(path))
    for number, name in enumerate(rng.sample(names, 4)):
        folder = tune(f"bit{number}")
        tensors = load_file(folder / "model.safetensors")
        flat = tensors[name].view(torch.int32).flatten()
        flat[rng.randrange(len(flat))] ^= 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model = zoo.add(f"bit{number}", folder)
        assert [block.place for block in model.blocks if block.digest not in known] == [
            _place(name)
        ]


def _place(tensor: str) -> str:
    """Return the block that contains a tensor of a Llama model."""
    known = {
        "model.embed_tokens.weight": "embedding",
        "model.norm.weight": "head",
        "lm_head.weight": "head",
    }
    if tensor in known:
        return known[tensor]
    _, _, layer, part, *_ = tensor.split(".")
    return f"layers.{layer}.{'attention' if part in ('self_attn', 'input_layernorm') else 'mlp'}"


def test_exchanged_layers_are_stored_once(zoo: Zoo, base: Path, tune: Tune, tmp_path: Path) -> None:
    """A model with two layers exchanged shares all blocks with the original, and its export has the
    layers exchanged.
    """
    folder = tune("swapped")
    tensors = load_file(folder / "model.safetensors")
    places = {"layers.0.": "layers.2.", "layers.2.": "layers.0."}
    swapped = dict[str, Any]()
    for name, tensor in tensors.items():
        found = next((old for old in places if old in name), None)
        swapped[name.replace(found, places[found]) if found else name] = tensor
    save_file(swapped, folder / "model.safetensors", metadata={"format": "pt"})
    assert zoo.add("base", base).digests == zoo.add("swapped", folder).digests
    zoo.export("swapped", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)


def test_a_model_is_cut_only_when_another_shares_a_part(
    zoo: Zoo, base: Path, make_model: Make, tune: Tune
) -> None:
    """Adding an unrelated model leaves the stored models as they are. Adding a related model
    divides only those models into blocks with which it shares blocks.
    """
    zoo.add("base", base)
    zoo.add("stranger", make_model("llama", seed=5))
    assert blocks_of(zoo) == {}
    zoo.add("tuned", tune("tuned", "layers.2.", "norm.weight", "lm_head"))
    lines = {model.name: model for model in zoo.show().models}
    assert {name: line.is_whole for name, line in lines.items()} == {
        "base": False,
        "stranger": True,
        "tuned": False,
    }
    assert not (zoo.directory / "models/base/model.safetensors").exists()
    shared = {place for place, count in lines["tuned"].parts.items() if count == 2}
    assert "embedding" in shared
    assert {"layers.2.mlp", "layers.2.attention", "head"} & shared == set()


def test_removing_a_model_deletes_only_unshared_blocks(
    zoo: Zoo, base: Path, tune: Tune, tmp_path: Path
) -> None:
    """Models can be removed in any order; exports of the other models are unchanged, and every
    remaining block belongs to a model.
    """
    folders = {
        "base": base,
        "tail": tune("tail", "layers.2."),
        "head": tune("head", "lm_head"),
        "other": tune("other"),
    }
    for name, folder in folders.items():
        zoo.add(name, folder)
    names = sorted(folders)
    random.Random(2).shuffle(names)
    while names:
        assert zoo.remove(names.pop()) > 0
        for name in names:
            out = tmp_path / f"{name}-{len(names)}"
            zoo.export(name, out)
            assert contents(out) == contents(folders[name])
    assert blocks_of(zoo) == {}
    assert zoo.show().models == ()


def flat(parts: Iterable[SharedPart]) -> Iterator[SharedPart]:
    """Yield each part of a tree of shared blocks, followed by the parts below it.

    A part below is shared by fewer models than the part above it.
    """
    for part in parts:
        assert all(set(lower.models) < set(part.models) for lower in part.below)
        yield part
        yield from flat(part.below)


def test_reported_bytes_are_those_on_disk(zoo: Zoo, base: Path, tune: Tune) -> None:
    """The zoo reports its bytes on disk: four related models take little more space than one, and
    the tree lists every block once.
    """
    for name, words in {
        "a": ["lm_head"],
        "b": ["layers.2.mlp"],
        "c": [],
        "d": ["layers.2.mlp"],
    }.items():
        zoo.add(name, tune(name, *words))
    found = zoo.show()
    assert found.apart == sum(
        path.stat().st_size for name in "abcd" for path in (zoo.directory.parent / name).iterdir()
    )
    assert found.stored == sum(
        path.stat().st_size for path in zoo.directory.rglob("*") if path.is_file()
    )
    assert found.saved > 0.4
    (root,) = found.tree
    assert root.models == ("a", "b", "c", "d")
    assert {part.models: part.places for part in flat(root.below)} == {
        ("a",): ("head",), ("a", "c"): ("layers.2.mlp",), ("b", "c", "d"): ("head",), ("b", "d"): ("layers.2.mlp",)
    }  # fmt: skip


def damaged(zoo: Zoo, name: str, other: str) -> str:
    """Change a byte of a block that only one of the models has, and return the block's name."""
    manifest = {
        who: json.loads((zoo.directory / "models" / who / "blocks.json").read_text())
        for who in (name, other)
    }
    theirs = {block["digest"] for block in manifest[other]["blocks"]}
    digest = next(
        block["digest"] for block in manifest[name]["blocks"] if block["digest"] not in theirs
    )
    path = zoo.directory / "blocks" / f"{digest}.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    return str(digest)


def test_a_damaged_block_is_named_and_stops_only_its_models(
    zoo: Zoo, base: Path, tune: Tune, tmp_path: Path
) -> None:
    """Export and check name a damaged block, models without the block still work, and adding the
    damaged model again repairs the block.
    """
    folder = tune("tuned", "layers.1.mlp")
    zoo.add("base", base)
    zoo.add("tuned", folder)
    digest = damaged(zoo, "tuned", "base")
    with pytest.raises(ZooError, match=f"{digest}.*layers.1.mlp.*'tuned' is damaged"):
        zoo.export("tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (said,) = zoo.damage()
    assert digest in said
    zoo.export("base", tmp_path / "base")
    assert contents(tmp_path / "base") == contents(base)
    zoo.add("again", folder)
    assert zoo.damage() == []


def test_a_damaged_manifest_deletes_no_block(zoo: Zoo, base: Path, tune: Tune) -> None:
    """The error for a damaged manifest names the model, and the zoo keeps blocks that may belong to
    this model until the model is removed.
    """
    zoo.add("base", base)
    zoo.add("tuned", tune("tuned", "lm_head"))
    before = blocks_of(zoo)
    manifest = zoo.directory / "models/tuned/blocks.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-30])
    zoo.remove("base")
    assert blocks_of(zoo) == before
    assert "blocks.json is damaged" in zoo.damage()[0]
    manifest.write_bytes(whole)
    assert zoo.damage() == []
    zoo.remove("tuned")
    assert blocks_of(zoo) == {}


def broken(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change a model's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def torn(folder: Path, size: int | None) -> Path:
    """Truncate a model's weights to `size` bytes, or remove the weights if `size` is None."""
    path = folder / "model.safetensors"
    path.unlink() if size is None else os.truncate(path, size)
    return folder


def newer(zoo: Zoo) -> None:
    """Mark the zoo as written by a later version."""
    (zoo.directory / "zoo.json").write_text('{"schema": 7}')


LAST = "model.layers.2.mlp.up_proj.weight"
BAD: dict[str, tuple[Callable[[Tune], Path], str, type[ATTSError]]] = {
    "missing tensor": (lambda tune: broken(tune("m"), lambda t: t.pop(LAST)), "lacks the weight", ModelLoadError),
    "other shape": (
        lambda tune: broken(tune("m"), lambda t: t.update({LAST: t[LAST][:-1].clone()})), "has shape", ModelLoadError
    ),
    "other layers": (lambda tune: tune("m", num_hidden_layers=4), "lacks the weight 'layers.3", ModelLoadError),
    "other tokenizer": (lambda tune: tune("m", vocab_size=250), "the tokenizer has ids up to", ModelLoadError),
    "other family": (lambda tune: tune("m", model_type="mamba"), "'mamba' are not supported", ModelLoadError),
    "quantised": (
        lambda tune: broken(tune("m"), lambda t: t.update({LAST: t[LAST].to(torch.int8)})), "type .*8", ModelLoadError
    ),
    "torn file": (lambda tune: torn(tune("m"), 5000), "damaged", ModelLoadError),
    "empty file": (lambda tune: torn(tune("m"), 0), "damaged", ModelLoadError),
    "no weights": (lambda tune: torn(tune("m"), None), "no safetensors", ModelLoadError),
    "no folder": (lambda tune: Path("nowhere"), "nowhere is not a folder", OptionError),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_is_not_a_model_is_refused(
    case: str, zoo: Zoo, tune: Tune, base: Path
) -> None:
    """A folder that is not a model is refused with a message, without a traceback, and the zoo is
    unchanged.
    """
    make, says, kind = BAD[case]
    folder = make(tune)
    zoo.add("base", base)
    before = contents(zoo.directory)
    with pytest.raises(kind, match=says):
        zoo.add("bad", folder)
    assert contents(zoo.directory) == before


def test_a_newer_zoo_and_a_foreign_folder_are_refused(zoo: Zoo, base: Path, tmp_path: Path) -> None:
    """A zoo of a later version is neither read nor changed, and a folder with other files does not
    become a zoo.
    """
    zoo.add("base", base)
    newer(zoo)
    before = contents(zoo.directory)
    for ask in (
        zoo.show,
        zoo.names,
        lambda: zoo.add("x", base),
        lambda: zoo.remove("base"),
        lambda: zoo.folder("base"),
    ):
        with pytest.raises(ZooError, match="newer version of atts"):
            ask()
    assert contents(zoo.directory) == before
    with pytest.raises(ZooError, match="contains other files"):
        Zoo(base).add("x", base)
    with pytest.raises(ZooError, match="the directory is not a zoo"):
        Zoo(tmp_path / "none").show()


def test_a_disk_full_at_any_write_loses_nothing(
    zoo: Zoo, base: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any write to a zoo fails, the zoo reports the failure, keeps its contents, and accepts the
    model once the disk has space.
    """
    tuned = tune("tuned", "lm_head")
    zoo.add("base", base)
    calls = [0]
    real = os.fsync

    def failing(handle: int) -> None:
        calls[0] -= 1
        if calls[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    for room in (0, 1, 2, 5, 9, 13, 17, 21, 25, 29, 99):
        calls[0] = room
        monkeypatch.setattr(os, "fsync", failing)
        try:
            zoo.add("tuned", tuned)
        except StorageError as error:
            said = str(error)
        else:
            break
        finally:
            monkeypatch.setattr(os, "fsync", real)
        assert "No space left" in said
        # the model was stored before the failure; only the name of its folder was not yet synced
        if "tuned" in zoo.names():
            zoo.remove("tuned")
        assert zoo.names() == ["base"]
        assert zoo.damage() == []
    assert room > 9
    assert zoo.names() == ["base", "tuned"]
    assert zoo.damage() == []


KILLED = """
import os, signal, sys
from pathlib import Path
from atts.accel import SharedPart, Zoo
left = int(sys.argv[1])
def count(event, args):
    global left
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(args[0]).startswith(sys.argv[2]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
zoo = Zoo(Path(sys.argv[2]))
sys.addaudithook(count)
eval(sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    ["zoo.add('tuned', Path(sys.argv[4]))", "zoo.remove('tail')", "zoo.remove('base')"],
    ids=["add", "tail", "base"],
)
def test_a_kill_at_any_moment_loses_nothing(
    order: str, zoo: Zoo, base: Path, tune: Tune, tmp_path: Path
) -> None:
    """After SIGKILL between any two file changes a model is present as a whole or not at all, and
    the next change cleans up.
    """
    tail = tune("tail", "layers.2.")
    tuned = tune("tuned", "lm_head")
    folders = {"base": base, "tail": tail, "tuned": tuned, "last": base}
    was_killed = 0
    is_over = False
    for moment in range(0, 200, 6):
        shutil.rmtree(zoo.directory, ignore_errors=True)
        zoo.add("base", base)
        if "add" not in order:
            zoo.add("tail", tail)
        words = [sys.executable, "-c", KILLED, str(moment), str(zoo.directory), order, str(tuned)]
        done = subprocess.run(words, check=False)
        assert done.returncode in (0, -signal.SIGKILL)
        was_killed += done.returncode != 0
        left = set(zoo.names())
        assert {"base", "tail", "tuned"} >= left
        assert zoo.damage() == []
        zoo.add("last", base)
        for name in zoo.names():
            zoo.export(name, tmp_path / f"{moment}-{name}")
            assert contents(tmp_path / f"{moment}-{name}") == contents(folders[name])
        assert set(zoo.names()) == {*left, "last"}
        for name in zoo.names():
            zoo.remove(name)
        assert blocks_of(zoo) == {}
        is_over = not done.returncode
        if is_over:
            break
    assert is_over
    assert was_killed > 3


ADDED = """
import sys
from pathlib import Path
from atts.accel import Zoo
Zoo(Path(sys.argv[1])).add(sys.argv[2], Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_several_processes_can_add_models(zoo: Zoo, tune: Tune, tmp_path: Path) -> None:
    """If several processes add models, each process waits for its turn and succeeds, and shared
    blocks are stored once.
    """
    folders = {
        name: tune(name, word)
        for name, word in {"a": "lm_head", "b": "layers.0.", "c": "layers.2."}.items()
    }
    running = [
        subprocess.Popen([sys.executable, "-c", ADDED, str(zoo.directory), name, str(folder)])
        for name, folder in folders.items()
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert zoo.names() == ["a", "b", "c"]
    assert zoo.damage() == []
    for name, folder in folders.items():
        zoo.export(name, tmp_path / f"out-{name}")
        assert contents(tmp_path / f"out-{name}") == contents(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a b", "x" * 101, "ü"])
def test_model_names_cannot_leave_the_zoo(name: str, zoo: Zoo, base: Path) -> None:
    """A model name with a path in it is refused, because it could lead out of the zoo."""
    with pytest.raises(OptionError, match="is not a valid model name"):
        zoo.add(name, base)


def test_a_manifest_with_foreign_paths_is_damaged(
    zoo: Zoo, base: Path, tune: Tune, tmp_path: Path
) -> None:
    """Digests and file names of a manifest must have the expected form; if not, the manifest counts
    as damaged.
    """
    zoo.add("base", base)
    path = zoo.directory / "models/base/blocks.json"
    whole = path.read_text()
    said = json.loads(whole)
    for change in (
        {"digest": "../../../etc/passwd"},
        {"digest": said["blocks"][0]["digest"].upper()},
    ):
        said["blocks"][0] |= change
        path.write_text(json.dumps(said))
        with pytest.raises(ZooError, match="is damaged"):
            zoo.export("base", tmp_path / "out")
    said = json.loads(whole)
    said["files"][0]["name"] = "../out.safetensors"
    path.write_text(json.dumps(said))
    with pytest.raises(ZooError, match="is damaged"):
        zoo.export("base", tmp_path / "out")


def test_an_export_follows_no_link_out_of_the_zoo(
    zoo: Zoo, make_model: Make, tmp_path: Path
) -> None:
    """A block that is a link to a file outside the zoo is not copied; the export is refused and
    leaves nothing behind.
    """
    secret = tmp_path / "secret.txt"
    secret.write_text("mine")
    name = "first"
    zoo.add(name, make_model("llama"))
    (zoo.folder(name) / "notes.txt").symlink_to(secret)
    with pytest.raises(ZooError, match="notes.txt is a symbolic link to a file outside"):
        zoo.export(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
