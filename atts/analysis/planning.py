"""Advice on settings, computed from recorded runs without a model.

The last part of the module analyses a pilot, which tests if a gate helps a pair of models, and
recommends a method.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from atts.analysis.run_replay import ReplayedProblem, fresh_calibrator, replay_policy
from atts.calibration import Mode
from atts.core import Chunk, Outcome, Rollout, TurnKey, Usage
from atts.errors import OptionError, UsageError, counted
from atts.evaluators import (
    Estimate,
    Power,
    answer_classes,
    compare_runs,
    difference_spread,
    group,
    holm,
    maj_at_k,
    mean_estimate,
    paired_power,
    problems_needed,
    variance_split,
    votes,
)
from atts.journal import (
    CallSpan,
    Decided,
    FinishedProblem,
    Measured,
    RecordedRun,
    RunState,
    open_run,
)
from atts.ledger import PRICES, money_of, recorded_prices
from atts.pipelines import ConformalGate, Policy


@dataclass(frozen=True, slots=True)
class TurnCost:
    """The cost of one turn of a rollout.

    `seconds` includes the time that the turn's calls wait in the queues of the engines.
    """

    draft_tokens: int
    target_tokens: int
    scored_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CompleteRollout:
    """A rollout that ran to its end.

    Rollouts of a problem with equivalent answers have the same `label`; it is None for a rollout
    without an answer.
    """

    sample: int
    turns: tuple[TurnCost, ...]
    label: Hashable | None
    is_right: bool | None  # None if the answer was not graded or could not be scored
    # returns the largest number of turns of this rollout, for the limit on turns of a policy
    turn_limit: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class GradedCase:
    """A graded problem, with its rollouts that ran to their end."""

    problem: str
    rollouts: tuple[CompleteRollout, ...]
    vote: float


_NOTHING = Usage()


@dataclass(slots=True)
class PlanData:
    """The data of a run from which advice is computed; the run may be unfinished."""

    run: RecordedRun
    cases: list[GradedCase] = field(default_factory=list[GradedCase])
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    # the gate's decisions, in the order in which they were made
    decided: dict[TurnKey, Decided] = field(default_factory=dict[TurnKey, Decided])
    # the engine calls, with their times in seconds since the run began
    nodes: list[CallSpan] = field(default_factory=list[CallSpan])
    censored: int = 0  # number of rollouts that were cancelled because the vote was already settled
    usage: Usage = Usage()  # usage of all rollouts, including cancelled rollouts

    @property
    def method(self) -> str:
        """Return the name of the run's method."""
        return str(self.run.setting("method") or "?")

    @property
    def rate(self) -> float:
        """Return the nominal rate of the run."""
        value = self.run.setting("rate")
        return float(value) if isinstance(value, int | float) else float("nan")

    def dollars(self, draft: float, target: float, scored: float) -> float | None:
        """Return the cost in dollars of the tokens of a turn or rollout, or None if a model has no
        price.

        Turns are recorded without their prompt tokens. So the draft's prompt tokens are assumed to
        be proportional to the tokens that the draft writes. The target's prompt tokens are assumed
        to be proportional to the tokens that the target writes and scores.
        """
        usage = self.usage
        prices = recorded_prices(self.run.given(PRICES))
        drafted = replace(_NOTHING, draft_prefill_tokens=usage.draft_prefill_tokens)
        drafted = replace(drafted, draft_tokens=usage.draft_tokens)
        read = replace(_NOTHING, target_prefill_tokens=usage.target_prefill_tokens)
        wrote = replace(_NOTHING, target_tokens=usage.target_tokens)
        shares = (
            (drafted, draft, usage.draft_tokens),
            (read, target + scored, usage.target_tokens + usage.scored_tokens),
            (wrote, target, usage.target_tokens),
        )
        total = 0.0
        for part, amount, of in shares:
            money = 0.0 if part == _NOTHING else money_of(part, prices)
            if money is None:
                return None
            total += money * amount / of if of else 0.0
        return total


def read_plan_data(directory: Path) -> PlanData:
    """Read the directory of a finished or unfinished run.

    :raises JournalError: the directory contains no run, or its run cannot be read.
    :raises UsageError: the run has no problem that is finished and graded.
    """
    data = PlanData(open_run(directory))
    state = RunState()
    seconds: dict[TurnKey, float] = defaultdict(float)
    for entry in data.run.entries():
        outcome = state.apply(entry)
        if outcome is not None and outcome.is_complete:
            data.outcomes.append(outcome)
        match entry.event:
            case CallSpan(source="live", status="done") as node:
                data.nodes.append(state.clock.aligned(node, entry.at))
                seconds[node.problem, node.sample, node.turn] += node.ended - node.ready
            case Decided(decision) as decided if decision.action != "verify":
                data.decided[decision.turn_key] = decided
            case Measured(seconds=float(took)) as measured:
                seconds[measured.problem, measured.sample, 0] += took
            case _:
                pass
    for outcome in data.outcomes:
        data.usage += outcome.usage
        _add_case(data, outcome, state.finished[outcome.problem.id], seconds)
    if not data.cases:
        raise UsageError(
            f"{directory}: no problem has been finished and graded yet, so there is nothing to "
            "plan from; run some problems first"
        )
    return data


