"""Tests of the tokens per second that chosen proposal lengths lose against plain decoding and the
best fixed length.

The loss includes the time for learning. The simulated machine is like a small model on one core:
texts end and others begin, and a drafter must read the text that it missed. Measuring a step takes
a good part of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from atts.accel.speculate.goodput import GoodputControl, StepShape

MOST = 16
DRAFTS = {
    "embedded": (0.985, 0.985),
    "weaker": (0.84, 0.7),
    "weak": (0.67, 0.67),
    "useless": (0.2, 0.2),
}
"""Acceptance rates of each draft: of a proposal's first two tokens, and of its other tokens."""


@dataclass(slots=True)
class Text:
    """A text that is being written."""

    key: int
    ids: int
    end: int
    drafted: int = 0


class Machine:
    """A simulated machine that writes texts, with chosen or fixed proposal lengths."""

    # Seconds that measuring adds to a step; a step that is not measured costs an eighth of this.
    looking = 4e-5

    def __init__(
        self, lengths: GoodputControl | int, draft: str, seed: int = 0, is_shared: bool = False
    ) -> None:
        self._lengths = lengths
        self._stands = DRAFTS[draft]
        self._random = np.random.default_rng(seed)
        self._texts: list[Text] = []
        self._begun = 0
        self._is_shared = is_shared
        self._slowness = 1.0

    def rate(self, steps: int, sequences: int) -> float:
        """Return the tokens per second over this many steps, without the noise of a shared machine."""
        each = [self._step(sequences) for _ in range(steps)]
        return sum(tokens for tokens, _ in each) / sum(seconds for _, seconds in each)

    def _step(self, sequences: int) -> tuple[int, float]:
        self._renew(sequences)
        if isinstance(self._lengths, int):
            return self._written([self._lengths] * sequences)[:2]
        if self._lengths.rests(sequences):
            return self._written([0] * sequences)[:2]
        shape = StepShape(
            [text.key for text in self._texts],
            0,
            float(np.mean([text.ids for text in self._texts])),
        )
        lengths = self._lengths.choose(shape)
        tokens, seconds, parts, rounds = self._written(lengths)
        looked = self._lengths.observed(shape, rounds, sequences + sum(lengths), parts) is not None
        return tokens, seconds + self.looking * (1 if looked else 1 / 8)

    def _renew(self, sequences: int) -> None:
        self._texts = [text for text in self._texts if text.ids < text.end]
        while len(self._texts) < sequences:
            self._begun += 1
            self._texts.append(Text(self._begun, 60, 120 + int(self._random.integers(80))))

    def _written(
        self, lengths: list[int]
    ) -> tuple[int, float, tuple[float, float], list[tuple[int, int, int]]]:
        """Return the tokens, the seconds without noise, the measured seconds of proposing and of
        the step, and each sequence's accepted tokens.
        """
        proposing = 1.5e-4 * any(lengths)
        tokens = 0
        rounds = list[tuple[int, int, int]]()
        for text, length in zip(self._texts, lengths, strict=True):
            accepted = 0
            if length:
                missed = text.ids - text.drafted
                proposing += 1.8e-5 * length + (missed > 3) * (1e-4 + 6e-6 * missed)
                accepted = min(self._stood(length), text.end - text.ids - 1)
                rounds.append((text.key, length, accepted))
                text.drafted = text.ids + accepted
            text.ids = text.ids + 1 + accepted
            tokens = tokens + 1 + accepted
        step = self._plain(len(lengths) + sum(lengths))
        return tokens, proposing + step, (self._noisy(proposing), self._noisy(step)), rounds

    def _plain(self, rows: int) -> float:
        """Return the seconds of a step that feeds this many tokens."""
        return 1e-3 * (0.12 + 0.17 * min(rows, 16) + 0.11 * max(0, rows - 16))

    def _stood(self, length: int) -> int:
        stands = self._random.random(length) < [self._stands[place > 1] for place in range(length)]
        return length if stands.all() else int(stands.argmin())

    def _noisy(self, seconds: float) -> float:
        """Add 5 % on average, 50 % on average to one time in fifty, and much more on a shared
        machine.
        """
        if self._is_shared:
            if self._random.random() < 0.01:
                self._slowness = float(np.exp(0.35 * self._random.normal()))
            hiccup = self._random.uniform(2, 6) if self._random.random() < 0.05 else 1
            return float(seconds * self._slowness * hiccup * (1 + 0.3 * self._random.exponential()))
        return seconds * (
            1 + 0.05 * self._random.exponential() * (10 if self._random.random() < 0.02 else 1)
        )


