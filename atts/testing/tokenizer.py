"""The toy language's tokenizer: words, numbers and bytes, so that any text goes to ids and back
unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from importlib import resources
from typing import Literal

import msgspec
import msgspec.toml

from atts.core import Message, TokenIds
from atts.errors import OptionError, UsageError

Dialect = Literal["plain", "other"]


class Language(msgspec.Struct, frozen=True):
    """The words of the toy language, and its grammar."""

    specials: tuple[str, ...]
    fillers: tuple[str, ...]
    openers: dict[str, float]  # and how often each begins a step
    full_stops: dict[str, float]
    rare_slips: tuple[int, ...]
    words: dict[str, str]  # and what each means to the grammar
    phases: dict[str, dict[str, str]]  # by phase and kind of word, the next phase
    phrases: dict[str, dict[str, float]]  # by phase, what may be said without thought


LANGUAGE = msgspec.toml.decode(
    resources.files("atts.testing").joinpath("language.toml").read_bytes(), type=Language
)
SPECIALS = LANGUAGE.specials
FILLERS = LANGUAGE.fillers
OPENERS = tuple(LANGUAGE.openers)
# a blank line may begin or end inside a token
MERGES = (
    ".\n",
    ".\n\n",
    *(f"\n{opener}" for opener in OPENERS),
)
TEMPLATE = "{role}{content} ... <|assistant|>"


class ToyTokenizer:
    """Greedy longest match over a small vocabulary, single bytes for the rest.

    The same text can be spelt by several id sequences, as in real tokenizers: what a model wrote
    need not be what `encode` makes of it. The "other" dialect numbers its tokens differently and
    lacks the merges, for pairs of models that share no tokenizer.

    >>> tokenizer = ToyTokenizer()
    >>> tokenizer.decode(tokenizer.encode("So 4 plus 4 is 8.\\n\\nça va"))
    'So 4 plus 4 is 8.\\n\\nça va'
    """

    def __init__(self, dialect: Dialect = "plain") -> None:
        if dialect not in ("plain", "other"):
            raise OptionError("dialect", f"{dialect!r} is unknown", ("plain", "other"))
        numbers = tuple(str(number) for number in range(100))
        words = (
            *OPENERS,
            *FILLERS,
            *LANGUAGE.words,
            *(MERGES if dialect == "plain" else ()),
            *numbers,
            *(f" {n}" for n in numbers),
        )
        plain = [word.encode() for word in words]
        single = [bytes([byte]) for byte in range(256) if bytes([byte]) not in set(plain)]
        pieces = [*plain, *single] if dialect == "plain" else [*single, *plain[::-1]]
        self.dialect = dialect
        self.pieces: tuple[bytes, ...] = (*(b"" for _ in SPECIALS), *pieces)
        self.vocabulary = len(self.pieces)
        self.end_id = 0  # the token with which a model ends its text; the specials come first
        text = repr((self.pieces, SPECIALS, TEMPLATE))
        self.digest = blake2b(text.encode(), digest_size=16).hexdigest()
        self._ids = {piece: index for index, piece in enumerate(self.pieces) if piece}
        self._pattern = re.compile(
            "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        )

    def piece_id(self, text: str) -> int | None:
        """The id of the token that is exactly this text; None when the vocabulary has none."""
        return self._ids.get(text.encode())

    def encode(self, text: str) -> TokenIds:
        """The ids of `text`, no special token added; specials spelt out in the text are just text."""
        ids: list[int] = []
        position = 0
        for match in self._pattern.finditer(text):
            ids.extend(self._spell(text[position : match.start()]))
            ids.append(self._ids[match.group().encode()])
            position = match.end()
        ids.extend(self._spell(text[position:]))
        return tuple(ids)

    def _spell(self, text: str) -> TokenIds:
        return tuple(self._ids[bytes([byte])] for byte in text.encode()) if text else ()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out; a character cut in the middle reads U+FFFD.

        :raises UsageError: an id outside the vocabulary.
        """
        if ids and not (0 <= min(ids) and max(ids) < len(self.pieces)):
            raise UsageError(
                f"cannot decode an id outside 0..{len(self.pieces) - 1}: ids of another tokenizer?"
            )
        return b"".join([self.pieces[index] for index in ids]).decode(errors="replace")

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """The conversation, each message opened by its role's token; a last assistant message is
        left open to go on.
        """
        ids: list[int] = []
        for message in messages:
            ids.append(SPECIALS.index(f"<|{message.role}|>"))
            ids.extend(self.encode(message.content))
        if not messages or messages[-1].role != "assistant":
            ids.append(SPECIALS.index("<|assistant|>"))
        return tuple(ids)