def _add_case(
    data: PlanData, outcome: Outcome, brief: FinishedProblem, seconds: Mapping[TurnKey, float]
) -> None:
    """Add a graded problem with its complete rollouts to the data, and count its censored rollouts.

    A problem that is not graded, or has no complete rollout, is not added.
    """
    if brief.verdict is None:
        return
    complete = brief.complete_samples
    data.censored += len(brief.samples) - len(complete)
    by_sample = {rollout.sample: rollout for rollout in outcome.rollouts}
    labels = answer_classes(
        [one.answer for one in complete], partial(group, kind=outcome.problem.kind)
    )
    rollouts = tuple(
        CompleteRollout(
            one.sample,
            _costs(by_sample[one.sample], seconds),
            label,
            None if one.verdict == "unscored" else one.verdict == "correct",
            by_sample[one.sample].turn_limit,
        )
        for one, label in zip(complete, labels, strict=True)
    )
    if rollouts:
        data.cases.append(GradedCase(brief.problem, rollouts, float(brief.is_correct)))


def _costs(rollout: Rollout, seconds: Mapping[TurnKey, float]) -> tuple[TurnCost, ...]:
    """Return the cost of each turn of a rollout."""
    costs = tuple(
        TurnCost(
            turn.tokens_written("draft"),
            turn.tokens_written("target"),
            scored_tokens=turn.scored_tokens,
            seconds=seconds.get((rollout.problem, rollout.sample, turn.index), 0.0),
        )
        for turn in rollout.turns
    )
    is_unsplit = not any(cost.draft_tokens + cost.target_tokens for cost in costs)
    if len(costs) == 1 and is_unsplit:
        # An imported rollout has no token ids to count, so use its recorded numbers of tokens.
        usage = rollout.usage
        return (
            replace(costs[0], draft_tokens=usage.draft_tokens, target_tokens=usage.target_tokens),
        )
    return costs


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of an engine in tokens per second, during the time in which the engine
    works on at least one call.
    """

    engine: str
    calls: int
    seconds_per_call: float  # mean duration of a call, without the time in the queue
    busy_seconds: float
    written_per_second: float
    scored_per_second: float


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """The estimated effect of a different chunk limit: the factors by which a rollout's turn count
    and its seconds would change.
    """

    limit: int
    turns: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkAdvice:
    """The effect of the draft's chunk limit on time.

    The effect on accuracy is not estimated; only another run can measure it.

    `cut` is the share of the draft's chunks that ended because they reached the limit. `fixed` is
    the share of a rollout's seconds that does not depend on token counts. It is estimated by a
    least-squares fit over turns, and `fit` is the R² of this fit.
    """

    limit: int
    cut: float
    fixed: float
    fit: float
    choices: tuple[ChunkChoice, ...]


def speeds(data: PlanData) -> tuple[Speed, ...]:
    """Return the speed of each engine that was called."""
    calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for node in data.nodes:
        if node.engine:
            calls[node.engine].append((node.started, node.ended))
    written = {"draft": data.usage.draft_tokens, "target": data.usage.target_tokens}
    scored = {"target": data.usage.scored_tokens}
    return tuple(
        _speed(engine, spans, written.get(engine, 0), scored.get(engine, 0))
        for engine, spans in sorted(calls.items())
    )


def _speed(engine: str, spans: Sequence[tuple[float, float]], written: int, scored: int) -> Speed:
    busy = _covered(spans)
    own = math.fsum(end - start for start, end in spans)
    per_second = (written / busy, scored / busy) if busy else (0.0, 0.0)
    return Speed(engine, len(spans), own / len(spans), busy, *per_second)


def chunk_advice(data: PlanData) -> ChunkAdvice | None:
    """Estimate how other limits on the draft's chunks would change a rollout's turn count and
    seconds.

    Return None if the run has no such limit, or if the draft wrote nothing.
    """
    limit = data.run.policy.get("chunking", {}).get("draft_tokens")
    drafted = [_drafted(rollout) for outcome in data.outcomes for rollout in outcome.rollouts]
    chunks = [chunk for own in drafted for chunk in own]
    turns = [turn for case in data.cases for rollout in case.rollouts for turn in rollout.turns]
    if not isinstance(limit, int) or not chunks or not turns:
        return None
    per_turn, fit = _fixed_seconds(turns)
    total = math.fsum(turn.seconds for turn in turns)
    fixed = min(1.0, per_turn * len(turns) / total) if total else 0.0
    lengths = [length for own in drafted for length in _uncut_lengths(own)]
    others = (limit // 4, limit // 2, limit * 2, limit * 4)
    choices = tuple(_choice(lengths, limit, other, fixed) for other in others if other)
    return ChunkAdvice(
        limit, sum(chunk.ended == "length" for chunk in chunks) / len(chunks), fixed, fit, choices
    )


def _choice(lengths: Sequence[int], limit: int, other: int, fixed: float) -> ChunkChoice:
    now, then = (sum(math.ceil(length / each) for length in lengths) for each in (limit, other))
    return ChunkChoice(other, then / now, 1 + fixed * (then / now - 1))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the number of seconds that at least one of the time spans covers."""
    total = 0.0
    latest = -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, latest))
        latest = max(end, latest)
    return total


