"""Tokenizers of models, which convert strings to ids and back exactly, and a search for stop
strings that consist of several tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atts.concurrency import import_lock
from atts.core import Message, TokenIds
from atts.errors import MissingExtra, ModelLoadError, UnsupportedByEngine
from atts.models.chat_templates import TemplateProcess, is_plain
from atts.models.chat_templates import render as render_here
from atts.models.folders import (
    NO_TEMPLATE,
    read_end_ids,
    read_object,
    refuse_code,
    refuse_gguf,
    refuse_ids,
)


class ModelTokenizer:
    """A tokenizer for which decode(a + b) is always decode(a) followed by decode(b).

    There is one exception: a character whose bytes are split between a and b. Then each half
    decodes to a replacement character.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Open the tokenizer in a folder, which need not contain model weights.

        :raises ModelLoadError: the folder has no tokenizer, has a damaged one, or contains code.
        """
        self._name = name
        self.folder = folder
        refuse_gguf(folder, name)
        refuse_code(folder, name)
        refuse_ids(folder, name)
        self._backend = _open(folder, name)
        settings = _settings(folder, name)
        self._special_tokens = _special_tokens(settings)
        self._template = _chat_template(folder, settings, name)
        self._templates = TemplateProcess()
        state: dict[str, Any] = json.loads(self._backend.to_str())
        # If two models have equal tokenizer digests, a token id means the same in both. So each
        # model can continue a text of the other. The digest does not cover the chat template, which
        # is often the only difference between two tokenizers.
        self.digest = _digest(
            {key: state[key] for key in state if key not in ("truncation", "padding", "version")}
        )
        self.template_digest = _digest([self._template, self._special_tokens])
        try:
            # the bytes that each token id represents; empty for special tokens
            self.pieces = _pieces(self._backend.get_vocab(), state)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ModelLoadError(
                name, f"the tokenizer in {folder} cannot be read ({error})"
            ) from error
        self.vocabulary = len(self.pieces)  # one more than the highest token id
        eos = self._special_tokens.get("eos_token", "")
        self.end_ids = read_end_ids(folder, name, self._backend.token_to_id(eos) if eos else None)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text` without adding special tokens."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, leaving out special tokens."""
        pieces = self.pieces
        return b"".join([pieces[index] for index in ids if index < len(pieces)]).decode(
            "utf-8", "replace"
        )

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the token ids of a conversation, rendered with the model's chat template.

        The ids end where the assistant's turn begins. If the last message is the assistant's, they
        end inside this message, so that the model can continue it.

        :raises UnsupportedByEngine: the model has no chat template, or its template refuses these
            messages.
        """
        if not self._template:
            advice = f"{NO_TEMPLATE}, or encode a plain prompt yourself"
            raise UnsupportedByEngine(self._name, "the tokenizer has no chat template", advice)
        rows = [{"role": message.role, "content": message.content} for message in messages]
        is_open = bool(rows) and rows[-1]["role"] == "assistant"
        try:
            text = self._render(rows, is_open)
        except UnsupportedByEngine:
            if [row["role"] for row in rows[:2]] != ["system", "user"]:
                raise
            # Some templates, such as that of Gemma 2, do not accept system messages. So the system
            # text is put before the question.
            first = {"role": "user", "content": f"{rows[0]['content']}\n\n{rows[1]['content']}"}
            text = self._render([first, *rows[2:]], is_open)
        return self.encode(text)

    def _render(self, rows: list[dict[str, str]], is_open: bool) -> str:
        render = render_here if is_plain(self._template) else self._templates.render
        try:
            return render(self._template, rows, self._special_tokens, is_open=is_open)
        except Exception as error:
            # A template is a program, so rendering it may raise any error or need too much memory.
            problem = f"the chat template rejects these messages ({error})"
            raise UnsupportedByEngine(
                self._name, problem, f"The template is in {self.folder}"
            ) from error


class StopMatcher:
    """A search for stop strings in a text that arrives in pieces of bytes. A piece may end in the
    middle of a character.

    >>> watch = StopMatcher(("end",))
    >>> [watch.feed(piece) for piece in (b"the e", b"n", b"d.")]
    [False, False, True]
    """

    __slots__ = ("_keep", "_stops", "_tail")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop.encode() for stop in stops)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""

    def feed(self, piece: bytes) -> bool:
        """Add a piece of the text, and return whether it completes a stop string."""
        text = self._tail + piece
        for stop in self._stops:
            if stop in text:
                return True
        self._tail = text[-self._keep :] if self._keep else b""
        return False

    def going_on(self, pieces: Sequence[bytes]) -> int:
        """Return how many of the first pieces can be added without completing a stop string.

        The matcher itself does not change.
        """
        text = self._tail
        if any(stop in text + b"".join(pieces) for stop in self._stops):
            for count, piece in enumerate(pieces):
                text += piece
                if any(stop in text for stop in self._stops):
                    return count
        return len(pieces)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _open(folder: Path, name: str) -> Any:
    """Open tokenizer.json with the tokenizers library. If this file is missing, convert a tokenizer
    in an older format.
    """
    path = folder / "tokenizer.json"
    is_older = any((folder / file).is_file() for file in ("tokenizer.model", "vocab.json"))
    if not path.is_file() and not is_older:
        raise ModelLoadError(
            name, f"{folder} has no tokenizer", "Copy the model's tokenizer files into its folder"
        )
    with import_lock:
        try:
            if path.is_file():
                from tokenizers import Tokenizer

                return Tokenizer.from_file(str(path))
            return _converted(folder, name)
        except MissingExtra:
            raise
        # the tokenizers library raises a plain Exception if the file is damaged
        except Exception as error:
            raise ModelLoadError(
                name, f"the tokenizer in {folder} cannot be read ({error})"
            ) from error


def _converted(folder: Path, name: str) -> Any:
    """Convert a tokenizer that has no tokenizer.json, with the transformers library."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra(
            f"a tokenizer without tokenizer.json ({folder})", "transformers", "local"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if not getattr(tokenizer, "is_fast", False):
        problem = "the tokenizer cannot be converted to tokenizer.json"
        raise ModelLoadError(
            name,
            problem,
            "Convert the tokenizer to tokenizer.json with the library that created it",
        )
    return tokenizer.backend_tokenizer


