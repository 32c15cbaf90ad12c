"""Hostile model folders: templates that break, ids that would take all memory, pipes in the place of files."""

from __future__ import annotations

import json
import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from atts.core import Message
from atts.errors import ModelLoadError, UnsupportedByEngine
from atts.local.model_config import read_model_config
from atts.models import path
from atts.tokenizing import ModelTokenizer

TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.getcwd() }}",
    "{{ '{0.__class__.__init__}'.format(raise_exception) }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ 1 % 0 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ range(10 ** 12) | list }}", "{{ '%d' % 'x' }}",
    "{{ messages[7].content }}", "{{ 'x'.encode('no such') }}", "{% for %}", "{{ 10.0 ** 400 }}",
    "{{ (2 ** 70)['x'] }}", "{{ [] | first | tojson }}", "{{ nothing() }}", "{{ raise_exception('no') }}",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded draft, to be spoilt."""
    shutil.copytree(path("draft"), tmp_path / "model")
    return tmp_path / "model"


def test_a_template_that_breaks_is_refused_in_words(folder: Path) -> None:
    """A template is a program in a sandbox: whatever it raises, the model is said to be unable, and nothing else."""
    refused, tokenizer = 0, ModelTokenizer(folder, "mine")
    inner: Any = tokenizer._inner  # pyright: ignore[reportPrivateUsage]
    for inner.chat_template in TEMPLATES:
        try:
            tokenizer.render([Message("user", "1 + 1?")])
        except UnsupportedByEngine as error:
            refused += "the chat template refuses these messages" in str(error)
    assert refused > 15  # some are only empty


def test_ids_beyond_any_vocabulary_are_refused_before_there_is_a_list_of_them(folder: Path) -> None:
    """One token of the file, added or learned, with an id for which a list would take gigabytes."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    last = list(whole["model"]["vocab"])[-1]
    added, learned = deepcopy(whole), deepcopy(whole)
    added["added_tokens"][0]["id"] = 4_000_000_000
    learned["model"]["vocab"][last] = 3_000_000_000
    for changed in (added, learned):
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(ModelLoadError, match="cannot be read"):
            ModelTokenizer(folder, "mine")


@pytest.mark.parametrize("place", ["pipe", "endless"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_what_is_no_file_is_not_waited_for(file: str, place: str, folder: Path) -> None:
    """A pipe, or a link to a device, in the place of each file: refused by its name."""
    (folder / file).unlink()
    os.mkfifo(folder / file) if place == "pipe" else (folder / file).symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=file):
        read_model_config(folder, "mine")
    with pytest.raises(ModelLoadError, match=f"{file} is a device, a pipe or a socket"):
        ModelTokenizer(folder, "mine")