@cache
def fixed(draft: str, sequences: int) -> dict[int, float]:
    """Return the tokens per second of each fixed proposal length."""
    return {k: Machine(k, draft).rate(400, sequences) for k in (0, 2, 4, 8, 12)}


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
@pytest.mark.parametrize("draft", DRAFTS)
def test_little_is_lost_against_the_best_length(draft: str, sequences: int) -> None:
    """Goodput is at least 0.97 of plain decoding in the first 1,200 steps, and at least 0.95 of the
    best fixed length afterwards.
    """
    rates = fixed(draft, sequences)
    machines = [Machine(GoodputControl(MOST), draft, seed) for seed in range(3)]
    first, later = (
        np.mean([machine.rate(1200, sequences) for machine in machines]) for _ in range(2)
    )
    assert min(first, later) >= 0.97 * rates[0]
    assert later >= 0.95 * max(rates.values())


@pytest.mark.parametrize(
    ("draft", "sequences"), [("embedded", 1), ("embedded", 4), ("embedded", 16), ("weak", 4)]
)
def test_little_is_lost_on_a_shared_machine(draft: str, sequences: int) -> None:
    """On a shared machine, the tokens per second are on average at least 0.92 of those of the best
    fixed length.

    Step times vary by half, and the machine's speed changes about every fifty steps.
    """
    kept = list[float]()
    for seed in range(4):
        machine = Machine(GoodputControl(MOST), draft, seed, is_shared=True)
        machine.rate(400, sequences)
        kept.append(machine.rate(1600, sequences) / max(fixed(draft, sequences).values()))
    assert np.mean(kept) >= 0.92, kept


DEAR = {
    1: (1.0, 1.99, 2.8, 4.28, 5.4), 2: (1.0, 2.55, 3.75, 6.2, 8.2), 4: (1.0, 3.13, 4.72, 7.57, 9.6),
    8: (1.0, 3.33, 4.91, 7.75, 9.9),
}  # fmt: skip
"""Step times of the embedded target with 1, 3, 5, 9 and 13 tokens per sequence, relative to 1
token, for each number of sequences.
"""


class Rounds(Machine):
    """A machine that writes in rounds of two texts per sequence; each text has 60 to 300 tokens.

    Prompts of new texts are fed together with the running texts. Steps take as long as those of the
    embedded target on one core, where proposed tokens are hardly cheaper than tokens of additional
    sequences.
    """

    looking = 8e-5
    dear = DEAR
    _left = 0  # number of texts of this round that have not begun

    def rate_of(self, tokens: int, sequences: int) -> float:
        """Return the tokens per second over this many tokens."""
        written = 0
        seconds = 0.0
        while written < tokens:
            step = self._step(sequences)
            written = written + step[0]
            seconds = seconds + step[1]
        return written / seconds

    def _step(self, sequences: int) -> tuple[int, float]:
        self._texts = [text for text in self._texts if text.ids < text.end]
        self._left = self._left if self._texts else 2 * sequences
        new = list[Text]()
        control = self._lengths
        while self._left and len(self._texts) + len(new) < sequences:
            self._begun = self._begun + 1
            self._left = self._left - 1
            new.append(Text(self._begun, 60, 120 + int(self._random.integers(240))))
        others = 60 * len(new)
        count = len(self._texts)
        if not count or isinstance(control, int) or control.rests(count):
            length = control if isinstance(control, int) else 0
            tokens, seconds = self._fed([length] * count, others)[:2]
        else:
            keys = [text.key for text in self._texts]
            context = float(np.mean([text.ids for text in self._texts]))
            shape = StepShape(keys, others, context)
            lengths = control.choose(shape)
            tokens, seconds, (proposing, computing), rounds = self._fed(lengths, others)
            looked = (
                control.observed(shape, rounds, shape.rows + sum(lengths), (proposing, computing))
                is not None
            )
            seconds += self.looking * (1 if looked else 1 / 8)
        for text in new:
            text.ids += 1
        self._texts += new
        return tokens + len(new), seconds

    def _own(self, count: int) -> float:
        """Return the seconds of a step of this many sequences without proposals."""
        return 1e-3 * (0.12 + 0.17 * count)

    def _fed(
        self, lengths: list[int], others: int
    ) -> tuple[int, float, tuple[float, float], list[tuple[int, int, int]]]:
        """Return the result of `_written` for a step that also feeds this many prompt tokens."""
        tokens, seconds, (proposing, _), rounds = self._written(lengths)
        count = len(lengths)
        total = len(lengths) + sum(lengths)
        drafting = seconds - self._plain(total)
        dear = (
            np.interp(total / count, (1, 3, 5, 9, 13), self.dear[1 << (count.bit_length() - 1)])
            if count
            else 1.0
        )
        step = float(self._own(count) * dear) + 1.1e-4 * others
        return tokens, drafting + step, (proposing, self._noisy(step)), rounds


