"""Tests of hostile model folders: broken templates, huge ids, false headers, pipes in place of
files.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from atts.core import Message
from atts.errors import ModelLoadError, UnsupportedByEngine
from atts.local.loader import load_weights
from atts.local.model_config import read_model_config
from atts.models import path
from atts.models.chat_templates import TemplateError, TemplateProcess
from atts.models.folders import require_template
from atts.models.tokenizers import ModelTokenizer

TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.getcwd() "
                                                      "}}",
    "{{ '{0.__class__.__init__}'.format(raise_exception) }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ 1 % 0 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ range(10 ** 12) | list }}", "{{ '%d' % 'x' }}",
    "{{ messages[7].content }}", "{{ 'x'.encode('no such') }}", "{% for %}", "{{ 10.0 ** 400 }}",
    "{{ (2 ** 70)['x'] }}", "{{ [] | first | tojson }}", "{{ nothing() }}", "{{ raise_exception('no') }}",
)  # fmt: skip


BOMBS = (
    "{{ 'x' * 10 ** 9 }}", "{{ messages[0].content * (messages | length + 10 ** 10) }}", "{{ '%999999999d' % 1 }}",
    "{{ 'x' * (messages | length + 10 ** 7) }}", "{{ 'x' | center(10 ** 10) }}", "{{ [0] * 10 ** 10 }}",
    "{{ 'x'.ljust(10 ** 10) }}",
)  # fmt: skip
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor "
    "%}",
    "{{ 3 ** (10 ** 9) }}",
)


@pytest.fixture(scope="module")
def process() -> TemplateProcess:
    """Start one child process for all templates that do not end it."""
    return TemplateProcess(0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the embedded draft, so that a test can damage it."""
    shutil.copytree(path("draft"), tmp_path / "model")
    return tmp_path / "model"


def test_a_template_that_raises_is_refused(folder: Path, process: TemplateProcess) -> None:
    """If a chat template raises any error in its sandbox, atts names the model and the template."""
    refused = 0
    tokenizer = ModelTokenizer(folder, "mine")
    tokenizer._templates = process  # pyright: ignore[reportPrivateUsage]
    for template in TEMPLATES:
        tokenizer._template = template  # pyright: ignore[reportPrivateUsage]
        try:
            tokenizer.render([Message("user", "1 + 1?")])
        except UnsupportedByEngine as error:
            refused += "the chat template rejects these messages" in str(error)
    # fewer than all templates, because an error with an empty message is not counted
    assert refused > 15


def test_a_template_that_would_take_all_memory_is_refused(
    folder: Path, process: TemplateProcess
) -> None:
    """Chat templates run in a child process with limits, so a template that would take all memory
    is refused with the folder's name.
    """
    tokenizer = ModelTokenizer(folder, "mine")
    tokenizer._templates = process  # pyright: ignore[reportPrivateUsage]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for template in BOMBS:
        tokenizer._template = template  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(UnsupportedByEngine, match=f"takes more than .* in {folder}"):
            tokenizer.render([Message("user", "1 + 1?")])
    # less than 200,000 KiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    tokenizer._template = "{% set said = messages[0].content %}{{ said }}"  # pyright: ignore[reportPrivateUsage]
    assert tokenizer.decode(tokenizer.render([Message("user", "1 + 1?")])) == "1 + 1?"


@pytest.mark.slow
@pytest.mark.parametrize("template", ENDLESS)
def test_an_endless_template_is_stopped(template: str) -> None:
    """An endless template is stopped by a limit on the child's processor time, and the next
    template gets a new child process.
    """
    process = TemplateProcess(0.5)
    rows = [{"role": "user", "content": "1"}]
    with pytest.raises(TemplateError, match="takes more than"):
        process.render(template, rows, {}, is_open=False)
    assert process.render("{% set x = 3 %}{{ x }}", rows, {}, is_open=False) == "3"


def test_a_templates_process_sees_no_secrets_and_ends_with_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child process of a template gets no keys from the environment, and ends together with its
    owner.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    owner = TemplateProcess()
    child = owner.start()
    assert b"sk-secret" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    del owner
    gc.collect()
    assert child.poll() is not None


