"""Closed forms of speculative schemes for independent acceptances; the unit of time is one target
step of one token.

Throughout, `accepted` is the probability that a proposed token stands given that all before it do,
`ratio` is how many draft steps one target step takes, and feeding a few more tokens does not slow
the target down.
"""

from __future__ import annotations

from math import ceil


def expected_tokens(accepted: float, proposed: int) -> float:
    """Of one step: those that stand, and the one after them.

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return proposed + 1.0 if accepted == 1 else (1 - accepted ** (proposed + 1)) / (1 - accepted)


def serial_speedup(accepted: float, proposed: int, ratio: float) -> float:
    """Draft, then verify."""
    return expected_tokens(accepted, proposed) / (1 + proposed / ratio)


def best_serial(accepted: float, ratio: float, most: int = 64) -> tuple[float, int]:
    """The best fixed length of serial speculation: speed-up and tokens proposed."""
    return max(
        (serial_speedup(accepted, proposed, ratio), proposed) for proposed in range(most + 1)
    )


def hit_rate(accepted: float, ranked: float, proposed: int) -> float:
    """That the outcome of a step was guessed, where each place has its own next token and some more
    for a difference.

    `ranked` is the probability that the target's token is among those more: 0 is PEARL's one guess.
    """
    return ranked * expected_tokens(accepted, proposed) + accepted ** (proposed + 1)


def overlapped_tokens(accepted: float, ranked: float, proposed: int) -> float:
    """Tokens a step when drafting hides behind it: after a miss the target steps without a
    proposal.

    With `ranked` = 0 and windows of `proposed` + 1 tokens this is PEARL's (1-a^G) / ((1-a)
    (1+a-a^G)).
    """
    alone = accepted + ranked
    hit = hit_rate(accepted, ranked, proposed)
    share = alone / (1 + alone - hit)  # of steps that have a proposal
    return 1 - share + share * expected_tokens(accepted, proposed)


def pearl_speedup(accepted: float, window: int, ratio: float) -> float:
    """Pre- and post-verification, `window` draft steps a tick."""
    return overlapped_tokens(accepted, 0.0, window - 1) / max(1.0, window / ratio)


def mirror_seconds(depth: float, rendezvous: float, drafting: float) -> float:
    """Mirror's equation (10): up to the early exit, a message, the rest beside the drafter, a
    message.
    """
    return depth + rendezvous + max(1 - depth, drafting) + rendezvous


def grouped_drafting(layers: int, group: int, attention: float, mlp: float) -> float:
    """EasySpec's time of a draft step: first and last layer exact, the attentions of each group
    between at once.
    """
    return (min(2, layers) + ceil(max(0, layers - 2) / group)) * attention + layers * mlp
