"""The ledger of engine calls, which reserves the largest cost of every call before the call starts,
so that no cap is exceeded.
"""

from __future__ import annotations

import errno
import math
import os
import tomllib
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self, cast

import anyio
import msgspec

from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores, Usage
from atts.errors import ATTSError, JournalCorrupt, OptionError
from atts.files import read_ordinary, storage, write_atomic

LEDGER = "ledger.jsonl"
"""Name of the ledger's file in a run directory."""
PRICES = "prices by role"
"""Name of the setting in a run's manifest that stores the prices of each role's model. Reports
compute costs from it.
"""

# Picodollars in a dollar. Costs are whole numbers of picodollars, because sums of integers have no
# rounding error.
_PICO = 10**12
_MILLION = 10**6


class LimitReached(ATTSError):
    """A call was refused because it would exceed a cap; `limit` is the cap's name."""

    def __init__(self, limit: str, problem: str) -> None:
        super().__init__(f"{limit}: {problem}")
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Amount:
    """Counts of calls and tokens, and their cost. All values are whole numbers, so that sums are
    exact.
    """

    calls: int = 0
    target_tokens: int = 0  # tokens that the target wrote
    total_tokens: int = 0  # tokens of prompts, scored texts and completions together
    picodollars: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.calls + other.calls,
            self.target_tokens + other.target_tokens,
            self.total_tokens + other.total_tokens,
            self.picodollars + other.picodollars,
        )

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            self.calls - other.calls,
            self.target_tokens - other.target_tokens,
            self.total_tokens - other.total_tokens,
            self.picodollars - other.picodollars,
        )

    @property
    def dollars(self) -> float:
        """Return the cost converted to dollars."""
        return self.picodollars / _PICO

    def by_cap(self) -> dict[str, float]:
        """Return the values that the caps limit, keyed by the name of the cap."""
        return {
            "max_calls": self.calls,
            "max_target_tokens": self.target_tokens,
            "max_total_tokens": self.total_tokens,
            "max_cost": self.dollars,
        }


@dataclass(frozen=True, slots=True)
class Caps:
    """Hard limits on spending; None means no limit.

    :raises OptionError: a limit is below 1, or the cap on cost is not above 0.
    """

    max_calls: Annotated[int | None, "engine calls"] = None
    max_target_tokens: Annotated[int | None, "tokens that the target writes"] = None
    max_total_tokens: Annotated[
        int | None, "tokens of prompts, scored texts and completions, over all calls"
    ] = None
    max_cost: Annotated[float | None, "dollars, computed from the prices of the models"] = None
    max_seconds: Annotated[float | None, "seconds, including earlier sessions"] = None

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_target_tokens", "max_total_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"a limit of {value} allows no calls; give at least 1")
        for name in ("max_cost", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise OptionError(name, f"{value} is out of range; give a number above 0")

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))

    @property
    def limits_calls(self) -> bool:
        """Return True if a cap may refuse calls. `max_seconds` is the only cap that never does."""
        return replace(self, max_seconds=None) != Caps()

    def as_json(self) -> dict[str, Any]:
        """Return the caps that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def exceeded_by(self, amount: Amount) -> str:
        """Return the name of the first cap that the amount exceeds, or "".

        `max_seconds` is not checked here. The caller must watch the time, because time also passes
        without calls.
        """
        pairs = (
            ("max_calls", self.max_calls, amount.calls),
            ("max_target_tokens", self.max_target_tokens, amount.target_tokens),
            ("max_total_tokens", self.max_total_tokens, amount.total_tokens),
            ("max_cost", _picodollars(self.max_cost), amount.picodollars),
        )
        for name, cap, value in pairs:
            if cap is not None and value > cap:
                return name
        return ""


def _picodollars(dollars: float | None) -> int | None:
    """Convert a cap in dollars to whole picodollars, rounded down so that the cap never grows."""
    return None if dollars is None else math.floor(dollars * _PICO)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one model, in dollars per million tokens.

    :raises OptionError: a price is below 0, or cached tokens cost more than other input tokens.
    """

    input: float  # price of tokens in prompts and scored texts
    output: float
    # price of prompt tokens that come from a cache; None: the same price as `input`
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise OptionError(f"prices.{name}", f"{value} is not a price; give 0 or more")
        if self.cached is not None and self.cached > self.input:
            raise OptionError(
                "prices.cached",
                f"{self.cached} is above the input price {self.input}; give a "
                "lower price of cached tokens",
            )

    def picodollars(self, read: int, cached: int, written: int) -> int:
        """Return the cost of a call in picodollars.

        `read` counts the uncached input tokens, `cached` the cached input tokens, and `written` the
        output tokens.
        """
        cached_price = self.input if self.cached is None else self.cached
        return (
            read * _of_million(self.input)
            + cached * _of_million(cached_price)
            + written * _of_million(self.output)
        )


