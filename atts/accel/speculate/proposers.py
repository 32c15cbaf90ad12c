"""Proposers that look up tokens in known texts, and a proposer that combines several proposers."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atts.local.seams import NOTHING, Ask, Proposer, TokenProposal

_ANCHOR = 4
"""Number of tokens to search for in the hint if the text has become different from the hint. They
are the last tokens of the text. Proposals then continue after the place where they were found.
"""


class HintProposer(Proposer):
    """Proposes the tokens of `Ask.hint`, the caller's guess of the text.

    While the text is the same as the start of the hint, the next tokens of the hint are proposed.
    After a difference, the last tokens of the text are searched for in the hint, and the tokens
    after them are proposed.
    """

    def __init__(self) -> None:
        # for each sequence, the position in its hint from which the last proposal was taken
        self._places: dict[int, int] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Propose the next tokens of each request's hint. For a request without a hint, propose
        nothing.
        """
        return [self._next(ask) if ask.hint else NOTHING for ask in asks]

    def ended(self, key: int) -> None:
        """Delete the record of a sequence that ended."""
        self._places.pop(key, None)

    def _next(self, ask: Ask) -> TokenProposal:
        place = self._aligned(ask)
        if place is None:
            return NOTHING
        self._places[ask.key] = place
        tokens = ask.hint[place : place + ask.room]
        return TokenProposal(tokens, 0.9 if tokens else 0.0)

    def _aligned(self, ask: Ask) -> int | None:
        """Return the position in the hint at which the text continues.

        Return None if the last tokens of the text are not in the hint.
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
"""Smallest number of consecutive tokens that two texts must share for a match."""
_LONGEST = 24  # A match of more equal tokens than this counts as a match of this number.
# largest number of positions that the index stores for one n-gram; older positions are deleted
_PLACES = 12
_GROUPS = 64  # largest number of problems whose texts are kept


_Text = list[int]


@dataclass(slots=True)
class _Group:
    """The texts of one problem, with an index of the positions where each n-gram ends."""

    grams: defaultdict[tuple[int, ...], deque[tuple[_Text, int]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_PLACES))
    )
    # texts of the sequences that are still running, by sequence key
    texts: dict[int, _Text] = field(default_factory=dict[int, _Text])
    # latest text of each rollout, by the rollout's name
    latest: dict[str, _Text] = field(default_factory=dict[str, _Text])

    def learn(self, ask: Ask) -> None:
        """Add to the index the tokens that a sequence has gained since the last call."""
        text = self.texts.get(ask.key)
        if text is None:
            text = self.texts[ask.key] = self._begun(ask)
        for end in range(len(text) + 1, len(ask.ids) + 1):
            text.append(ask.ids[end - 1])
            if end >= _GRAM:
                self.grams[tuple(text[-_GRAM:])].append((text, end))

    def _begun(self, ask: Ask) -> _Text:
        """Return the indexed text to which the tokens of a new request will be added.

        It is the latest text of the same rollout, cut before the first token that differs from the
        request.
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
        """Find where the last tokens of `ids` occur in the texts of the index.

        Each result is a match: its length, the text, and the position after the match. The longest
        matches come first.
        """
        earlier_places = self.grams.get(tuple(ids[-_GRAM:]), ())
        matches = [
            (_match(text, end, ids), text, end)
            for text, end in reversed(earlier_places)
            if end < len(text)
        ]
        return sorted(matches, key=lambda match: -match[0])


class SuffixProposer(Proposer):
    """Proposes the tokens that followed the last tokens of a text in other texts of the same
    problem.

    It also learns how reliable matches of each length are.
    """

    def __init__(self, least: int = _GRAM) -> None:
        """Create a proposer that uses matches of at least `least` tokens."""
        self._least = max(least, _GRAM)
        self._groups: OrderedDict[object, _Group] = OrderedDict()
        # For each length of a match: how many proposals had their first token accepted, and how
        # many were verified. The initial numbers give an acceptance of length / (length + 2).
        self._accepted = [1.0 * length for length in range(_LONGEST + 1)]
        self._tried = [1.0 * length + 2.0 for length in range(_LONGEST + 1)]
        # for each sequence, the length of the match that gave its last proposal
        self._matched: dict[int, int] = {}
        self._running: dict[int, _Group] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Propose the tokens that followed the longest match.

        If several matches have this length, propose the tokens that followed most often.
        """
        groups = [self._group(ask) for ask in asks]
        for ask, group in zip(asks, groups, strict=True):
            group.learn(ask)
        return [self._next(ask, group) for ask, group in zip(asks, groups, strict=True)]

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Record, for the length of the match, whether the first proposed token was accepted."""
        length = self._matched.pop(key, 0)
        self._tried[length] += 1
        self._accepted[length] += accepted > 0

    def ended(self, key: int) -> None:
        """Delete the record of a sequence that ended.

        Its text stays in the index for the other rollouts of the problem.
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
    """Count how many tokens before position `end` of `text` match the last tokens of `ids`, up to a
    limit.
    """
    length = _GRAM
    most = min(_LONGEST, end, len(ids))
    while length < most and text[end - length - 1] == ids[-length - 1]:
        length += 1
    return length


def _continued(places: list[tuple[_Text, int]], most: int) -> tuple[int, ...]:
    """Return the tokens with which most matches continue, chosen one position at a time.

    At each position, matches that continue with another token are dropped.
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
    """Calls several proposers, the cheapest first, until a proposal is confident enough."""

    def __init__(self, proposers: Sequence[Proposer], enough: float = 0.7) -> None:
        self._proposers = tuple(proposers)
        self._enough = enough
        # for each sequence, the proposer that made its last proposal
        self._chosen: dict[int, Proposer] = {}

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Return the first proposal that is confident enough, for each request. If there is none,
        return the proposal with the highest confidence.
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
        """Report how many tokens of a proposal were accepted to the proposer that made it."""
        self._chosen[key].verified(key, proposal, accepted)

    def silence(self) -> str:
        """Return the reason why the last of the proposers proposed nothing."""
        return self._proposers[-1].silence()

    def ended(self, key: int) -> None:
        """Report to all proposers that a sequence ended."""
        self._chosen.pop(key, None)
        for proposer in self._proposers:
            proposer.ended(key)
