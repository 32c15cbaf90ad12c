"""The named policies of the endpoint, which are the settings of each model name for clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from atts.api import Setup
from atts.core import Role

EarlyStop = Literal["none", "certain", "likely"]


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """The settings that a model name or a reasoning effort chooses."""

    name: str
    method: str
    samples: int
    rate: float
    early_stop: EarlyStop
    efforts: tuple[str, ...] = ()  # values of `reasoning_effort` that choose this row
    is_plain: bool = False  # whether the reply is the whole text of one rollout by one model

    def applied(self, setup: Setup) -> Setup:
        """Return the setup with this row's settings."""
        policy = replace(setup.policy, samples=self.samples, early_stop=self.early_stop)
        return replace(setup, method=self.method, rate=self.rate, policy=policy)


def _by_name(*rows: NamedPolicy) -> Mapping[str, NamedPolicy]:
    return MappingProxyType({row.name: row for row in rows})


POLICIES = _by_name(
    NamedPolicy("fast", "atts", 2, 0.1, "likely", ("none", "minimal", "low")),
    NamedPolicy("balanced", "atts", 4, 0.2, "likely", ("medium",)),
    NamedPolicy("careful", "atts", 8, 0.3, "certain", ("high", "xhigh")),
    NamedPolicy("exact", "exact", 1, 0.0, "none"),
)
"""The policies of a pair."""
VOTES = _by_name(
    NamedPolicy("fast", "draft-only", 2, 0.0, "likely", ("none", "minimal", "low")),
    NamedPolicy("balanced", "draft-only", 4, 0.0, "likely", ("medium",)),
    NamedPolicy("careful", "draft-only", 8, 0.0, "certain", ("high", "xhigh")),
)
"""The policies of a server with one model, whose rollouts vote."""
DEFAULT = "balanced"
METHODS = ("atts", "cascade", "coin", "draft-only", "target-only", "exact")
"""The methods that a request to a pair may name; the others need a separate calibration run."""
PLAIN: Mapping[str, NamedPolicy] = MappingProxyType(
    {
        "draft": NamedPolicy("draft", "draft-only", 1, 0.0, "none", is_plain=True),
        "target": NamedPolicy("target", "target-only", 1, 0.0, "none", is_plain=True),
    }
)
HOUSEKEEPING = replace(PLAIN["draft"], name="housekeeping")
"""The policy of requests that chat programs send by themselves, for example for a title."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The model names of a server, with the policy of each."""

    name: str
    policies: Mapping[str, NamedPolicy] = field(default_factory=lambda: POLICIES)
    # keyed by name: the draft or the target alone
    plain: Mapping[str, NamedPolicy] = field(default_factory=dict[str, NamedPolicy])
    methods: Sequence[str] = METHODS

    @property
    def names(self) -> list[str]:
        """Return every name, the default policy's first."""
        return [self.name, *(f"{self.name}:{policy}" for policy in self.policies), *self.plain]

    @property
    def efforts(self) -> dict[str, NamedPolicy]:
        """Return the policy that each reasoning effort chooses."""
        return {effort: row for row in self.policies.values() for effort in row.efforts}

    def policy_of(self, model: str) -> NamedPolicy | None:
        """Return the policy that a model name chooses, or None if it leaves the choice open.

        :raises KeyError: the name is not served.
        """
        if model == self.name:
            return None
        if model in self.plain:
            return self.plain[model]
        name, _, policy = model.rpartition(":")
        if name != self.name:
            raise KeyError(model)
        return self.policies[policy]


def offer_of(name: str, models: Mapping[Role, str]) -> Offer:
    """Return the model names and policies of a server with a pair, or with one model that votes.

    >>> offer_of("atts/p", {"draft": "small", "target": "large"}).names[-4:]
    ['draft', 'target', 'small', 'large']
    >>> offer_of("atts/m", {"draft": "small"}).names
    ['atts/m', 'atts/m:fast', 'atts/m:balanced', 'atts/m:careful', 'small']
    """
    if len(models) == 1:
        ((role, model),) = models.items()
        rows = {key: replace(row, method=f"{role}-only") for key, row in VOTES.items()}
        return Offer(name, rows, {model: PLAIN[role]}, (f"{role}-only",))
    plain = dict(PLAIN)
    if len(set(models.values())) == len(models):
        plain |= {model: PLAIN[role] for role, model in models.items()}
    return Offer(name, POLICIES, plain)
