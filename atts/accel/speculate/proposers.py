"""Proposers that look up tokens in known texts, and a proposer that combines several of them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atts.local.seams import NOTHING, Ask, Proposer, TokenProposal

_ANCHOR = 4
"""Number of equal tokens after which a hint is followed again once it has differed from the text.
"""


class HintProposer(Proposer):
    """Follows `Ask.hint` while the text equals it; after a difference, searches for the place where
    they agree again.
    """

    def __init__(self) -> None:
        # keyed by sequence: number of tokens of the hint that the text has passed
        self._places: dict[int, int] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Return the rest of each hint."""
        return [self._next(ask) if ask.hint else NOTHING for ask in asks]

    def ended(self, key: int) -> None:
        """Forget the place of a sequence that ended."""
        self._places.pop(key, None)

    def _next(self, ask: Ask) -> TokenProposal:
        place = self._aligned(ask)
        if place is None:
            return NOTHING
        self._places[ask.key] = place
        tokens = ask.hint[place : place + ask.room]
        return TokenProposal(tokens, 0.9 if tokens else 0.0)

    def _aligned(self, ask: Ask) -> int | None:
        """Return the place in the hint where the text continues; None if the text differs from the
        hint.
        """
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
"""Least length of a match, in tokens, for a lookup."""
_LONGEST = 24  # matches are compared up to this length
_PLACES = 12  # most occurrences of an n-gram that are compared, newest first
_GROUPS = 64  # most problems whose texts are kept


_Text = list[int]


@dataclass(slots=True)
class _Group:
    """The texts of one problem, with an index of the places where each n-gram ends."""

    grams: defaultdict[tuple[int, ...], deque[tuple[_Text, int]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_PLACES))
    )
    # texts of running sequences, keyed by sequence
    texts: dict[int, _Text] = field(default_factory=dict[int, _Text])
    latest: dict[str, _Text] = field(default_factory=dict[str, _Text])  # keyed by rollout

    def learn(self, ask: Ask) -> None:
        """Add the tokens that a sequence wrote since the last call to the index."""
        text = self.texts.get(ask.key)
        if text is None:
            text = self.texts[ask.key] = self._begun(ask)
        for end in range(len(text) + 1, len(ask.ids) + 1):
            text.append(ask.ids[end - 1])
            if end >= _GRAM:
                self.grams[tuple(text[-_GRAM:])].append((text, end))

    def _begun(self, ask: Ask) -> _Text:
        """Return the indexed text that this request continues: its rollout's text, if the rollout
        is known.
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
        """Return the earlier places that match the end of the text, and the length of each match,
        longest first.
        """
        earlier_places = self.grams.get(tuple(ids[-_GRAM:]), ())
        matches = [
            (_match(text, end, ids), text, end)
            for text, end in reversed(earlier_places)
            if end < len(text)
        ]
        return sorted(matches, key=lambda match: -match[0])


class SuffixProposer(Proposer):
    """Proposes what followed earlier occurrences of a text's end in its problem's texts; learns how
    reliable matches of each length are.
    """

    def __init__(self, least: int = _GRAM) -> None:
        """Create a proposer that follows matches of at least `least` tokens."""
        self._least = max(least, _GRAM)
        self._groups: OrderedDict[object, _Group] = OrderedDict()
        # by length of match: accepted and tried tokens, with a prior acceptance of length / (length
        # + 2)
        self._accepted = [1.0 * length for length in range(_LONGEST + 1)]
        self._tried = [1.0 * length + 2.0 for length in range(_LONGEST + 1)]
        # keyed by sequence: the length of the match behind its last proposal
        self._matched: dict[int, int] = {}
        self._running: dict[int, _Group] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Propose the tokens after the longest match; among equally long matches, the most frequent
        tokens.
        """
        groups = [self._group(ask) for ask in asks]
        for ask, group in zip(asks, groups, strict=True):
            group.learn(ask)
        return [self._next(ask, group) for ask, group in zip(asks, groups, strict=True)]

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Learn how often the first token after a match of this length is accepted."""
        length = self._matched.pop(key, 0)
        self._tried[length] += 1
        self._accepted[length] += accepted > 0

    def ended(self, key: int) -> None:
        """Keep the texts of problems for their other rollouts; drop the oldest problems if there
        are too many.
        """
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
    """Count how many tokens before `end` equal the last tokens of `ids`."""
    length = _GRAM
    most = min(_LONGEST, end, len(ids))
    while length < most and text[end - length - 1] == ids[-length - 1]:
        length += 1
    return length


def _continued(places: list[tuple[_Text, int]], most: int) -> tuple[int, ...]:
    """Return the continuation token by token: the most frequent token among the places that agree
    so far.
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
    """Asks several proposers in order of cost. Once one is confident enough, later proposers are
    not asked.
    """

    def __init__(self, proposers: Sequence[Proposer], enough: float = 0.7) -> None:
        self._proposers = tuple(proposers)
        self._enough = enough
        # the proposer of each sequence's last proposal
        self._chosen: dict[int, Proposer] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Return the first confident proposal for each request, or the most confident one if none
        is confident enough.
        """
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

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Report the outcome to the proposer that made the proposal."""
        self._chosen[key].verified(key, proposal, accepted)

    def silence(self) -> str:
        """Return the reason of the last proposer, which is asked only if the others have no
        proposal.
        """
        return self._proposers[-1].silence()

    def ended(self, key: int) -> None:
        """Report the ended sequence to all proposers."""
        self._chosen.pop(key, None)
        for proposer in self._proposers:
            proposer.ended(key)
