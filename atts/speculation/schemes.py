"""The choice among ways to draft: each is tried in turn, and that which writes most tokens a second is used."""

from __future__ import annotations

from dataclasses import dataclass

_TURN = 16  # steps of a try
_SETTLE = 4  # first steps of a turn, which do not count: a drafter catches up in them
_GLANCE = 8  # steps after which a try ends that writes half as fast as another
_SHARE = 0.01  # of the tokens, what may be lost by tries
_LONGEST = 1024  # steps between two tries, where they lose next to nothing


@dataclass(slots=True)
class _Load:
    """What is known where about as many sequences decode."""

    rates: list[float]  # tokens a second, by scheme; 0: never tried
    scheme: int = 0
    best: int = -1  # the one that is used between tries
    is_try: bool = True
    tries: int = 0
    length: int = _TURN  # steps of this turn
    stay: int = _TURN  # steps that the best one got last, at least
    due: float = 0.0  # tokens that it must write before another is tried
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


class SchemeControl:
    """Says which of several schemes is used in the next step, for loads of about 1, 2, 4, 8... sequences apart."""

    def __init__(self, schemes: int) -> None:
        self._schemes, self._loads = schemes, dict[int, _Load]()
        self._place, self._away = -1, 0  # the load that is measured; steps in a row that were of another
        self.current = 0

    def observed(self, sequences: int, tokens: int, seconds: float) -> None:
        """A step of so many sequences wrote so many tokens in so much time."""
        place = sequences.bit_length()
        self._away = 0 if place == self._place else self._away + 1
        has_moved = self._place < 0 or self._away >= _SETTLE  # a load that goes to and fro is one load
        self._place = place if has_moved else self._place
        load = self._loads.setdefault(self._place, _Load([0.0] * self._schemes))
        if has_moved:  # what this step ran with was chosen for another load
            self._away, load.steps, load.tokens, load.seconds = 0, 0, 0, 0.0
        else:
            load.steps += 1
            if load.steps > _SETTLE:
                load.tokens, load.seconds = load.tokens + tokens, load.seconds + seconds
            if _is_over(load):
                _turn(load)
        self.current = load.scheme

    @property
    def is_contested(self) -> bool:
        """Whether the first scheme is but tried, where another is used."""
        return self._place >= 0 and self.current == 0 < self._loads[self._place].best


def _is_over(load: _Load) -> bool:
    if load.is_try:
        is_hopeless = load.steps == _GLANCE and 2 * load.tokens < max(load.rates) * load.seconds
        return is_hopeless or load.steps >= load.length
    return load.steps >= load.length and load.tokens >= load.due


def _turn(load: _Load) -> None:
    """Whose turn is next: what was never tried, else the best, and after it another for a short while."""
    rate, known = load.tokens / max(1e-9, load.seconds), load.rates[load.scheme]
    load.rates[load.scheme] = (rate + known) / 2 if known else rate
    lost = max(load.rates) * load.seconds - load.tokens
    load.due = load.due + lost / _SHARE if load.is_try else 0.0
    load.steps, load.tokens, load.seconds = 0, 0, 0.0
    if 0.0 in load.rates:
        load.scheme, load.length = load.rates.index(0.0), _TURN
    elif load.is_try:
        best = max(range(len(load.rates)), key=lambda scheme: load.rates[scheme])
        load.stay = min(2 * load.stay, _LONGEST) if best == load.best else _TURN
        load.scheme, load.best, load.length, load.is_try = best, best, load.stay, False
    else:
        others = [scheme for scheme in range(len(load.rates)) if scheme != load.best] or [load.best]
        load.scheme, load.length, load.is_try = others[load.tries % len(others)], _TURN, True
        load.tries += 1
