"""Seeded random streams, each named by its purpose, so that draws do not depend on the order of
work.

Every uniform is a function of (run seed, problem, sample, turn, role, attempt, position) alone: any
schedule, batch or restart draws the same ones. Philox is counter-based, its key a hash of the
fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Seed:
    """The name of one random stream; `purpose` separates streams of one request (sampling,
    tie-breaking, latency).
    """

    run: int = 0
    problem: str = ""
    sample: int = 0
    turn: int = 0
    role: str = "draft"
    attempt: int = 0
    purpose: str = "sample"

    def key(self) -> int:
        """128 bits that name the stream; equal on every machine and in every version."""
        fields = (
            self.run,
            self.problem,
            self.sample,
            self.turn,
            self.role,
            self.attempt,
            self.purpose,
        )
        text = "\x1f".join(str(field) for field in fields)
        return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "big")


def generator(seed: Seed) -> np.random.Generator:
    """A fresh generator at position 0 of the stream."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=seed.key()))


def uniforms(seed: Seed, count: int) -> NDArray[np.float64]:
    """The first `count` uniforms in [0, 1) of the stream; a longer call starts with the shorter
    one's numbers.

    >>> bool((uniforms(Seed(run=7), 8)[:3] == uniforms(Seed(run=7), 3)).all())
    True
    """
    return generator(seed).random(count)
