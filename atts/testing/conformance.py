"""The conformance suite: what every engine must do, whoever wrote it, checked from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import anyio

from atts.engine import Engine
from atts.errors import CheckFailed, OptionError
from atts.testing import lifecycle, promises
from atts.testing.probe import Broken, NotApplicable, Probe
from atts.testing.probe import CheckOptions as CheckOptions

Check = Callable[[Probe], Awaitable[None]]
DEFAULTS = CheckOptions()

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "spec": promises.check_spec,
        "tokenizer": promises.check_tokenizer,
        "ids": promises.check_ids,
        "length": promises.check_length,
        "stop": promises.check_stop,
        "stop_ids": promises.check_stop_ids,
        "end": promises.check_end,
        "alignment": promises.check_alignment,
        "improbable": promises.check_improbable,
        "greedy": promises.check_greedy,
        "seeds": promises.check_seeds,
        "seed_fields": promises.check_seed_fields,
        "law": promises.check_law,
        "hints": promises.check_hints,
        "score_company": promises.check_score_company,
        "context": promises.check_context,
        "refusals": promises.check_refusals,
        "capabilities": promises.check_capabilities,
        "order": lifecycle.check_order,
        "stats": lifecycle.check_stats,
        "closing": lifecycle.check_closing,
        "isolation": lifecycle.check_isolation,
        "cancellation": lifecycle.check_cancellation,
    }
)
"""Every check by name; the first line of its docstring is the promise."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one check."""

    check: str
    status: Literal["kept", "broken", "skipped"]
    why: str = ""

    @property
    def promise(self) -> str:
        """What was checked, in a sentence."""
        return (CHECKS[self.check].__doc__ or "").split("\n", 1)[0]

    def __str__(self) -> str:
        return f"{self.status:8}{self.check}: {self.why or self.promise}"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of every check, in order; prints as a list."""

    engine: str
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The promises that were not kept."""
        return tuple(finding for finding in self.findings if finding.status == "broken")

    def listed(self, findings: Iterable[Finding]) -> str:
        """Some of the findings under a headline."""
        headline = f"engine {self.engine}: {len(self.broken)} of {len(self.findings)} promises broken"
        return "\n  ".join([headline, *map(str, findings)])

    def __str__(self) -> str:
        return self.listed(self.findings)


async def check_engine(
    engine: Engine | Callable[[], Engine],
    *,
    options: CheckOptions = DEFAULTS,
    broken: Literal["raise", "report"] = "raise",
) -> Report:
    """Check every promise of `atts.engine.Engine` on a live engine.

    Best given a function that makes a new, unopened engine each time it is called: then closing and isolation are
    checked too, and an engine that broke a promise is replaced. An engine that is already open stays open.

    >>> from atts.testing import ScriptedEngine, run_virtual
    >>> report = run_virtual(check_engine, ScriptedEngine)
    >>> len(report.broken)
    0

    :raises CheckFailed: a promise was broken; the message lists all that were. Not with `broken="report"`.
    :raises OptionError: `options.skip` names a check there is not.
    :raises ATTSError: the engine could not be opened or closed.
    """
    for name in options.skip:
        if name not in CHECKS:
            raise OptionError(name, "there is no such check to skip", tuple(CHECKS))
    report = await (_check_made(engine, options) if callable(engine) else _check_open(engine, options))
    if report.broken and broken == "raise":
        raise CheckFailed(report.listed(report.broken))
    return report


async def _check_open(engine: Engine, options: CheckOptions) -> Report:
    findings = [await _run(name, Probe(engine, options), options) for name in CHECKS]
    return Report(engine.spec.name, tuple(findings))


async def _check_made(factory: Callable[[], Engine], options: CheckOptions) -> Report:
    findings: list[Finding] = []
    name = ""
    remaining = list(CHECKS)
    while remaining:
        async with factory() as engine:
            probe, name = Probe(engine, options, factory), engine.spec.name
            while remaining:
                findings.append(await _run(remaining.pop(0), probe, options))
                if findings[-1].status == "broken":
                    break  # whatever it did to the engine must not count twice
    return Report(name, tuple(findings))


async def _run(name: str, probe: Probe, options: CheckOptions) -> Finding:
    if name in options.skip:
        return Finding(name, "skipped", "left out by the caller")
    try:
        with anyio.fail_after(options.timeout_seconds):
            await CHECKS[name](probe)
    except NotApplicable as reason:
        return Finding(name, "skipped", str(reason))
    except Broken as flaw:
        return Finding(name, "broken", str(flaw))
    except TimeoutError:
        return Finding(name, "broken", f"it did not finish within {options.timeout_seconds:g} s")
    except Exception as error:  # noqa: BLE001  # an engine may fail in any way, and the report tells
        return Finding(name, "broken", f"raised {type(error).__name__}: {error}")
    return Finding(name, "kept")
