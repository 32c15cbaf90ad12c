"""Turn text into a model's token ids and back exactly, and find stop strings across tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atts.concurrency import import_lock
from atts.core import Message, TokenIds
from atts.errors import ModelLoadError, UnsupportedByEngine
from atts.models.chat_templates import TemplateProcess, is_plain
from atts.models.folders import NO_TEMPLATE, read_end_ids, read_object, refuse_code, refuse_ids


class ModelTokenizer:
    """A tokenizer whose texts concatenate: decode(a + b) is decode(a) followed by decode(b).

    The only exception is a character whose bytes are split between a and b: each half decodes to a
    replacement character.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Open the tokenizer in a folder, with or without a model.

        :raises ModelLoadError: the folder has no tokenizer, has only a slow one, or brings code.
        """
        self._name = name
        self._folder = folder
        self._inner = _open(folder, name)
        self._templates = TemplateProcess()
        self._state: dict[str, Any] = json.loads(self._inner.backend_tokenizer.to_str())
        # covers vocabulary, merges, special tokens and template: equal digests read ids alike
        self.digest = self._hash()
        try:
            # the bytes of each id; empty for special tokens
            self.pieces = _pieces(self._inner, self._state)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ModelLoadError(
                name, f"the tokenizer in {folder} cannot be read ({error})"
            ) from error
        self.vocabulary = len(self.pieces)  # the highest id plus one
        # the ids that end a text
        self.end_ids = read_end_ids(folder, name, self._inner.eos_token_id)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text` without adding special tokens."""
        return tuple(self._inner.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        pieces = self.pieces
        return b"".join([pieces[index] for index in ids if index < len(pieces)]).decode(
            "utf-8", "replace"
        )

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the ids of a conversation, ending where the assistant's turn begins.

        If the last message is the assistant's, it is left open to be continued.

        :raises UnsupportedByEngine: the model has no chat template, or its template refuses these
            messages.
        """
        if not self._inner.chat_template:
            advice = f"{NO_TEMPLATE}, or encode a plain prompt yourself"
            raise UnsupportedByEngine(self._name, "the tokenizer has no chat template", advice)
        rows = [{"role": message.role, "content": message.content} for message in messages]
        is_open = bool(rows) and rows[-1]["role"] == "assistant"
        try:
            text = self._template(rows, is_open)
        except UnsupportedByEngine:
            if [row["role"] for row in rows[:2]] != ["system", "user"]:
                raise
            # The template knows no system messages (Gemma 2's is one): put the system text before
            # the question.
            first = {"role": "user", "content": f"{rows[0]['content']}\n\n{rows[1]['content']}"}
            text = self._template([first, *rows[2:]], is_open)
        return self.encode(text)

    def _template(self, rows: list[dict[str, str]], is_open: bool) -> str:
        options: dict[str, Any] = (
            {"continue_final_message": True} if is_open else {"add_generation_prompt": True}
        )
        template = self._inner.chat_template
        try:
            if isinstance(template, str) and is_plain(template):
                return str(self._inner.apply_chat_template(rows, tokenize=False, **options))
            options |= {
                "chat_template": self._inner.get_chat_template(),
                **self._inner.special_tokens_map,
            }
            return self._templates.render({"conversations": [rows], **options})
        except Exception as error:
            # a template is a program: it may divide by zero or ask for a petabyte
            problem = f"the chat template refuses these messages ({error})"
            raise UnsupportedByEngine(self._name, problem, f"It is in {self._folder}") from error

    def _hash(self) -> str:
        parts = {
            key: self._state[key]
            for key in self._state
            if key not in ("truncation", "padding", "version")
        }
        template = self._inner.chat_template
        ends = [self._inner.bos_token, self._inner.eos_token]
        text = json.dumps([parts, template, ends], sort_keys=True, ensure_ascii=False)
        return blake2b(text.encode(), digest_size=16).hexdigest()


class StopMatcher:
    """Search a growing text for stop strings; a piece may end in the middle of a character.

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
        """Add a piece of text, and return True if it completed a stop string."""
        text = self._tail + piece
        for stop in self._stops:
            if stop in text:
                return True
        self._tail = text[-self._keep :] if self._keep else b""
        return False

    def going_on(self, pieces: Sequence[bytes]) -> int:
        """Return how many of these pieces fit before a stop string is complete, without adding them."""
        text = self._tail
        if any(stop in text + b"".join(pieces) for stop in self._stops):
            for count, piece in enumerate(pieces):
                text += piece
                if any(stop in text for stop in self._stops):
                    return count
        return len(pieces)


def _open(folder: Path, name: str) -> Any:
    if not any(
        (folder / file).is_file()
        for file in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        raise ModelLoadError(
            name, f"{folder} holds no tokenizer", "Copy the model's tokenizer files into its folder"
        )
    refuse_code(folder, name)
    refuse_ids(folder, name)
    with import_lock:
        try:
            kind = _tokenizer_class(folder, name)
            tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
            raise ModelLoadError(
                name, f"the tokenizer in {folder} cannot be read ({error})"
            ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelLoadError(
            name, "its tokenizer has no fast version", "Convert it to tokenizer.json"
        )
    return tokenizer


def _tokenizer_class(folder: Path, name: str) -> Any:
    """Return the transformers class that opens this tokenizer.

    AutoTokenizer imports torch to find the class, so the common case is decided here.
    """
    settings = dict[str, dict[str, Any]]()
    for file in ("config.json", "tokenizer_config.json"):
        settings[file] = read_object(folder / file, name) if (folder / file).is_file() else {}
    is_llama = settings["config.json"].get("model_type") == "llama"
    declared = settings["tokenizer_config.json"].get("tokenizer_class")
    is_fast_class = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
    if is_llama and is_fast_class and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _pieces(tokenizer: Any, state: dict[str, Any]) -> tuple[bytes, ...]:
    """Return the bytes that each id writes.

    Decoding is concatenating these pieces, so stop strings are found without decoding a text twice.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
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
    """Return the printable letters that byte-level tokenizers write for the bytes 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + offset) for offset, byte in enumerate(hidden)})
    return [letters[byte] for byte in range(256)]
