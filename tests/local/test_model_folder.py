"""Tests that a model folder is treated as data: its code is refused with a message and never
run.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from atts.cli import run
from atts.core import Message
from atts.errors import ModelLoadError, UnsupportedByEngine
from atts.local import LocalEngine, LocalOptions, model_config
from atts.models import folders, tokenizers
from atts.models.folders import find_tokenizer, refuse_code, require_template, template_of
from atts.models.tokenizers import ModelTokenizer

Make = Callable[..., Path]
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "configuration": (
        "config.json",
        {"auto_map": {"AutoConfig": "canary.Canary"}, "model_type": "canary"},
    ),
    "model": ("config.json", {"auto_map": {"AutoModelForCausalLM": "canary.Canary"}}),
    "tokenizer": (
        "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": ["canary.Canary", None]}, "tokenizer_class": "Canary"},
    ),
    "tokenizer as a list": (
        "tokenizer_config.json",
        {"auto_map": ["canary.Canary", None], "tokenizer_class": "Canary"},
    ),
    "tokenizer of a configuration": (
        "config.json",
        {"auto_map": {"AutoTokenizer": [None, "canary.Canary"]}},
    ),
    "part of a model": (
        "config.json",
        {"text_config": {"auto_map": {"AutoConfig": "canary.Canary"}}},
    ),
    "code of another repository": (
        "config.json",
        {"auto_map": {"AutoConfig": "elsewhere/model--canary.Canary"}},
    ),
    "processor": ("processor_config.json", {"auto_map": {"AutoProcessor": "canary.Canary"}}),
    "code of a type that needs none": (
        "config.json",
        {"auto_map": {"AutoConfig": "canary.Canary"}, "model_type": "phi3"},
    ),
}


@pytest.fixture
def singing(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Return a function that makes model folders whose code would write the file `sung` if any
    process ran the code.
    """
    monkeypatch.setattr(builtins, "input", lambda *_: "y")  # simulates a user who agrees

    def make(way: str) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(make_model("llama"), folder)
        file, changes = MAPS[way]
        path = folder / file
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(before | changes))
        (folder / "canary.py").write_text(
            f"open({str(tmp_path / 'sung')!r}, 'w').close()\nclass Canary: ...\n"
        )
        return folder

    return make


@pytest.mark.parametrize("way", MAPS)
def test_code_of_a_model_folder_is_refused_and_never_run(
    way: str, singing: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """atts refuses a folder that requests code, with an engine error that names the file and the
    requested code.
    """
    folder = singing(way)
    assert run(["solve", "What is 2 + 2?", "--draft", f"hf:{folder}"]) == 3
    said = " ".join(capfd.readouterr().err.split())
    assert f"auto_map in {MAPS[way][0]}: " in said
    assert "never runs code from a model folder" in said
    with pytest.raises(ModelLoadError, match="brings its own code"):
        ModelTokenizer(find_tokenizer(str(folder), "server"), "server")
    assert not (tmp_path / "sung").exists()


@pytest.mark.parametrize("way", MAPS)
def test_code_is_not_run_even_if_the_refusal_is_missing(
    way: str, singing: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without this refusal no code of the folder runs, because atts forbids libraries to run
    code or to ask the user.
    """
    folder = singing(way)
    for module in (tokenizers, model_config, folders):
        monkeypatch.setattr(module, "refuse_code", lambda *_: None)
    for load in (
        lambda: model_config.read_hf_config(folder, "it"),
        lambda: ModelTokenizer(folder, "it"),
    ):
        with suppress(ModelLoadError):
            load()
    assert not (tmp_path / "sung").exists()


@pytest.mark.parametrize(
    "file", ["modeling_llama.py", "configuration_my.py", "tokenization_my_fast.py"]
)
def test_code_files_are_refused_without_an_auto_map(
    file: str, make_model: Make, tmp_path: Path
) -> None:
    """A folder with Python code of a model is refused even without an auto_map, because the code may
    define an architecture other than the configured one.

    Other Python files are accepted.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    (folder / "train.py").touch()
    refuse_code(folder, "it")
    (folder / file).touch()
    with pytest.raises(ModelLoadError, match=file.replace(".", r"\.")):
        refuse_code(folder, "it")


def test_copies_of_transformers_code_are_ignored(make_model: Make, tmp_path: Path) -> None:
    """A model folder may contain a copy of transformers' own code, as Phi-3's folders do. atts
    ignores this copy.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    entries = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o"}
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3", "auto_map": entries}))
    (folder / "modeling_phi3.py").touch()
    refuse_code(folder, "it")


class Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.safetensors"])
def test_pickled_weights_are_never_opened(file: str, make_model: Make, tmp_path: Path) -> None:
    """Pickled weights are refused even if they are named as safetensors, and the message says what
    pickles can do.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(pickle.dumps(Canary(str(tmp_path / "sung"))))
    words = "are damaged" if file.endswith("safetensors") else f"{file} may be pickled"
    with pytest.raises(ModelLoadError, match=words):
        anyio.run(enter, folder)
    assert not (tmp_path / "sung").exists()


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "", 5, None])
def test_an_index_may_list_only_files_of_its_folder(
    shard: object, make_model: Make, tmp_path: Path
) -> None:
    """An index that lists a file outside the model's folder is refused."""
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"norm.weight": shard}})
    )
    with pytest.raises(ModelLoadError, match="weight_map lists no files"):
        anyio.run(enter, folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", "[]"),
        ("config.json", '{"auto_map": ' + '{"a": ' * 900 + "1" + "}" * 901),
        ("config.json", "\ud800"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "5"),
        ("generation_config.json", "[" * 100_000),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
        ("generation_config.json", '{"eos_token_id": ["a"]}'),
        ("generation_config.json", '{"eos_token_id": true}'),
        ("generation_config.json", '{"eos_token_id": -1}'),
    ],
)
def test_json_files_that_are_not_objects_are_refused(
    file: str, content: str, make_model: Make, tmp_path: Path
) -> None:
    """If a JSON file of a model folder contains anything but an object, the error names the file,
    however deeply the value is nested.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    (folder / file).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelLoadError, match=r"generation_config|eos_token_id|config\.json"):
        anyio.run(enter, folder)


def test_a_file_too_long_to_be_text_is_not_read(make_model: Make, tmp_path: Path) -> None:
    """atts checks a file's size against the limit before it reads any of the file."""
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    os.truncate(folder / "config.json", 1 << 40)
    with pytest.raises(ModelLoadError, match="longer than 64 MB"):
        anyio.run(enter, folder)