def _drafted(rollout: Rollout) -> list[Chunk]:
    turns = ((turn, chunk) for turn in rollout.turns for chunk in turn.chunks)
    return [chunk for turn, chunk in turns if chunk.author == "draft" and turn.is_written(chunk)]


def _uncut_lengths(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Yield the token counts that the draft's chunks would have without a limit. A chunk that ended
    because it reached the limit is joined to the next chunk.
    """
    length = 0
    for chunk in chunks:
        length += chunk.tokens
        if chunk.ended != "length":
            yield length
            length = 0
    if length:
        yield length


def _fixed_seconds(turns: Sequence[TurnCost]) -> tuple[float, float]:
    """Return the seconds of a turn that do not depend on its token counts, and the R² of the fit.

    The fit is a linear regression of turn seconds on draft and target tokens.
    """
    seconds = np.array([turn.seconds for turn in turns])
    table = np.array([(1.0, turn.draft_tokens, turn.target_tokens) for turn in turns])
    coefficients, *_ = np.linalg.lstsq(table, seconds, rcond=None)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    left = float(((seconds - table @ coefficients) ** 2).sum())
    return max(0.0, float(coefficients[0])), max(0.0, 1 - left / spread) if spread else 0.0


@dataclass(frozen=True, slots=True)
class Option:
    """A number of rollouts and a limit on turns, with the costs and the accuracy that follow from a
    recorded run.

    Costs are means per problem. The accuracy is that of the vote, with a 95 % interval over
    problems. `seconds` is the time from the start of a problem to the end of its last rollout. It
    was measured at the load of the recorded run, and would be shorter at a lower load.
    """

    run: str
    method: str
    rate: float
    samples: int
    turns: int
    is_cut: bool  # True if the limit on turns ends some rollouts earlier than in the recorded run
    accuracy: Estimate
    draft_tokens: float
    target_tokens: float
    scored_tokens: float
    seconds: float
    dollars: float | None = None  # mean cost per problem; None if a model has no price

    @property
    def tokens(self) -> float:
        """Return the total number of tokens written by draft and target."""
        return self.draft_tokens + self.target_tokens


def options(data: PlanData) -> Iterator[Option]:
    """Return one option for each number of rollouts and each limit on turns (1, 2, 4, 8, ...).

    The results of fewer rollouts or turns follow from the recorded rollouts, because a rollout does
    not depend on its siblings or on later turns. Problems with too few complete rollouts are
    omitted from an option. If more than a tenth of the problems would be omitted, the whole option
    is omitted.
    """
    most = max(len(case.rollouts) for case in data.cases)
    longest = max(len(rollout.turns) for case in data.cases for rollout in case.rollouts)
    turns = [1 << power for power in range(longest.bit_length()) if 1 << power < longest] + [
        longest
    ]
    for samples in range(1, most + 1):
        cases = [case for case in data.cases if len(case.rollouts) >= samples]
        if len(cases) >= 0.9 * len(data.cases):
            for limit in turns:
                yield _option(data, cases, samples, limit)


def _option(data: PlanData, cases: Sequence[GradedCase], samples: int, turns: int) -> Option:
    cut = [[_within(rollout, turns) for rollout in case.rollouts] for case in cases]

    def accuracy(unscored: bool) -> Estimate:
        """Return the accuracy of votes that use `samples` rollouts of each problem. `unscored` says
        whether an unscored answer counts as correct.
        """
        judged = [[unscored if right is None else right for _, right in pairs] for pairs in cut]
        ballots = [
            votes([label for label, _ in pairs], right)
            for pairs, right in zip(cut, judged, strict=True)
        ]
        return mean_estimate(maj_at_k(ballots, samples), samples * len(cases))

    kept = [
        [rollout.turns[: rollout.turn_limit(turns)] for rollout in case.rollouts] for case in cases
    ]

    def spent(name: str) -> float:
        """Return the mean cost per problem with `samples` rollouts; `name` selects the kind of
        cost.
        """
        means = [
            math.fsum(getattr(turn, name) for rollout in case for turn in rollout) / len(case)
            for case in kept
        ]
        return samples * math.fsum(means) / len(means)

    waits = [
        _longest([math.fsum(turn.seconds for turn in rollout) for rollout in case], samples)
        for case in kept
    ]
    draft = spent("draft_tokens")
    target = spent("target_tokens")
    scored = spent("scored_tokens")
    return Option(
        str(data.run.directory),
        method=data.method,
        rate=data.rate,
        samples=samples,
        turns=turns,
        is_cut=any(
            len(rollout.turns) > rollout.turn_limit(turns)
            for case in cases
            for rollout in case.rollouts
        ),
        accuracy=accuracy(False).with_best_case(
            accuracy(True), sum(right is None for pairs in cut for _, right in pairs)
        ),
        draft_tokens=draft,
        target_tokens=target,
        scored_tokens=scored,
        seconds=math.fsum(waits) / len(waits),
        dollars=data.dollars(draft, target, scored),
    )


def _within(rollout: CompleteRollout, turns: int) -> tuple[object, bool | None]:
    """Return a rollout's answer class, and whether its answer is correct, if at most `turns` turns
    per rollout are allowed.

    A rollout that needs more turns has no answer and counts as wrong.
    """
    is_whole = len(rollout.turns) <= rollout.turn_limit(turns)
    return (rollout.label, rollout.is_right) if is_whole else (None, False)


def _longest(seconds: Sequence[float], k: int) -> float:
    """Return the expected maximum of k values drawn from `seconds` without replacement.

    >>> _longest([1.0, 2.0, 3.0], 2)
    2.6666666666666665
    """
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    n = len(ordered)
    whole = math.comb(n, k)
    return (
        math.fsum(float(value) * math.comb(place, k - 1) for place, value in enumerate(ordered))
        / whole
    )


def frontier(found: Sequence[Option], cost: str) -> list[Option]:
    """Return the Pareto-optimal options, cheapest first."""
    best = -1.0
    kept = list[Option]()
    for option in sorted(found, key=lambda option: (getattr(option, cost), -option.accuracy.value)):
        if option.accuracy.value > best + 1e-12:
            best = option.accuracy.value
            kept.append(option)
    return kept


RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6)


@dataclass(frozen=True, slots=True)
class UntriedRate:
    """Estimates for a rate that no run has used. They come from a replay in which the gate decides
    again on the recorded scores.

    The answer of a rollout is known only if all of its decisions in the replay are the same as in
    the record. `low` is the accuracy of the vote if all unknown answers are the same wrong answer.
    `high` is the accuracy of the vote if all unknown answers are correct. The target's tokens are
    estimated from the mean number of tokens per recorded takeover.
    """

    rate: float
    realised: float
    # Share of rollouts in which a decision at this rate differs from the recorded decision. The
    # text that would follow this decision is unknown.
    off_policy: float
    low: float
    high: float
    target_tokens: float  # estimated number of tokens per problem that the target writes


def untried_rates(data: PlanData, rates: Sequence[float] = RATES) -> tuple[UntriedRate, ...]:
    """Return estimates for rates that the run did not use.

    The result is empty unless the run used method atts with a conformal gate and escalated at least
    one chunk.
    """
    if data.run.setting("gate") != "ConformalGate" or data.method != "atts":
        return ()
    turns = [
        turn for outcome in data.outcomes for rollout in outcome.rollouts for turn in rollout.turns
    ]
    decisions = [turn.decision for turn in turns if turn.decision is not None]
    escalated = sum(decision.escalate for decision in decisions)
    if not escalated:
        return ()
    tokens = data.usage.target_tokens / escalated * len(decisions) / len(data.outcomes)
    return tuple(
        _untried(data, rate, tokens) for rate in rates if not math.isclose(rate, data.rate)
    )


def _untried(data: PlanData, rate: float, target_tokens: float) -> UntriedRate:
    """Replay the run at one rate, and return the resulting estimates.

    `target_tokens` is the number of target tokens per problem if every chunk escalates.
    """
    mode: Mode = data.run.setting("rate_scope") or "question-turn"
    samples = max((len(outcome.rollouts) for outcome in data.outcomes), default=1)
    gate = ConformalGate(fresh_calibrator(data.run, rate, mode))
    policy = Policy(samples=samples, turns=max(1, data.run.policy.get("turns") or 1))
    done = replay_policy(data.outcomes, gate, policy, _apart, decided=data.decided)
    cases = {case.problem: case for case in data.cases}
    bounds = [_bounds(one, cases[one.problem]) for one in done.problems if one.problem in cases]
    low, high = (math.fsum(pair[end] for pair in bounds) / len(bounds) for end in (0, 1))
    return UntriedRate(rate, done.rate, done.off_policy, low, high, done.rate * target_tokens)


def _bounds(replayed: ReplayedProblem, case: GradedCase) -> tuple[float, float]:
    """Return a lower and an upper bound of the vote's accuracy on one replayed problem.

    The lower bound assumes that all unknown answers are the same wrong answer. The upper bound
    assumes that all unknown answers are correct.
    """
    strayed = {
        rollout.sample for rollout in replayed.rollouts if rollout.off_policy_from is not None
    }
    if not strayed:
        return case.vote, case.vote
    known = [rollout for rollout in case.rollouts if rollout.sample not in strayed]
    unknown = len(replayed.rollouts) - len(known)
    right = _largest(rollout.label for rollout in known if rollout.is_right)
    wrong = _largest(
        rollout.label for rollout in known if not rollout.is_right and rollout.label is not None
    )
    return _share(right, wrong + unknown), _share(right + unknown, wrong)


def _largest(labels: Iterable[Hashable]) -> int:
    return max(Counter(labels).values(), default=0)


def _share(right: int, wrong: int) -> float:
    """Return 1 if the correct answer wins the vote, 0 if it loses, and 0.5 in a tie."""
    return 0.5 if right == wrong and right else float(right > wrong)


def _apart(answers: Sequence[str]) -> list[int]:
    """Put each answer into its own group, because this replay does not use votes and so need not
    find equivalent answers.
    """
    return list(range(len(answers)))


@dataclass(frozen=True, slots=True)
class Cap:
    """The largest cost that a problem may have; None means no limit.

    :raises OptionError: for a cap that is not positive.
    """

    target_tokens: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    dollars: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given:
            if not value > 0 or math.isinf(value):
                raise OptionError(
                    name.replace("_", "-"), f"{value:g} is out of range; give a positive number"
                )

    @property
    def given(self) -> list[tuple[str, float]]:
        """Return the caps that are set, as pairs of the cost's name and its cap."""
        return [(name, value) for name, value in asdict(self).items() if value is not None]

    @property
    def cost(self) -> str:
        """Return the name of the cost by which options are ordered: the first capped cost, or
        `target_tokens` without a cap.
        """
        return self.given[0][0] if self.given else "target_tokens"

    def allows(self, option: Option) -> bool:
        """Return True if no cost of the option exceeds its cap."""
        return all(getattr(option, name) <= value for name, value in self.given)


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice from recorded runs.

    `best` is None if no recorded option stays below the cap; `options` has the Pareto-optimal
    options.
    """

    cap: Cap
    runs: tuple[str, ...]
    problems: int
    rollouts: int
    best: Option | None
    options: tuple[Option, ...]
    other_rates: tuple[UntriedRate, ...]
    chunks: ChunkAdvice | None
    speeds: tuple[Speed, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line: the best setting with its accuracy and cost."""
        best = self.best
        if best is None:
            return f"no recorded setting of {', '.join(self.runs)} stays below the cap"
        return (
            f"{best.method} at rate {best.rate:g}, {counted(best.samples, 'sample')}, "
            f"{counted(best.turns, 'turn')}: accuracy {best.accuracy.brief()}, "
            f"{best.target_tokens:,.0f} target tokens per problem"
        )


def advise(directories: Sequence[Path], cap: Cap | None = None) -> Advice:
    """Compute advice from one recorded run, or from several runs on the same problems at different
    rates.

    :raises JournalError: a directory contains no run, or its run cannot be read.
    :raises UsageError: a run has no graded problem.
    :raises OptionError: the runs have different problems.
    """
    cap = cap or Cap()
    runs = [read_plan_data(directory) for directory in directories]
    if len({data.run.manifest.dataset for data in runs}) > 1:
        raise OptionError(
            "runs", "the runs are on different problems; give only runs on the same dataset"
        )
    candidates = [option for data in runs for option in options(data)]
    if cap.dollars is not None:
        for option in candidates:
            if option.dollars is None:
                raise OptionError(
                    "dollars",
                    f"{option.run} was recorded without the prices of its models; to get costs "
                    "in dollars, start the run with --set prices=FILE",
                )
    allowed = [option for option in candidates if cap.allows(option)]
    best = max(
        allowed,
        key=lambda option: (option.accuracy.value, -getattr(option, cap.cost)),
        default=None,
    )
    main = next((data for data in runs if data.method == "atts"), runs[0])
    return Advice(
        cap,
        runs=tuple(str(data.run.directory) for data in runs),
        problems=len(main.cases),
        rollouts=sum(len(case.rollouts) for case in main.cases),
        best=best,
        options=tuple(frontier(candidates, cap.cost)),
        other_rates=untried_rates(main) if len(runs) == 1 else (),
        chunks=chunk_advice(main),
        speeds=speeds(main),
        notes=tuple(_notes(runs, candidates, best)),
    )


def _gain_notes(runs: Sequence[PlanData]) -> Iterator[str]:
    """Yield a note for each run with a gate, unless the run's rate is 0 or 1.

    The note states the gain over random escalation (a coin) at the same rate. If no run with such a
    coin is given, the note names the run that is needed to measure the gain.
    """
    coins = {data.rate: data for data in runs if data.method == "coin"}
    for data in runs:
        if data.method in ("coin", "draft-only", "target-only", "exact"):
            continue
        # At a rate of 0 or 1 all chunks have the same action, so the gate cannot be better than a
        # coin.
        if not 0 < data.rate < 1:
            continue
        coin = coins.get(data.rate)
        if coin is None:
            yield (
                "It is not known whether the score chooses better chunks than a coin at rate "
                f"{data.rate:g}. To find out, start a run with --method coin --rate {data.rate:g}, "
                "and plan from both runs."
            )
            continue
        ours = _shares(data)
        theirs = _shares(coin)
        common = [name for name in ours if name in theirs]
        gain = compare_runs([theirs[name] for name in common], [ours[name] for name in common])
        yield (
            f"Gain of {data.method} over random escalation (coin) at rate {data.rate:g}: "
            f"{gain.difference.signed()} in accuracy of single rollouts "
            f"({counted(len(common), 'problem')})."
        )


def _power_notes(runs: Sequence[PlanData]) -> Iterator[str]:
    """Yield notes on the variance components of the first run, and on the smallest difference that
    such a run can detect.
    """
    first = runs[0]
    split = variance_split(list(_verdicts(first).values()))
    if split is None or len(first.cases) < 2:
        return
    yield f"Variance: {split}."
    if not split.within > 0:
        return
    spread: float | None = None
    if len(runs) > 1:
        ours = _verdicts(first)
        theirs = _verdicts(runs[1])
        common = [name for name in ours if name in theirs]
        spread = difference_spread(
            [ours[name] for name in common], [theirs[name] for name in common]
        )
    samples = max(len(case.rollouts) for case in first.cases)
    power = paired_power(split, len(first.cases), samples, spread or 0.0)
    basis = (
        "computed from how much the difference between the first two runs varies across problems"
    )
    if spread is None:
        basis = (
            "these numbers are lower bounds, because a single run does not show how much "
            "differences vary across problems"
        )
    yield f"Power: {power}; {basis}."
    yield (
        "For the same number of tokens, more problems reveal smaller differences than more "
        "samples per problem: first use all problems, then as many samples per problem as the "
        "tokens allow."
    )


def _verdicts(data: PlanData) -> dict[str, list[bool]]:
    """Return for each problem which rollouts are correct; an unscored rollout counts as wrong."""
    return {case.problem: [bool(one.is_right) for one in case.rollouts] for case in data.cases}


def _shares(data: PlanData) -> dict[str, float]:
    """Return for each problem the share of correct rollouts; an unscored rollout counts as wrong."""
    return {name: sum(row) / len(row) for name, row in _verdicts(data).items()}


def _notes(runs: Sequence[PlanData], found: Sequence[Option], best: Option | None) -> list[str]:
    notes = [
        "Each accuracy is an average over all subsets of the recorded rollouts. The best of "
        f"{counted(len(found), 'option')} was chosen for its high measured accuracy, which is "
        "therefore slightly overestimated.",
        "Costs are upper bounds, because they include rollouts that would be cancelled once "
        "the vote is settled. Seconds were measured under the load of the recorded runs.",
    ]
    if censored := sum(data.censored for data in runs):
        notes.append(
            f"The plan leaves out {counted(censored, 'rollout')} cancelled because the vote was "
            "already settled. Accuracies for fewer samples are therefore biased towards fast "
            "rollouts; a run with --early-stop none avoids this bias."
        )
    notes += _gain_notes(runs)
    notes += _power_notes(runs)
    if best is not None and not math.isnan(best.accuracy.low):
        wide = best.accuracy.high - best.accuracy.low
        if wide > 0.15:
            notes.append(
                f"The 95 % interval of the best option's accuracy is {wide:.2f} wide; run more "
                "problems to make it narrower."
            )
    return notes


LEVEL = 0.05
"""The significance level. A gain is significant if its p-value is below this level, after Holm's
correction for the number of tested gains.
"""
CHEAP = 0.1
"""The assumed cost of a token that the target scores or the draft writes, relative to a token that
the target decodes.

A token that the target samples while it scores has the same cost.
"""
# The gain is the accuracy (0 to 1) of the target minus that of the draft. If the gain's interval
# includes 0 and ends below this value, the pilot says that the target is not better.
_SMALL = 0.03
# Method `exact` is recommended only if it costs at most this fraction of `target-only`. Both
# methods write the same text, so a nearly equal cost is a tie, and the simpler method wins.
_CHEAPER = 0.95
# settings of a pilot's arms that have no option of their own in `atts eval`
_SET_ONLY = ("score.kind", "takeover", "escalates")
Take = Literal["gate", "exact", "target-only", "draft-only", "undecided"]


@dataclass(frozen=True, slots=True)
class PilotArm:
    """One method of a pilot with its results; `flags` has the command-line options for a run with
    the method.
    """

    name: str
    flags: Mapping[str, object]
    # keyed by problem: for each graded rollout, True if its answer is correct
    correct: Mapping[str, Sequence[bool]]
    usage: Usage
    rate: float  # realised rate of the arm's run; NaN if the method escalates no chunks
    # name of the arm with which this arm is compared; in that arm, a coin decides which chunks
    # escalate
    coin: str = ""
    unavailable: str = ""  # the reason why the method cannot run with these models; "" if it can

    @property
    def shares(self) -> dict[str, float]:
        """Return for each problem the share of correct rollouts."""
        return {name: sum(row) / len(row) for name, row in self.correct.items() if row}

    @property
    def cost(self) -> float:
        """Return the mean cost per problem, in tokens decoded by the target; cheaper tokens are
        weighted by `CHEAP`.
        """
        usage = self.usage
        decoded = usage.target_tokens - usage.drawn_tokens
        cheap = usage.drawn_tokens + usage.scored_tokens + usage.draft_tokens
        return (decoded + CHEAP * cheap) / max(1, len(self.correct))


@dataclass(frozen=True, slots=True)
class PilotRow:
    """The results of one arm of a pilot; `p_value` is corrected for the number of tested gains."""

    arm: PilotArm
    accuracy: Estimate  # share of correct rollouts
    # accuracy of this arm minus accuracy of the arm `arm.coin`, where a coin decides
    gain: Estimate | None
    p_value: float
    cost: float
    # additional cost per percentage point of accuracy, compared with the draft alone; infinite if
    # the accuracy is not higher
    cost_per_point: float
    # number of problems that show a gain of this size with 80 % power, after Holm's correction;
    # None if the gain's interval is not above 0
    problems_needed: int | None

    @property
    def helps(self) -> bool:
        """Return whether the gate is significantly better than a coin of the same policy and rate."""
        return self.gain is not None and self.gain.value > 0 and self.p_value < LEVEL


@dataclass(frozen=True, slots=True)
class PilotReport:
    """The measurements of a pilot, and its recommendation with command-line options and a reason.

    If the pilot is undecided, `flags` are those of the best method without a gate, and `undecided`
    is the row of the gate whose gain needs more problems.
    """

    rows: tuple[PilotRow, ...]
    unavailable: tuple[PilotArm, ...]
    headroom: Estimate  # accuracy of the target alone minus accuracy of the draft alone
    power: Power | None
    take: Take
    flags: Mapping[str, object]
    reason: str
    undecided: PilotRow | None

    def __str__(self) -> str:
        """Return one line: the recommendation and its reason."""
        if self.take == "undecided":
            return f"undecided: {self.reason}"
        return f"take {'the gate' if self.take == 'gate' else self.take}: {self.reason}"

    def row(self, name: str) -> PilotRow | None:
        """Return the row of the arm with that name; None if there is no such arm."""
        return next((row for row in self.rows if row.arm.name == name), None)


def judge_pilot(arms: Sequence[PilotArm]) -> PilotReport:
    """Compare the arms of a pilot problem by problem, and recommend one of the arms.

    :raises UsageError: the arms lack the draft alone or the target alone, or no problem was graded.
    """
    by_name = {arm.name: arm for arm in arms if not arm.unavailable}
    if "draft-only" not in by_name or "target-only" not in by_name:
        raise UsageError(
            "a pilot needs one run with method draft-only and one with method target-only"
        )
    draft = by_name["draft-only"]
    target = by_name["target-only"]
    if len(draft.shares) < 2:
        raise UsageError("a pilot needs at least two problems with reference answers")
    headroom = _difference(draft, target)
    compared = {
        name: compare_runs(*_paired(by_name[arm.coin], arm))
        for name, arm in by_name.items()
        if arm.coin in by_name
    }
    corrected = dict(zip(compared, holm([one.p_value for one in compared.values()]), strict=True))
    rows = tuple(
        PilotRow(
            arm,
            mean_estimate(list(arm.shares.values()), sum(map(len, arm.correct.values()))),
            gain=compared[name].difference if name in compared else None,
            p_value=corrected.get(name, math.nan),
            cost=arm.cost,
            cost_per_point=_cost_per_point(draft, arm),
            problems_needed=_problems_needed(arm, by_name.get(arm.coin), len(compared)),
        )
        for name, arm in by_name.items()
    )
    take, best, reason = _recommend(rows, headroom)
    undecided = None
    if take == "undecided":
        undecided = best
        best = _without_gate(rows)
    split = variance_split(list(target.correct.values()))
    samples = max(map(len, target.correct.values()))
    power = None
    if split is not None and split.within > 0:
        power = paired_power(split, len(target.correct), samples)
    unavailable = tuple(arm for arm in arms if arm.unavailable)
    return PilotReport(
        rows,
        unavailable,
        headroom,
        power,
        take=take,
        flags=best.arm.flags,
        reason=reason,
        undecided=undecided,
    )


def _paired(first: PilotArm, second: PilotArm) -> tuple[list[float], list[float]]:
    """Return one list per arm: its shares of correct rollouts on the problems that both arms have."""
    ours = first.shares
    theirs = second.shares
    common = [name for name in ours if name in theirs]
    return [ours[name] for name in common], [theirs[name] for name in common]


def _difference(first: PilotArm, second: PilotArm) -> Estimate:
    return compare_runs(*_paired(first, second)).difference


def _cost_per_point(draft: PilotArm, arm: PilotArm) -> float:
    """Return the extra cost per percentage point of accuracy gained over the draft alone; infinity
    if nothing is gained.
    """
    points = 100 * _difference(draft, arm).value
    return (arm.cost - draft.cost) / points if points > 0 else math.inf


def _problems_needed(arm: PilotArm, coin: PilotArm | None, tested: int) -> int | None:
    """Return the number of problems that a gain of the measured size needs to be significant among
    `tested` gains; None if the interval of the gain is not above 0.
    """
    if coin is None:
        return None
    randomly, ours = _paired(coin, arm)
    if not compare_runs(randomly, ours).difference.low > 0:
        return None
    gains = np.subtract(ours, randomly)
    deviation = float(gains.std(ddof=1))
    return problems_needed(deviation, float(gains.mean()), level=1 - LEVEL / tested)


def _without_gate(rows: Sequence[PilotRow]) -> PilotRow:
    """Return the row of `exact` if `exact` is clearly cheaper than `target-only`, or else the row of
    `target-only`.
    """
    by_name = {row.arm.name: row for row in rows}
    target = by_name["target-only"]
    exact = by_name.get("exact")
    if exact is not None and exact.cost <= _CHEAPER * target.cost:
        return exact
    return target


def _recommend(rows: Sequence[PilotRow], headroom: Estimate) -> tuple[Take, PilotRow, str]:
    """Return the kind of recommendation, the row of the recommended arm, and the reason in a
    sentence.

    If the pilot is undecided, the row is that of the gate whose gain needs more problems.
    """
    draft = next(row for row in rows if row.arm.name == "draft-only")
    whole = f"the headroom is {headroom.signed()} in accuracy of single rollouts"
    if not headroom.low > 0:
        if headroom.high < _SMALL:
            return "draft-only", draft, f"the target is not more accurate than the draft: {whole}"
        more = (
            f"{whole}; with more problems, the headroom could turn out to be as large as "
            f"{headroom.high:.2f}"
        )
        return (
            "draft-only",
            draft,
            f"the pilot does not show that the target is more accurate: {more}",
        )
    whole_target = _without_gate(rows)
    alone: Take = "exact" if whole_target.arm.name == "exact" else "target-only"
    helpful = [row for row in rows if row.helps]
    if not helpful:
        tested = counted(sum(row.gain is not None for row in rows), "gate")
        promising = [
            row
            for row in rows
            if row.gain is not None
            and row.gain.low > 0
            and row.cost_per_point < whole_target.cost_per_point
        ]
        if promising:
            gate = min(promising, key=lambda row: row.problems_needed or math.inf)
            return (
                "undecided",
                gate,
                f"{_gain_words(gate)}, but the gain is not significant after the correction for "
                f"{tested} (p = {gate.p_value:.2g}); {_prices(gate, whole_target)}",
            )
        known = f"among {tested}, none is shown to be better than a coin with the same rate"
        return (
            alone,
            whole_target,
            f"{known}, and the target is more accurate than the draft: {whole}",
        )
    best = min(helpful, key=lambda row: (row.cost_per_point, -row.accuracy.value))
    if best.cost_per_point < whole_target.cost_per_point:
        return "gate", best, f"{_gain_words(best)}; {_prices(best, whole_target)}"
    return (
        alone,
        whole_target,
        f"{_gain_words(best)}, but {alone} costs less per percentage point of accuracy: "
        f"{_prices(best, whole_target)}",
    )


def _gain_words(gate: PilotRow) -> str:
    """Return the gate's gain over its coin as a clause."""
    gain = "" if gate.gain is None else gate.gain.signed()
    return f"{gate.arm.name} is more accurate than a coin with the same rate by {gain}"


def _prices(gate: PilotRow, alone: PilotRow) -> str:
    """Return the price of accuracy with the gate and without a gate, as a clause."""
    return (
        f"each percentage point of accuracy above the draft costs {gate.cost_per_point:,.1f} "
        f"tokens per problem with {gate.arm.name}, and {alone.cost_per_point:,.1f} with "
        f"{alone.arm.name}"
    )


def pilot_lines(report: PilotReport) -> list[str]:
    """Return a pilot's report as text lines: the table, the recommendation and the reason."""
    names = [row.arm.name for row in report.rows] + [arm.name for arm in report.unavailable]
    wide = max(map(len, names)) + 2
    lines = [
        f"{'':<{wide}}{'accuracy':<24}{'gain over a coin':<26}{'p':>7}{'rate':>7}{'cost':>9}"
        f"{'per point':>11}"
    ]
    for row in report.rows:
        gain = "" if row.gain is None else row.gain.signed()
        p_value = "" if math.isnan(row.p_value) else f"{row.p_value:.2g}"
        rate = "" if math.isnan(row.arm.rate) else f"{row.arm.rate:.2f}"
        per_point = "" if math.isinf(row.cost_per_point) else f"{row.cost_per_point:,.1f}"
        lines.append(
            f"{row.arm.name:<{wide}}{row.accuracy.brief():<24}{gain:<26}{p_value:>7}{rate:>7}"
            f"{row.cost:>9,.0f}{per_point:>11}"
        )
    lines += [f"{arm.name:<{wide}}not run: {arm.unavailable}" for arm in report.unavailable]
    lines += [
        "",
        *_recommendation(report),
        f"Reason: {report.reason}.",
        "",
        f"Headroom: the target's accuracy minus the draft's, {report.headroom.signed()}.",
    ]
    if report.power is not None:
        lines.append(f"Power: {report.power}.")
    tried = sum(row.gain is not None for row in report.rows)
    return [
        *lines,
        "Accuracies are those of single rollouts. Brackets are 95 % intervals over problems. A "
        "coin escalates at random. Each gain is relative to a coin with the same policy and "
        "rate.",
        f"p: p-value of the gain, corrected by Holm's method for {tried} gates. The accuracy of "
        "the best of several methods is slightly overestimated.",
        "Cost per problem: number of tokens that the target decodes, plus a tenth of all other "
        "tokens (tokens of the draft, and tokens that the target scores or samples while scoring).",
        "Per point: additional cost per problem, compared with draft-only, for each percentage "
        "point of accuracy above draft-only.",
    ]


def _recommendation(report: PilotReport) -> list[str]:
    """Return the lines with the recommended method, or with the number of problems that an
    undecided pilot needs.
    """
    if report.undecided is None:
        name = "the gate" if report.take == "gate" else report.take
        return [f"Take {name}: {_options(report.flags)}"]
    gate = report.undecided
    needed = gate.problems_needed
    more = "" if needed is None else f" with about {needed:,} problems (--limit {needed})"
    return [
        f"Undecided between {gate.arm.name} and {report.flags['method']}: run a new pilot{more}.",
        f"To use {gate.arm.name}: {_options(gate.arm.flags)}",
        f"To use {report.flags['method']}: {_options(report.flags)}",
    ]


def _options(flags: Mapping[str, object]) -> str:
    """Return settings as options of `atts eval`."""
    return " ".join(
        f"--set {name}={value}" if name in _SET_ONLY else f"--{name} {value}"
        for name, value in flags.items()
    )