def test_huge_token_ids_are_refused_before_allocation(folder: Path) -> None:
    """A model folder in which a token has a huge id is refused before allocation.

    A list up to this id would take gigabytes.
    """
    whole = json.loads((folder / "tokenizer.json").read_text())
    last = list(whole["model"]["vocab"])[-1]
    added = deepcopy(whole)
    learned = deepcopy(whole)
    added["added_tokens"][0]["id"] = 4_000_000_000
    learned["model"]["vocab"][last] = 3_000_000_000
    for changed in (added, learned):
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(ModelLoadError, match="cannot be read"):
            ModelTokenizer(folder, "mine")


@pytest.mark.parametrize("place", ["pipe", "endless"])
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_special_files_in_a_model_folder_are_refused(file: str, place: str, folder: Path) -> None:
    """A pipe or a link to a device in place of any file is refused by name, so reading never waits."""
    (folder / file).unlink()
    os.mkfifo(folder / file) if place == "pipe" else (folder / file).symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=file):
        read_model_config(folder, "mine")
    with pytest.raises(ModelLoadError, match=f"{file} is a device, a pipe or a socket"):
        ModelTokenizer(folder, "mine")


def _weights(changed: dict[str, Any], size: int = 0) -> bytes:
    """Return the bytes of the embedded draft's weights file, with a changed header and the given
    number of zero bytes as data.
    """
    raw = (path("draft") / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + length]) | changed).encode()
    return len(header).to_bytes(8, "little") + header + raw[8 + length :] + b"\0" * size


def _entry(shape: list[int], ends: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"model.embed_tokens.weight": {"dtype": dtype, "shape": shape, "data_offsets": ends}}


HEADERS = {
    "a length of 2^63": (1 << 63).to_bytes(8, "little") + b"{}",
    "a length past the end": (1 << 20).to_bytes(8, "little") + b"{}",
    "a header of blanks": (20_000_000).to_bytes(8, "little") + b" " * 20_000_000,
    "an end beyond the file": _weights(_entry([1 << 28, 64], [0, 1 << 36])),
    "two weights in one place": _weights(_entry([512, 32], [65_536, 131_072])),
    "a shape whose product overflows": _weights(_entry([1 << 32, 1 << 32, 1 << 32], [0, 65_536])),
    "a shape of nothing": _weights(_entry([0, 1 << 62], [0, 0])),
    "a negative shape": _weights(_entry([-1, 64], [0, 65_536])),
    "a hundred thousand weights": _weights(_entry([512, 32], [0, 65_536])
                                           | {f"w{i}": _entry([0], [0, 0])["model.embed_tokens.weight"]
                                              for i in range(100_000)}),
    "nested deeply": (100_000).to_bytes(8, "little") + b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_weights_with_a_false_header_are_refused(what: str, folder: Path) -> None:
    """No memory is allocated for contents that the header declares but the file does not have."""
    config = read_model_config(folder, "mine")
    (folder / "model.safetensors").write_bytes(HEADERS[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match=rf"{re.escape(str(folder))}|has shape"):
        load_weights(folder, config, torch.float32, torch.device("cpu"), "mine")
    # less than 400,000 KiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


@pytest.mark.parametrize("power", [40, 33])
def test_weights_larger_than_any_memory_are_refused_unread(power: int, folder: Path) -> None:
    """Weights of 8 GiB and of 1 TiB are refused before they are read.

    The sparse test files take almost no space on disk. The larger file cannot be mapped into
    memory, and the shape in the other file is wrong.
    """
    config = read_model_config(folder, "mine")
    header = json.dumps(_entry([1 << (power - 4), 4], [0, 1 << power])).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, len(header) + 8 + (1 << power))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match=r"has shape|damaged|lacks the weight"):
        load_weights(folder, config, torch.float32, torch.device("cpu"), "mine")
    # less than 200,000 KiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_folder_with_a_gguf_file_alone_is_refused_for_that_reason(tmp_path: Path) -> None:
    """A folder with only a GGUF file is refused, and the error names the two supported ways to use
    such a file. In a folder with usual weights, a GGUF file is ignored.
    """
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    for read in (require_template, read_model_config):
        with pytest.raises(ModelLoadError, match="model-q4.gguf but no config.json") as raised:
            read(tmp_path, "draft")
        assert "llamacpp:http://" in str(raised.value)
        assert "gguf_file=" in str(raised.value)
    with pytest.raises(ModelLoadError, match="atts does not load GGUF files"):
        ModelTokenizer(tmp_path, "draft")