@pytest.mark.parametrize("how", ["none", "empty", "null"])
def test_a_missing_chat_template_is_refused_before_anything_is_loaded(
    how: str,
    make_model: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If the draft or the target has no chat template, atts refuses it before it reads the draft's
    damaged weights.
    """
    draft, target = (
        shutil.copytree(make_model("llama"), tmp_path / role) for role in ("draft", "target")
    )
    os.truncate(draft / "model.safetensors", 100)
    (target / "chat_template.jinja").unlink()
    if how == "empty":
        (target / "chat_template.jinja").touch()
    if how == "null":
        path = target / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": None}))
    assert (
        run(["solve", "What is 2 + 2?", "--draft", f"hf:{draft}", "--target", f"hf:{target}"]) == 3
    )
    said = " ".join(capfd.readouterr().err.split())
    assert "engine target: the tokenizer in" in said
    assert "has no chat template. Use the model's instruct version" in said
    monkeypatch.setattr("atts.local.engine.find_folder", lambda *_: target)
    with pytest.raises(UnsupportedByEngine, match="no chat template"):
        anyio.run(LocalEngine("owner/name", chat=True).__aenter__)
    anyio.run(enter, target)  # a command that renders no prompt needs no template


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_found_wherever_tokenizers_keep_it(
    file: str, make_model: Make, tmp_path: Path
) -> None:
    """The chat template is found in a separate file and in the tokenizer's configuration."""
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    if file == "tokenizer_config.json":
        template = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").unlink()
        (folder / file).write_text(
            json.dumps(json.loads((folder / file).read_text()) | {"chat_template": template})
        )
    require_template(folder, "it")
    assert ModelTokenizer(folder, "it").render([Message("user", "the step")])


def test_a_chat_template_that_cannot_be_read_is_refused(make_model: Make, tmp_path: Path) -> None:
    """A chat template that is not UTF-8 is refused with a message that names its file. atts does
    not use another template instead.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    path = folder / "chat_template.jinja"
    path.write_bytes(path.read_bytes() + b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template.jinja cannot be read .*utf-8"):
        ModelTokenizer(folder, "it")
    assert template_of(folder) is None


async def enter(folder: Path) -> None:
    """Open an engine in a thread, on torch."""
    torch.set_num_threads(1)
    async with LocalEngine(folder, options=LocalOptions(worker="thread", kernel="torch")):
        pass
