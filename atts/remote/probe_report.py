"""Report of a probe: what a server can do, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from atts.engine import EngineSpec, Tokenizer
from atts.remote.engine import RemoteEngine
from atts.remote.options import DialectName, RemoteOptions
from atts.remote.probing import Finding

_DEFAULTS = RemoteOptions()


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Everything a probe found at a URL; prints as a list."""

    url: str
    spec: EngineSpec
    findings: tuple[Finding, ...]

    @property
    def can(self) -> tuple[str, ...]:
        """What pipelines may use it for: "sample", "score", "rate"."""
        return tuple(sorted(self.spec.capabilities))

    def as_json(self) -> dict[str, Any]:
        """One object."""
        spec = self.spec
        return {
            "url": self.url,
            "engine": spec.engine,
            "model": spec.model,
            "context_length": spec.context_length,
            "vocabulary": spec.vocabulary,
            "logprobs": spec.logprobs,
            "can": list(self.can),
            "findings": [{"name": f.name, "answer": f.answer, "seen": f.seen} for f in self.findings],
        }

    def __str__(self) -> str:
        spec = self.spec
        head = f"{self.url}: {spec.engine}, {spec.model}, {spec.context_length} tokens; can {' and '.join(self.can)}"
        return "\n  ".join([head, *map(str, self.findings)])


async def probe(
    url: str,
    *,
    dialect: DialectName | Literal["auto"] = "auto",
    model: str = "",
    tokenizer: Tokenizer | str | Path | None = None,
    options: RemoteOptions = _DEFAULTS,
) -> ProbeReport:
    """Look at a server with a dozen short requests; nothing is refused but another tokenizer.

    :raises EngineError: it cannot be reached, speaks nothing we know, or lacks the model.
    :raises FingerprintError: its tokenizer is another than the one given.
    """
    engine = RemoteEngine(
        url, dialect=dialect, model=model, name=url, tokenizer=tokenizer, needs=frozenset(), options=options
    )
    async with engine:
        return ProbeReport(engine.url, engine.spec, engine.findings)
