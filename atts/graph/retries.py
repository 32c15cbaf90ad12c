"""Retries: what happens to a call, a rollout and a run when something fails."""

from __future__ import annotations

from dataclasses import dataclass

from atts.concurrency import backoff
from atts.errors import ATTSError, EngineError, ModelLoadError, OptionError, UnsupportedByEngine


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try, how long to wait in between, and when to give the whole run up.

    An error that says "again may help" (`ATTSError.retryable`) is tried again: first the call, then
    the rollout. What still fails is recorded on its rollout and touches no other, with two
    exceptions that end the run: an error that would meet every rollout alike (wrong options, a full
    disk, an engine that cannot score), and `give_up_after` failed rollouts in a row, as a lost
    server or a bug makes them.

    :raises OptionError: a count below 1 or a negative delay.
    """

    calls: int = 3
    rollouts: int = 1
    delay_seconds: float = 0.5  # doubles with every attempt, spread by half
    give_up_after: int | None = 32

    def __post_init__(self) -> None:
        for name, value in (
            ("calls", self.calls),
            ("rollouts", self.rollouts),
            ("give_up_after", self.give_up_after),
        ):
            if value is not None and value < 1:
                raise OptionError(name, f"{value} is below 1")
        if self.delay_seconds < 0:
            raise OptionError("delay_seconds", f"{self.delay_seconds} is negative")

    def retries(self, error: Exception, attempt: int, attempts: int) -> bool:
        """Whether attempt number `attempt` (from 0) of at most `attempts` is followed by another."""
        return attempt + 1 < attempts and isinstance(error, ATTSError) and error.retryable

    def delay(self, attempt: int, salt: int) -> float:
        """Seconds before the next attempt; `salt` spreads callers that failed together, the same
        way every time.
        """
        return backoff(attempt + 1, self.delay_seconds, salt=salt)

    def is_fatal(self, error: Exception) -> bool:
        """Whether the error would meet every other rollout too."""
        if isinstance(error, EngineError):
            return isinstance(error, UnsupportedByEngine | ModelLoadError)
        return isinstance(error, ATTSError | AssertionError)