def _of_million(dollars: float) -> int:
    """Convert a price in dollars per million tokens to picodollars per token, rounded up so that no
    cost is underestimated.
    """
    return math.ceil(dollars * _PICO / _MILLION - 1e-6)


Prices = Mapping[Role, Price]


def read_prices(path: Path) -> dict[str, Price]:
    """Read the prices of models from a TOML file, and return them keyed by model name.

    :raises OptionError: the file cannot be read, or contains anything other than prices.
    """
    try:
        tables = tomllib.loads(read_ordinary(path).decode())
        named = msgspec.convert(tables, dict[str, _PriceTable])
        return {
            name: Price(table.input, table.output, table.cached) for name, table in named.items()
        }
    except OSError as error:
        raise OptionError("prices", f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError("prices", f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise OptionError(
            "prices",
            f"{path}: {error}; give each model the prices input, output and (optionally) cached, "
            "in dollars per million tokens",
        ) from error


class _PriceTable(msgspec.Struct, forbid_unknown_fields=True):
    input: float
    output: float
    cached: float | None = None


def prices_of(prices: Mapping[str, Price], models: Mapping[Role, str]) -> dict[Role, Price]:
    """Return the price of each role's model.

    The keys of `prices` may be names of models or of roles.
    """
    by_role = dict[Role, Price]()
    for role, model in models.items():
        price = prices.get(model) or prices.get(role)
        if price is not None:
            by_role[role] = price
    return by_role


def check_prices(caps: Caps, prices: Mapping[str, Price], models: Mapping[Role, str]) -> None:
    """Check that every model has a price if there is a cap in dollars.

    :raises OptionError: a model has no price; the message names the model.
    """
    if caps.max_cost is None:
        return
    known = prices_of(prices, models)
    for role, model in models.items():
        if role not in known:
            raise OptionError(
                "max_cost",
                f"the {role} {model!r} has no price; add it to a prices.toml, and name the file "
                "with --set prices=FILE",
            )


def cost_of(usage: Usage, prices: Prices, roles: tuple[Role, ...]) -> float | None:
    """Return the cost of the usage in dollars; None if the model of one of the `roles` has no
    price.
    """
    if not roles or any(role not in prices for role in roles):
        return None
    read = {"draft": usage.draft_prefill_tokens, "target": usage.target_prefill_tokens}
    written = {"draft": usage.draft_tokens, "target": usage.target_tokens}
    total = sum(prices[role].picodollars(read[role], 0, written[role]) for role in roles)
    return total / _PICO


def recorded_prices(value: object) -> dict[Role, Price]:
    """Return the prices that a manifest recorded; `value` is the value of its setting `PRICES`.

    The result is empty if the manifest has no prices.
    """
    if not isinstance(value, Mapping):
        return {}
    recorded = cast(Mapping[Role, Mapping[str, float]], value)
    return {role: Price(**price) for role, price in recorded.items()}


def money_of(usage: Usage, prices: Prices) -> float | None:
    """Return the cost of the usage in dollars. The result is None if a model that was used has no
    price.
    """
    asked: list[Role] = []
    if usage.draft_tokens or usage.draft_prefill_tokens:
        asked.append("draft")
    if usage.target_tokens or usage.scored_tokens or usage.target_prefill_tokens:
        asked.append("target")
    return cost_of(usage, prices, tuple(asked))


def most_of(role: Role, request: SampleRequest | ScoreRequest, prices: Prices) -> Amount:
    """Return the most tokens that the call can use, with their cost."""
    if isinstance(request, SampleRequest):
        return _amount(role, len(request.ids), 0, request.max_tokens, prices)
    read = len(request.prefix) + len(request.suffix)
    # `draw` ends at the first token that differs from the suffix. So it has at most one token more
    # than the suffix.
    drawn = 0 if request.draw is None else min(request.draw.max_tokens, len(request.suffix) + 1)
    return _amount(role, read, 0, drawn, prices)


def taken_by(
    role: Role, request: SampleRequest | ScoreRequest, reply: Completion | Scores, prices: Prices
) -> Amount:
    """Return the tokens that an answered call used, with their cost."""
    if isinstance(request, SampleRequest):
        assert isinstance(reply, Completion), "the reply to a sample request must be a completion"
        read = len(request.ids)
        written = len(reply.ids)
    else:
        assert isinstance(reply, Scores), "the reply to a score request must be scores"
        read = len(request.prefix) + len(request.suffix)
        written = 0 if reply.beginning is None else len(reply.beginning.ids)
    cached = min(reply.cached_tokens, read)
    return _amount(role, read - cached, cached, written, prices)


def _amount(role: Role, read: int, cached: int, written: int, prices: Prices) -> Amount:
    price = prices.get(role)
    return Amount(
        calls=1,
        target_tokens=written if role == "target" else 0,
        total_tokens=read + cached + written,
        picodollars=0 if price is None else price.picodollars(read, cached, written),
    )


class Account:
    """The budget of one request or run: its caps, its spending, and the reservations of its calls
    in flight.

    An account may be inside an outer account. Each call is then charged to both accounts, and must
    fit within the caps of both. A call that failed or was cancelled is charged its largest possible
    cost, because the engine may have done the work.
    """

    def __init__(
        self,
        caps: Caps | None = None,
        *,
        name: str = "",
        prices: Prices | None = None,
        inside: Account | None = None,
        file: LedgerFile | None = None,
        spent: Amount | None = None,
        unanswered: Amount | None = None,
    ) -> None:
        self.caps = caps or Caps()
        self.name = name
        self.prices: Prices = dict(prices or {})
        self.spent = spent or Amount()
        self.reserved = Amount()
        # The part of `spent` that was charged for calls that got no reply.
        self.unanswered = unanswered or Amount()
        self.written = 0  # tokens that draft and target wrote
        self.cached = 0  # prompt tokens that came from a cache
        self.limit = ""  # name of the cap that refused a call; empty if none did
        self._file: LedgerFile | None = file
        if file is None and inside is not None:
            self._file = inside._file
        self._outer: tuple[Account, ...] = () if inside is None else inside.accounts
        self._may_refuse = self.caps.limits_calls
        # set when a call is settled; a task that waits for this creates the event
        self._settled: anyio.Event | None = None
        self._refused: anyio.Event | None = None

    @property
    def accounts(self) -> tuple[Account, ...]:
        """Return this account, followed by all accounts that contain it."""
        return (self, *self._outer)

    @contextmanager
    def _reservation(self, most: Amount) -> Generator[_Reservation]:
        number = None if self._file is None else self._file.reserve(self.name, most)
        for account in self.accounts:
            account.reserved += most
        reservation = _Reservation(most)
        try:
            yield reservation
        finally:
            for account in self.accounts:
                account.reserved -= most
                account.spent += reservation.taken
                if not reservation.is_answered:
                    account.unanswered += reservation.taken
                if account._settled is not None:
                    account._settled.set()
                    account._settled = None
                account._report()
            if self._file is not None and number is not None:
                is_answered = reservation.is_answered
                self._file.settle(self.name, number, reservation.taken, is_answered=is_answered)

    def count(self, reply: Completion | Scores) -> None:
        """Add the reply's tokens to `written` and `cached` of this account and of all outer
        accounts. No cap limits these two counts; they are only reported.
        """
        for account in self.accounts:
            account.count_here(reply)

    def count_here(self, reply: Completion | Scores) -> None:
        """Add the reply's tokens to this account only, for example if an earlier session made the
        call.
        """
        self.cached += reply.cached_tokens
        if isinstance(reply, Completion):
            self.written += len(reply.ids)
        elif reply.beginning is not None:
            self.written += len(reply.beginning.ids)

    @contextmanager
    def reserved_now(self, most: Amount) -> Generator[_Reservation]:
        """Reserve `most`, the largest possible cost of a call, for the duration of the block.

        :raises LimitReached: the call, together with all spending and reservations, would exceed a
            cap.
        """
        for account in self.accounts:
            if not account._may_refuse:
                continue
            limit = account.caps.exceeded_by(account.spent + account.reserved + most)
            if limit:
                raise LimitReached(limit, "the cap on cost or tokens does not allow another call")
        with self._reservation(most) as reservation:
            yield reservation

    async def room(self, most: Amount) -> None:
        """Wait until the caps leave room for a call. Calls in flight make room when they spend less
        than they reserved.

        If the call can never fit, this method waits forever. `exhausted` then returns, and its
        caller ends the run or request.
        """
        while True:
            tight: Account | None = None
            for account in self.accounts:
                if not account._may_refuse:
                    continue
                limit = account.caps.exceeded_by(account.spent + most)
                if limit:
                    self.limit = self.limit or limit
                    self._report()
                    await anyio.sleep_forever()
                if account.caps.exceeded_by(account.spent + account.reserved + most):
                    tight = account
            if tight is None:
                return
            if tight._settled is None:
                tight._settled = anyio.Event()
            await tight._settled.wait()

    async def exhausted(self, seconds: float = 0.0) -> str:
        """Wait until a cap has refused a call and no call is in flight, or until `max_seconds` have
        passed.

        Return the name of the cap. `seconds` is the time that earlier sessions took; it counts
        towards `max_seconds`.
        """
        limit = self.caps.max_seconds
        with anyio.move_on_after(math.inf if limit is None else max(0.0, limit - seconds)):
            return await self._refusal()
        self.limit = "max_seconds"
        return self.limit

    async def _refusal(self) -> str:
        while not self.limit or self.reserved.calls:
            self._refused = anyio.Event()
            await self._refused.wait()
        return self.limit

    def _report(self) -> None:
        if self._refused is not None:
            self._refused.set()

    def as_json(self) -> dict[str, Any]:
        """Return the spending as plain data for JSON."""
        spent = self.spent
        plain: dict[str, Any] = {
            "calls": spent.calls,
            "target_tokens": spent.target_tokens,
            "total_tokens": spent.total_tokens,
        }
        if self.prices:
            plain["cost"] = spent.dollars
        if self.unanswered.calls:
            plain["cancelled"] = {
                "calls": self.unanswered.calls,
                "total_tokens_at_most": self.unanswered.total_tokens,
            }
        return plain


class _Reservation:
    """The reservation for one call. Its amount is the call's largest possible cost, until the call
    is answered.
    """

    __slots__ = ("is_answered", "most", "taken")

    def __init__(self, most: Amount) -> None:
        self.most = most
        self.taken = most
        self.is_answered = False

    def answered(self, taken: Amount) -> None:
        """Replace the reserved amount by the tokens and the cost that the call really used."""
        left = self.most - taken
        assert min(left.calls, left.target_tokens, left.total_tokens, left.picodollars) >= 0, (
            f"a call took {taken}, but only {self.most} were reserved"
        )
        self.taken = taken
        self.is_answered = True


@dataclass(slots=True)
class Spending:
    """The spending of an account, with answered and unanswered calls counted separately."""

    answered: Amount = Amount()
    unanswered: Amount = Amount()

    @property
    def total(self) -> Amount:
        """Return the spending on all calls, answered or not."""
        return self.answered + self.unanswered

    def count(self, taken: Amount, *, is_answered: bool) -> None:
        """Add the spending of one call."""
        if is_answered:
            self.answered += taken
        else:
            self.unanswered += taken

    def add(self, other: Spending) -> None:
        """Add the spending of another account."""
        self.answered += other.answered
        self.unanswered += other.unanswered


class LedgerFile:
    """An append-only file of reservations and settlements; it remains complete even if the process
    is killed.

    Every reservation is written before its call is sent. A settlement records what the call really
    cost. A reservation without a settlement is charged in full when the file is opened again.

    A file that grows long is rewritten. The new file has one sum for each account that `keep`
    names, and one sum for all other accounts. It also has the reservations of calls in flight.
    """

    def __init__(
        self, path: Path, *, most_lines: int = 100_000, keep: Collection[str] = ()
    ) -> None:
        self._path = path
        self._most_lines = most_lines
        recorded = _read(path)
        self.total = Amount()  # what earlier sessions spent, summed over all accounts
        self._others = Spending()  # spending of all accounts that are not in `_kept`
        self._kept = {name: Spending() for name in keep}
        for name, spending in recorded.items():
            self.total += spending.total
            self._spending(name).add(spending)
        # for each call in flight, its account and its reservation
        self._open = dict[int, tuple[str, Amount]]()
        self._number = 0
        self._lines = 0
        self._handle = -1
        self._rewrite()

    def reserve(self, name: str, most: Amount) -> int:
        """Write a reservation to the file, and return its number, which `settle` needs."""
        self._number += 1
        self._write(_line("reserve", name, self._number, most))
        self._open[self._number] = name, most
        return self._number

    def settle(self, name: str, number: int, taken: Amount, *, is_answered: bool = True) -> None:
        """Write what a reserved call really cost."""
        self._write(_line("settle" if is_answered else "charge", name, number, taken))
        del self._open[number]
        self._spending(name).count(taken, is_answered=is_answered)
        if self._lines > self._most_lines:
            self._rewrite()

    def keep(self, name: str) -> None:
        """Keep a separate sum for this account from now on, so that the account can be continued
        after a restart.
        """
        self._kept.setdefault(name, Spending())

    def merge(self, name: str) -> None:
        """Add this account's sum to the common sum of all accounts that have no sum of their own.
        The account will not be continued.
        """
        self._others.add(self._kept.pop(name, Spending()))

    def spent_by(self, name: str) -> Spending:
        """Return the spending of an account that has its own sum. Earlier sessions are included."""
        return self._kept[name]

    def _spending(self, name: str) -> Spending:
        return self._kept.get(name, self._others)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
        self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rewrite(self) -> None:
        """Write the file again, with only the sums of accounts and the reservations of calls
        in flight.
        """
        lines = [_line("spent", "", 0, self._others.total)]
        for name, spending in self._kept.items():
            lines.append(_line("spent", name, 0, spending.answered))
            lines.append(_line("charge", name, 0, spending.unanswered))
        for number, (name, most) in self._open.items():
            lines.append(_line("reserve", name, number, most))
        write_atomic(self._path, b"".join(lines), durable=False)
        if self._handle >= 0:
            os.close(self._handle)
        with storage(self._path):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._lines = len(lines)

    def _write(self, line: bytes) -> None:
        with storage(self._path):
            if os.write(self._handle, line) != len(line):
                raise OSError(errno.EIO, "the system did not write all bytes to the file")
        self._lines += 1


def _line(kind: str, name: str, number: int, amount: Amount) -> bytes:
    values = (amount.calls, amount.target_tokens, amount.total_tokens, amount.picodollars)
    return msgspec.json.encode([kind, name, number, *values]) + b"\n"


_decode = msgspec.json.Decoder(tuple[str, str, int, int, int, int, int]).decode


def read_ledger(path: Path) -> dict[str, Amount]:
    """Read a ledger's file, and return the spending of each account.

    An incomplete last line is ignored.

    :raises JournalCorrupt: a line before the last one is damaged.
    """
    return {name: spending.total for name, spending in _read(path).items()}


def _read(path: Path) -> dict[str, Spending]:
    if not path.exists():
        return {}
    with storage(path):
        data = read_ordinary(path)
    spent = dict[str, Spending]()
    open_calls = dict[int, tuple[str, Amount]]()
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            kind, name, call, *values = _decode(line)
        except (msgspec.DecodeError, ValueError) as error:
            if number == len(lines):
                # The process was killed while it wrote the last line. If the line was a
                # reservation, its call was never sent. If it was a settlement, the whole
                # reservation is charged.
                break
            raise JournalCorrupt(path, f"line {number} is damaged") from error
        amount = Amount(*values)
        if kind == "reserve":
            open_calls[call] = name, amount
            continue
        if call:  # A line with number 0 is a sum over earlier calls, so it settles no reservation.
            open_calls.pop(call, None)
        spent.setdefault(name, Spending()).count(amount, is_answered=kind != "charge")
    for name, amount in open_calls.values():
        spent.setdefault(name, Spending()).count(amount, is_answered=False)
    return spent
