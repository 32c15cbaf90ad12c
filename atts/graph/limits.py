"""Limits of one engine: slots and KV tokens in use at once, and the time spent using and awaiting
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atts.concurrency import SlotQueue
from atts.errors import OptionError, OutOfMemory


@dataclass(frozen=True, slots=True)
class Limit:
    """What one engine takes at once; None means no bound of ours.

    :raises OptionError: a bound below 1.
    """

    slots: Annotated[int | None, "calls in flight"] = None
    # a call's are its prompt's plus its `max_tokens`
    tokens: Annotated[int | None, "KV tokens in flight"] = None

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise OptionError(
                    name, f"{value} would admit nothing; give at least 1, or None for no bound"
                )


class Pool(SlotQueue):
    """A limit at work: its slots and KV tokens, and the seconds of use and of waiting so far."""

    __slots__ = ("busy_seconds", "name", "queue_seconds")

    def __init__(self, name: str, limit: Limit) -> None:
        super().__init__(limit.slots, limit.tokens)
        self.name = name
        self.busy_seconds = 0.0  # summed over slots
        self.queue_seconds = 0.0

    def _refuse(self, tokens: int) -> None:
        """More tokens than the limit will ever hold.

        :raises OutOfMemory: always.
        """
        raise OutOfMemory(
            self.name,
            f"a call needs {tokens} KV tokens, the limit is {self.tokens}",
            "Raise the engine's token limit, or lower the chunk or context length",
        )