def _settings(folder: Path, name: str) -> dict[str, Any]:
    """Read tokenizer_config.json. A setting that this file lacks is taken from the older file
    special_tokens_map.json.
    """
    settings = dict[str, Any]()
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            settings |= read_object(folder / file, name)
    return settings


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that chat templates may use, keyed by names such as `bos_token`."""
    tokens = dict[str, str]()
    for role in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"):
        token = settings.get(role)
        if isinstance(token, dict):  # the token is stored as an object with flags, not as a string
            token = token.get("content")
        if isinstance(token, str):
            tokens[role] = token
    return tokens


def _chat_template(folder: Path, settings: dict[str, Any], name: str) -> str:
    """Return the model's chat template, or "" if it has none.

    :raises ModelLoadError: the file of the template cannot be read.
    """
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        template = settings.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(
            name, f"{path} cannot be read ({error})", "Download it again"
        ) from error
    if isinstance(template, list):  # the model has several templates, each with a name
        named = {str(entry.get("name")): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _pieces(vocabulary: dict[str, int], state: dict[str, Any]) -> tuple[bytes, ...]:
    """Return the bytes of each token, indexed by token id.

    The bytes of a decoded text are those of its tokens, joined. Therefore, stop strings can be
    searched for token by token, without decoding the text again.
    """
    kinds = _decoder_kinds(state.get("decoder"))
    pieces = [b""] * (max(vocabulary.values(), default=0) + 1)
    letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
    for token, index in vocabulary.items():
        pieces[index] = _piece(token, kinds, letters)
    for added in state.get("added_tokens", []):
        pieces[added["id"]] = b"" if added["special"] else added["content"].encode()
    return tuple(pieces)


def _piece(token: str, kinds: set[str], letters: dict[str, int]) -> bytes:
    if "ByteLevel" in kinds:
        return b"".join(bytes([letters[c]]) if c in letters else c.encode() for c in token)
    if (
        "ByteFallback" in kinds
        and len(token) == 6
        and token.startswith("<0x")
        and token.endswith(">")
    ):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    if not decoder:
        return set()
    return {decoder["type"]}.union(*[_decoder_kinds(part) for part in decoder.get("decoders", [])])


def _byte_letters() -> list[str]:
    """Return the printable characters with which byte-level tokenizers represent the bytes 0 to
    255.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + offset) for offset, byte in enumerate(hidden)})
    return [letters[byte] for byte in range(256)]
