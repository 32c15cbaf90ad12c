"""The engine conformance suite: `check_engine` runs every check on a live engine and reports on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import anyio

from atts.engine import Engine
from atts.errors import CheckFailed, OptionError
from atts.testing.conformance_checks import (
    CHECKS,
    OPENING,
    Broken,
    CheckOptions,
    NotApplicable,
    Probe,
)

DEFAULTS = CheckOptions()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str
    status: Literal["kept", "broken", "skipped"]
    why: str = ""

    def __str__(self) -> str:
        promise = (CHECKS[self.check].__doc__ or "").split("\n", 1)[0]
        return f"{self.status:8}{self.check}: {self.why or promise}"


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The results of all checks, in order; prints as a list."""

    engine: str
    results: tuple[CheckResult, ...]

    @property
    def broken(self) -> tuple[CheckResult, ...]:
        """Return the promises that were not kept."""
        return tuple(result for result in self.results if result.status == "broken")

    def listed(self, results: Iterable[CheckResult]) -> str:
        """Return some of the results as text, under a headline."""
        headline = (
            f"engine {self.engine}: {len(self.broken)} of {len(self.results)} promises broken"
        )
        return "\n  ".join([headline, *map(str, results)])

    def __str__(self) -> str:
        return self.listed(self.results)


async def check_engine(
    engine: Engine | Callable[[], Engine],
    *,
    options: CheckOptions = DEFAULTS,
    broken: Literal["raise", "report"] = "raise",
) -> ConformanceReport:
    """Check every promise of `atts.engine.Engine` on a live engine.

    An engine that cannot even be opened is reported as well.

    Best given a function that makes a new, unopened engine each time it is called: then closing and
    isolation are checked too, and an engine that broke a promise is replaced. An engine that is
    already open stays open.

    >>> from atts.testing import ScriptedEngine, run_virtual
    >>> report = run_virtual(check_engine, ScriptedEngine)
    >>> len(report.broken)
    0

    :raises CheckFailed: a promise was broken; the message lists all that were. Not with
        `broken="report"`.
    :raises OptionError: `options.skip` names a check there is not.
    """
    for name in options.skip:
        if name not in CHECKS:
            raise OptionError(name, "there is no such check to skip", tuple(CHECKS))
    report = await _check_all(engine, options)
    if report.broken and broken == "raise":
        raise CheckFailed(report.listed(report.broken))
    return report


async def _check_all(
    engine: Engine | Callable[[], Engine], options: CheckOptions
) -> ConformanceReport:
    factory = engine if callable(engine) else None
    results: list[CheckResult] = []
    name = getattr(engine, "__name__", type(engine).__name__)
    remaining = list(CHECKS)
    while remaining:
        try:
            async with nullcontext(engine) if not callable(engine) else engine() as opened:
                probe = Probe(opened, options, factory)
                while remaining:
                    results.append(await _run(remaining.pop(0), probe))
                    if factory and results[-1].status == "broken":
                        break  # whatever it did to the engine must not count twice
                name = opened.spec.name
        except Exception as error:  # noqa: BLE001  # as in `_run`
            results.append(
                CheckResult(OPENING, "broken", f"raised {type(error).__name__}: {error}")
            )
        if any(result.check == OPENING and result.status == "broken" for result in results):
            results += [
                CheckResult(each, "skipped", "it does not open, or lacks what is asked of it")
                for each in remaining
            ]
            break
    return ConformanceReport(name, tuple(results))


async def _run(name: str, probe: Probe) -> CheckResult:
    options = probe.options
    if name in options.skip:
        return CheckResult(name, "skipped", "left out by the caller")
    try:
        with anyio.fail_after(options.timeout_seconds):
            await CHECKS[name](probe)
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Broken as flaw:
        return CheckResult(name, "broken", str(flaw))
    except TimeoutError:
        return CheckResult(
            name, "broken", f"it did not finish within {options.timeout_seconds:g} s"
        )
    except Exception as error:  # noqa: BLE001  # an engine may fail in any way, and the report tells
        return CheckResult(name, "broken", f"raised {type(error).__name__}: {error}")
    return CheckResult(name, "kept")
