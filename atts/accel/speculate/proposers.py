"""Proposers that look tokens up, and the choice of the best among several proposers."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atts.local.seams import NOTHING, Ask, Proposer, TokenProposal

_ANCHOR = 4
"""Tokens that must agree again before a hint is followed after a difference."""


class HintProposer(Proposer):
    """Follows `Ask.hint` as long as the text does; after a difference it looks for the place where
    they meet again.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # keyed by sequence: how much of the hint is written

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Return the rest of each hint."""
        return [self._next(ask) if ask.hint else NOTHING for ask in asks]

    def ended(self, key: int) -> None:
        """Forget the place."""
        self._places.pop(key, None)

    def _next(self, ask: Ask) -> TokenProposal:
        place = self._aligned(ask)
        if place is None:
            return NOTHING
        self._places[ask.key] = place
        tokens = ask.hint[place : place + ask.room]
        return TokenProposal(tokens, 0.9 if tokens else 0.0)

    def _aligned(self, ask: Ask) -> int | None:
        """Return the place in the hint where the text continues; None when they have parted."""
        if ask.written == 0:
            return 0
        written = tuple(ask.ids[-min(ask.written, _ANCHOR) :])
        last = self._places.get(ask.key, 0)
        if (
            ask.written <= len(ask.hint)
            and ask.hint[ask.written - len(written) : ask.written] == written
        ):
            return ask.written
        if len(written) < _ANCHOR:
            return None
        for place in range(max(_ANCHOR, last), len(ask.hint) + 1):
            if ask.hint[place - _ANCHOR : place] == written:
                return place
        return None


_GRAM = 3
"""Tokens looked up at once: the shortest match."""
_LONGEST = 24  # matches are not measured further
_PLACES = 12  # places of one n-gram that are looked at, the newest ones
_GROUPS = 64  # problems remembered


_Text = list[int]


@dataclass(slots=True)
class _Group:
    """The texts of one problem, and where each run of a few tokens ends in them."""

    grams: defaultdict[tuple[int, ...], deque[tuple[_Text, int]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_PLACES))
    )
    # texts of running sequences, keyed by sequence
    texts: dict[int, _Text] = field(default_factory=dict[int, _Text])
    latest: dict[str, _Text] = field(default_factory=dict[str, _Text])  # keyed by rollout

    def learn(self, ask: Ask) -> None:
        """Index what a sequence wrote since it was last looked at."""
        text = self.texts.get(ask.key)
        if text is None:
            text = self.texts[ask.key] = self._begun(ask)
        for end in range(len(text) + 1, len(ask.ids) + 1):
            text.append(ask.ids[end - 1])
            if end >= _GRAM:
                self.grams[tuple(text[-_GRAM:])].append((text, end))

    def _begun(self, ask: Ask) -> _Text:
        """Return the text that this request continues with, as far as it is indexed: its rollout's,
        where that is known.
        """
        known = self.latest.get(ask.rollout, _Text()) if ask.rollout else _Text()
        same = next(
            (at for at, pair in enumerate(zip(known, ask.ids, strict=False)) if pair[0] != pair[1]),
            len(known),
        )
        text = known if same == len(known) else _Text(known[:same])
        if ask.rollout:
            self.latest[ask.rollout] = text
        return text

    def places(self, ids: Sequence[int]) -> list[tuple[int, _Text, int]]:
        """Return the earlier places of the text's end, and the length of each match; the longest
        match first.
        """
        earlier_places = self.grams.get(tuple(ids[-_GRAM:]), ())
        matches = [
            (_match(text, end, ids), text, end)
            for text, end in reversed(earlier_places)
            if end < len(text)
        ]
        return sorted(matches, key=lambda match: -match[0])


class SuffixProposer(Proposer):
    """Looks up a text's end among the texts of its problem; learns how far matches of each length
    are to be trusted.
    """

    def __init__(self, least: int = _GRAM) -> None:
        """Create a proposer that follows matches of at least `least` tokens."""
        self._least = max(least, _GRAM)
        self._groups: OrderedDict[object, _Group] = OrderedDict()
        # by length of match, with a prior of ...
        self._accepted = [1.0 * length for length in range(_LONGEST + 1)]
        # ... length / (length + 2)
        self._tried = [1.0 * length + 2.0 for length in range(_LONGEST + 1)]
        # keyed by sequence: the length of the match of its last proposal
        self._matched: dict[int, int] = {}
        self._running: dict[int, _Group] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Propose what followed the longest match; the most frequent where several are as long."""
        groups = [self._group(ask) for ask in asks]
        for ask, group in zip(asks, groups, strict=True):
            group.learn(ask)
        return [self._next(ask, group) for ask, group in zip(asks, groups, strict=True)]

    def settled(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Learn how often the first token is accepted after a match of this length."""
        length = self._matched.pop(key, 0)
        self._tried[length] += 1
        self._accepted[length] += accepted > 0

    def ended(self, key: int) -> None:
        """Keep texts for siblings; groups go when there are too many."""
        self._matched.pop(key, None)
        group = self._running.pop(key, None)
        if group is not None:
            group.texts.pop(key, None)

    def _group(self, ask: Ask) -> _Group:
        name = ask.group or ask.key
        group = self._groups.setdefault(name, _Group())
        self._groups.move_to_end(name)
        self._running[ask.key] = group
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
        return group

    def _next(self, ask: Ask, group: _Group) -> TokenProposal:
        places = group.places(ask.ids)
        if not places or places[0][0] < self._least:
            return NOTHING
        length = places[0][0]
        tokens = _continued(
            [(text, end) for match_length, text, end in places if match_length == length],
            min(ask.room, 2 * length),
        )
        self._matched[ask.key] = length
        return TokenProposal(tokens, self._accepted[length] / self._tried[length])


def _match(text: Sequence[int], end: int, ids: Sequence[int]) -> int:
    """Count how many tokens before `end` equal the last ones of `ids`."""
    length = _GRAM
    most = min(_LONGEST, end, len(ids))
    while length < most and text[end - length - 1] == ids[-length - 1]:
        length += 1
    return length


def _continued(places: list[tuple[_Text, int]], most: int) -> tuple[int, ...]:
    """Return the continuation token by token: the most frequent one among the places that still
    agree.
    """
    tokens: list[int] = []
    while places and len(tokens) < most:
        votes = Counter(text[end] for text, end in places)
        token = votes.most_common(1)[0][0]
        tokens.append(token)
        places = [
            (text, end + 1) for text, end in places if text[end] == token and end + 1 < len(text)
        ]
    return tuple(tokens)


class BestProposer(Proposer):
    """Asks several proposers in turn, the cheapest first: one that is confident enough saves the
    others the work.
    """

    def __init__(self, proposers: Sequence[Proposer], enough: float = 0.7) -> None:
        self._proposers = tuple(proposers)
        self._enough = enough
        # proposer whose proposal each sequence was given last
        self._chosen: dict[int, Proposer] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Return the first confident proposal of each, else the most confident one."""
        best = [NOTHING] * len(asks)
        open_places = list(range(len(asks)))
        for proposer in self._proposers:
            proposed = (
                proposer.propose([asks[place] for place in open_places]) if open_places else ()
            )
            for place, proposal in zip(open_places, proposed, strict=True):
                if proposal.tokens and proposal.confidence >= best[place].confidence:
                    best[place] = proposal
                    self._chosen[asks[place].key] = proposer
            open_places = [place for place in open_places if best[place].confidence < self._enough]
        return best

    def settled(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Tell the proposer whose proposal it was."""
        self._chosen[key].settled(key, proposal, accepted)

    def silence(self) -> str:
        """Return the reason of the last proposer, which is asked when the others know nothing."""
        return self._proposers[-1].silence()

    def ended(self, key: int) -> None:
        """Tell all proposers."""
        self._chosen.pop(key, None)
        for proposer in self._proposers:
            proposer.ended(key)