@pytest.mark.parametrize(
    ("draft", "sequences"), [("embedded", 2), ("embedded", 8), ("weaker", 1), ("weaker", 8)]
)
def test_rounds_of_short_texts_are_no_slower_than_plain_decoding(
    draft: str, sequences: int
) -> None:
    """Writing rounds of short texts reaches at least 0.97 of the speed of plain decoding, on a
    machine where steps with proposals are slow.

    The first few hundred tokens of each sequence are not compared.
    """
    kept = list[float]()
    for seed in range(4):
        plain, machine = (Rounds(lengths, draft, seed) for lengths in (0, GoodputControl(12)))
        machine.rate_of(400 * sequences, sequences)
        kept.append(
            machine.rate_of(1500 * sequences, sequences)
            / plain.rate_of(1500 * sequences, sequences)
        )
    assert np.mean(kept) >= 0.97, kept


CHEAP = {
    1: (1.0, 2.56, 3.46, 5.65, 7.26), 2: (1.0, 2.3, 3.03, 4.68, 6.18), 4: (1.0, 2.02, 3.06, 4.9, 6.85),
    8: (1.0, 2.11, 3.08, 5.46, 7.88), 16: (1.0, 2.24, 3.63, 6.44, 9.25), 32: (1.0, 1.92, 3.09, 5.53, 7.96),
}  # fmt: skip
"""Relative step times of the target on another machine, where proposals gain time."""


class Opened(Rounds):
    """A machine with a new engine, whose first steps are interrupted because memory is used for the
    first time.
    """

    looking = 1.3e-4
    dear = CHEAP
    _steps = 0

    def _own(self, count: int) -> float:
        return 1e-4 * (0.4 + 1.65 * count)

    def _noisy(self, seconds: float) -> float:
        self._steps += 1
        first = 0.025 if self._steps == 16 else 0.0
        pause = 5e-3 if self._random.random() < 0.06 * (1 - self._steps / 500) else 0.0
        return super()._noisy(seconds) + (first + pause) * (seconds > 0)


@pytest.mark.parametrize("sequences", [2, 4])
def test_interrupted_first_steps_do_not_hide_what_pays(sequences: int) -> None:
    """The first steps of a new engine are slow, which suggests that proposals do not pay; later
    trials correct this.
    """
    fixed = max(Opened(k, "embedded").rate_of(6000 * sequences, sequences) for k in (4, 8))
    kept = list[float]()
    for seed in range(24):
        machine = Opened(GoodputControl(MOST), "embedded", seed)
        machine.rate_of(300 * sequences, sequences)
        kept.append(machine.rate_of(1000 * sequences, sequences) / fixed)
    assert min(kept) >= 0.88, kept


class Prompts(Machine):
    """Texts whose long prompts the drafter has to read before it proposes anything."""

    def __init__(
        self, lengths: GoodputControl | int, draft: str, seed: int, reading: float
    ) -> None:
        super().__init__(lengths, draft, seed)
        self._reading = reading
        self._known = set[int]()

    def _written(
        self, lengths: list[int]
    ) -> tuple[int, float, tuple[float, float], list[tuple[int, int, int]]]:
        """Return what `Machine._written` returns, plus the seconds in which the drafter reads
        prompts in this step.
        """
        tokens, seconds, (proposing, step), rounds = super()._written(lengths)
        keys = {key for key, _, _ in rounds}
        reading = self._reading * len(keys - self._known)
        self._known |= keys
        return tokens, seconds + reading, (proposing + reading, step), rounds


@pytest.mark.parametrize(
    ("draft", "sequences", "reading", "least"),
    [
        ("weaker", 1, 0.01, 0.97),
        ("weaker", 1, 0.04, 0.97),
        ("weaker", 8, 0.04, 0.97),
        ("embedded", 4, 0.04, 0.97),
        ("embedded", 4, 0.01, 0.97),  # proposals that lose only a little time are rarely stopped
        # their loss is no larger than the error in the estimated time of a plain step
        ("embedded", 4, 0.003, 0.96),
    ],
)
def test_a_run_loses_little_whatever_misleads_the_forecasts(
    draft: str, sequences: int, reading: float, least: float
) -> None:
    """If forecasts promise a gain but whole runs lose, the measured losses stop the proposals.

    Here the forecasts are wrong, because they leave out the drafter's time for reading prompts.
    """
    for seed in range(3):
        plain = Prompts(0, draft, seed, reading).rate(8000, sequences)
        kept = Prompts(GoodputControl(12), draft, seed, reading).rate(8000, sequences) / plain
        assert kept >= least, (seed, kept)
