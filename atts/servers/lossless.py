"""The test of a server's own speculation: whether what it writes in one call still follows the law
that it scores by.

A request for one token is never speculated. So each token of a sampled text is held against one
that is drawn alone after the same beginning: on a lossless server the two are exchangeable, the
difference of their log-probabilities is as often above 0 as below, and the sum of such differences
over the root of the sum of their squares is about a standard normal number, whatever the model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from atts.concurrency import collect
from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.sampling import Seed
from atts.servers.dialect_client import DialectClient

_TEXTS = 8
_TOKENS = 12
_HOT = Sampling(temperature=0.7)
_GREEDY = Sampling(temperature=0.0)
_LIMIT = 5.0  # an honest server passes it about once in a million times
_NEAR = 0.1  # nats between two tokens that either may be the likeliest one


class Lossless(NamedTuple):
    """What a server was seen to write: in how far it is what its own law says."""

    tokens: int  # sampled in texts, each beside one drawn alone
    worse: float  # nats by which they are less likely than those, on average
    # of that from 0, in standard errors; below 0 where texts are likelier than they may be
    deviation: float
    # the most nats by which a token of a greedy text is less likely than the likeliest
    misled: float

    @property
    def trouble(self) -> str:
        """What is wrong with it; "" if nothing is."""
        found = list[str]()
        if abs(self.deviation) > _LIMIT:
            words = f"{self.tokens} tokens sampled at temperature {_HOT.temperature:g} are {abs(self.worse):.2f} nats "
            words += (
                f"{'less' if self.worse > 0 else 'more'} likely than such as are drawn one by one"
            )
            found.append(f"{words} ({abs(self.deviation):.1f} deviations)")
        if self.misled > _NEAR:
            found.append(
                f"its greedy text has a token {self.misled:.2f} nats less likely than the likeliest"
            )
        return " and ".join(found)

    def __str__(self) -> str:
        if self.trouble:
            return f"what it writes is not what its law says: {self.trouble}; serve it without speculation"
        return f"{self.tokens} sampled tokens follow its law ({self.deviation:+.1f} deviations), greedy ones are best"


async def see_lossless(requests: DialectClient, prompt: TokenIds, greedy: TokenIds) -> Lossless:
    """Look at texts sampled after the prompt, and at one that was written greedily.

    :raises EngineError: the server fails.
    """
    texts = await collect(
        [partial(_differences, requests, prompt, number) for number in range(_TEXTS)]
    )
    found = [value for text in texts for value in text]
    gaps = await collect(
        [partial(_gap, requests, prompt + greedy[:n], greedy[n]) for n in range(len(greedy))]
    )
    root = math.sqrt(sum(value * value for value in found))
    return Lossless(
        len(found), sum(found) / max(1, len(found)), sum(found) / root if root else 0.0, max(gaps)
    )


async def _differences(requests: DialectClient, prompt: TokenIds, number: int) -> list[float]:
    """For each token of a text, how much likelier one drawn alone in its place is."""
    seed = Seed(run=100 + number, purpose="probe")
    ids = (await requests.sample_raw(SampleRequest(prompt, _TOKENS, _HOT, seed))).ids
    if not ids:
        return []
    scores = (await requests.score(ScoreRequest(prompt, ids))).logprobs

    async def alone(place: int) -> float:
        before = prompt + ids[:place]
        own = replace(seed, sample=1 + place)
        token = (await requests.sample_raw(SampleRequest(before, 1, _HOT, own))).ids[:1]
        return (await requests.score(ScoreRequest(before, token))).logprobs[0]

    drawn = await collect([partial(alone, place) for place in range(len(ids))])
    floor = -30.0  # a token of no mass at all counts as this
    return [max(floor, other) - max(floor, own) for other, own in zip(drawn, scores, strict=True)]


async def _gap(requests: DialectClient, ids: TokenIds, token: int) -> float:
    """How much less likely a token of a greedy text is than the one that is written greedily alone."""
    alone = await requests.sample_raw(SampleRequest(ids, 1, _GREEDY, Seed(purpose="probe")))
    if alone.ids[0] == token:
        return 0.0
    pairs = await collect(
        [partial(requests.score, ScoreRequest(ids, (each,))) for each in (alone.ids[0], token)]
    )
    best, own = (scores.logprobs[0] for scores in pairs)
    return best - own
