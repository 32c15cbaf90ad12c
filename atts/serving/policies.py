"""Named policies of the endpoint: the settings behind `:fast`, `:balanced`, `:careful`, `:exact`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from atts.api import Setup

EarlyStop = Literal["none", "certain", "likely"]


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """One row of settings that a model name or a reasoning effort chooses."""

    name: str
    method: str
    samples: int
    rate: float
    early_stop: EarlyStop
    efforts: tuple[str, ...] = ()  # values of `reasoning_effort` that choose this row

    def applied(self, setup: Setup) -> Setup:
        """Return the setup with this row's settings."""
        policy = replace(setup.policy, samples=self.samples, early_stop=self.early_stop)
        return replace(setup, method=self.method, rate=self.rate, policy=policy)


POLICIES: Mapping[str, NamedPolicy] = MappingProxyType(
    {
        row.name: row
        for row in (
            NamedPolicy("fast", "atts", 2, 0.1, "likely", ("none", "minimal", "low")),
            NamedPolicy("balanced", "atts", 4, 0.2, "likely", ("medium",)),
            NamedPolicy("careful", "atts", 8, 0.3, "certain", ("high", "xhigh")),
            NamedPolicy("exact", "exact", 1, 0.0, "none"),
        )
    }
)
DEFAULT = "balanced"
BY_EFFORT: Mapping[str, str] = MappingProxyType(
    {effort: row.name for row in POLICIES.values() for effort in row.efforts}
)
