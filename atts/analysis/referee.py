"""The comparison of stopping rules on the rollouts of a run, by their cost and their accuracy.

A rule decides how many rollouts to use, and which answer to give. The first part of the module has
the rules of atts, of other tools and of papers. Rollouts arrive one at a time in random orders,
which are the same for all rules.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atts.core import Outcome
from atts.errors import JournalError, OptionError
from atts.evaluators import (
    Comparison,
    Estimate,
    answer_classes,
    compare_runs,
    group,
    mean_estimate,
    problems_needed,
)
from atts.journal import FinishedProblem, Measured, RecordedRun, RunState
from atts.pipelines import Tally, settled_probability
from atts.sampling import Seed, beta_tails, generator, student_quantile

NO_ANSWER = -1
SURE = 0.95
_DOUBLING_SHARE = 0.75
_ESC_WINDOW = 5
_CERTAINDEX = 0.8
_CERTAINDEX_FROM = 4
_WARMUP = 16
_KEPT_ONLINE = 0.9


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The rollouts of a problem in their order of arrival.

    `labels` has each rollout's answer class, or NO_ANSWER. `scores` has the values of each recorded
    score, where higher is better.
    """

    labels: Sequence[int]
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Taken:
    """The decision of a stopping rule: the number of rollouts that it used, and the answer class
    that it chose.
    """

    used: int
    label: int
    # index of the rollout whose answer is used; None if the rule uses a vote
    rollout: int | None = None


Play = Callable[[Arrivals], Taken]


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """A stopping rule with its name; `whose` names the tool or paper from which the rule comes."""

    name: str
    about: str
    play: Play
    whose: str = ""


def majority(labels: Sequence[int]) -> int:
    """Return the answer class with the most votes, or NO_ANSWER if there are no votes. In a tie,
    the class that appears first wins.

    >>> majority([2, NO_ANSWER, 1, 1, 2]), majority([NO_ANSWER])
    (2, -1)
    """
    counts = Counter(label for label in labels if label != NO_ANSWER)
    return max(counts, key=counts.__getitem__, default=NO_ANSWER)


def fixed(size: int) -> StoppingRule:
    """Return the rule that always uses `size` rollouts."""

    def play(arrivals: Arrivals) -> Taken:
        used = min(size, len(arrivals))
        return Taken(used, majority(arrivals.labels[:used]))

    about = (
        f"the vote of the first {size} rollouts" if size > 1 else "the answer of the first rollout"
    )
    return StoppingRule(f"fixed {size}", about, play)


def take_all(arrivals: Arrivals) -> Taken:
    """Use every rollout, and return the answer with the most votes."""
    return Taken(len(arrivals), majority(arrivals.labels))


Stops = Callable[[Sequence[int], int], bool]
"""A function that decides after each rollout whether to stop. Its arguments are the answers' vote
counts, in descending order, and the number of rollouts that have not arrived yet.
"""


def _one_by_one(stops: Stops) -> Play:
    """Return a rule that calls `stops` with the votes so far after every rollout."""

    def play(arrivals: Arrivals) -> Taken:
        counts = Counter[int]()
        for used, label in enumerate(arrivals.labels, 1):
            if label != NO_ANSWER:
                counts[label] += 1
                votes = sorted(counts.values(), reverse=True)
                if stops(votes, len(arrivals) - used):
                    return Taken(used, majority(arrivals.labels[:used]))
        return take_all(arrivals)

    return play


def _is_certain(votes: Sequence[int], left: int) -> bool:
    second = votes[1] if len(votes) > 1 else 0
    return votes[0] - second > left


def _is_likely(votes: Sequence[int], left: int) -> bool:
    return _settled(tuple(votes), left) >= SURE


@lru_cache(maxsize=1 << 16)
def _settled(votes: tuple[int, ...], left: int) -> float:
    """Return the probability that the answer with the most votes still has the most votes after
    `left` more rollouts.
    """
    names = tuple(map(str, range(len(votes))))
    return settled_probability(Tally(names, tuple(map(float, votes)), votes), left)


def _is_beta_sure(votes: Sequence[int], left: int) -> bool:
    return _beta(votes[0], votes[1] if len(votes) > 1 else 0) >= SURE


@lru_cache(maxsize=1 << 16)
def _beta(first: int, second: int) -> float:
    """Return the probability that the leading answer is truly more frequent than the second answer.

    This is the posterior probability that its share of the votes for these two answers exceeds one
    half, under a uniform prior.

    >>> round(_beta(4, 0), 5)
    0.96875
    """
    return beta_tails(0.5, first + 1, second + 1)[1]


def _doubling(arrivals: Arrivals) -> Taken:
    """Check after 2, 4, 8, ... rollouts, and stop if a large enough share of them gave the same
    answer.
    """
    used = 2
    while used < len(arrivals):
        labels = arrivals.labels[:used]
        winner = majority(labels)
        if winner != NO_ANSWER and labels.count(winner) >= _DOUBLING_SHARE * used:
            return Taken(used, winner)
        used *= 2
    return take_all(arrivals)


def _windows(arrivals: Arrivals) -> Taken:
    """Check after each window of rollouts, and stop if all rollouts of the window gave the same
    answer.
    """
    for end in range(_ESC_WINDOW, len(arrivals), _ESC_WINDOW):
        window = set(arrivals.labels[end - _ESC_WINDOW : end])
        if len(window) == 1 and NO_ANSWER not in window:
            return Taken(end, majority(arrivals.labels[:end]))
    return take_all(arrivals)


def _certaindex(votes: Sequence[int], left: int) -> bool:
    """Return True if the votes agree enough to stop.

    Their entropy must be small compared with the largest possible entropy, which as many votes have
    if all their answers differ.
    """
    total = sum(votes)
    if total < _CERTAINDEX_FROM:
        return False
    entropy = -sum(count / total * math.log(count / total) for count in votes)
    return 1 - entropy / math.log(total) >= _CERTAINDEX


ONE_BY_ONE: tuple[StoppingRule, ...] = (
    StoppingRule(
        "exact", "stops when the remaining rollouts cannot change the vote", _one_by_one(_is_certain),
        "atts, early_stop=certain",
    ),
    StoppingRule(
        "likely", f"stops when the leading answer will keep its lead with probability {SURE:g} or "
                  "more",
        _one_by_one(_is_likely), "atts, early_stop=likely",
    ),
    StoppingRule(
        "beta", "stops when the leading answer is truly more frequent than the second one with "
                f"probability {SURE:g} or more",
        _one_by_one(_is_beta_sure), "Adaptive-Consistency; named Beta in its_hub",
    ),
    StoppingRule(
        "doubling", f"checks after 2, 4, 8, ... rollouts, and stops if {100 * _DOUBLING_SHARE:g} % "
                    "of the answers are the same",
        _doubling, "Adaptive in its_hub",
    ),
    StoppingRule(
        "windows", f"stops when all {_ESC_WINDOW} rollouts of a window (consecutive rollouts) give "
                   "the same answer",
        _windows, "ESC",
    ),
    StoppingRule(
        "certaindex",
        f"stops when n >= {_CERTAINDEX_FROM} answers have arrived and 1 - H / log n is at least "
        f"{_CERTAINDEX:g}, where H is the entropy of the answers",
        _one_by_one(_certaindex), "Dynasor",
    ),
)  # fmt: skip
"""The rules that use only the answers of rollouts, and no scores."""


def best_of_n(score: str) -> StoppingRule:
    """Return the rule that selects the rollout with the best score."""

    def play(arrivals: Arrivals) -> Taken:
        values = arrivals.scores[score]
        best = max(range(len(arrivals)), key=values.__getitem__)
        return Taken(len(arrivals), arrivals.labels[best], best)

    return StoppingRule(f"best of n by {score}", "the rollout with the highest score", play)


def weighted_vote(score: str) -> StoppingRule:
    """Return the rule that weights each vote by a score."""

    def play(arrivals: Arrivals) -> Taken:
        return Taken(len(arrivals), heaviest(arrivals.labels, arrivals.scores[score]))

    return StoppingRule(
        f"weighted by {score}", "each vote is weighted by the score of its rollout", play
    )


def borda_vote(score: str) -> StoppingRule:
    """Return the rule that weights each vote by the rank of its score; the best score has the
    largest weight.
    """

    def play(arrivals: Arrivals) -> Taken:
        order = sorted(range(len(arrivals)), key=arrivals.scores[score].__getitem__)
        ranks = [0.0] * len(arrivals)
        for rank, place in enumerate(order, 1):
            ranks[place] = float(rank)
        return Taken(len(arrivals), heaviest(arrivals.labels, ranks))

    return StoppingRule(
        f"Borda vote with {score}",
        "each vote is weighted by the rank of its rollout's score",
        play,
        "self-certainty",
    )


def deepconf_offline(score: str, kept: float) -> StoppingRule:
    """Return the rule that lets only the most confident rollouts vote, weighted by confidence."""

    def play(arrivals: Arrivals) -> Taken:
        values = arrivals.scores[score]
        bar = float(np.percentile(values, 100 * (1 - kept)))
        weights = [value if value >= bar else 0.0 for value in values]
        return Taken(len(arrivals), heaviest(arrivals.labels, weights))

    about = (
        f"only the {100 * kept:g} % of rollouts with the highest {score} may vote, and votes are "
        f"weighted by {score}"
    )
    return StoppingRule(f"deepconf offline {100 * kept:g}", about, play, "DeepConf")


def deepconf_online(score: str) -> StoppingRule:
    """Return the rule that leaves out the votes of rollouts whose confidence is lower than that of
    most of the first rollouts.

    The rule stops when one answer has nearly all of the weight. Its cost is an upper bound: the
    tokens of the left-out rollouts are counted in full, but the original method stops these
    rollouts early.
    """

    def play(arrivals: Arrivals) -> Taken:
        values = arrivals.scores[score]
        first = min(_WARMUP, max(1, len(arrivals) // 2))
        bar = float(np.percentile(values[:first], 100 * (1 - _KEPT_ONLINE)))
        weights: list[float] = []
        for used in range(1, len(arrivals) + 1):
            value = values[used - 1]
            weights.append(value if value >= bar else 0.0)
            if used >= first:
                by_label = _weights(arrivals.labels[:used], weights)
                total = math.fsum(by_label.values())
                if total > 0 and max(by_label.values()) >= SURE * total:
                    return Taken(used, heaviest(arrivals.labels[:used], weights))
        return Taken(len(arrivals), heaviest(arrivals.labels, weights))

    about = (
        f"ignores rollouts that are less confident than {100 * _KEPT_ONLINE:g} % of the first "
        f"rollouts; stops when one answer has {100 * SURE:g} % of the weight of all votes"
    )
    return StoppingRule("deepconf online", about, play, "DeepConf")


def _weights(labels: Sequence[int], weights: Sequence[float]) -> dict[int, float]:
    by_label: dict[int, float] = {}
    for label, weight in zip(labels, weights, strict=True):
        if label != NO_ANSWER:
            by_label[label] = by_label.get(label, 0.0) + weight
    return by_label


def heaviest(labels: Sequence[int], weights: Sequence[float]) -> int:
    """Return the answer class with the largest total weight; in a tie, the class that appears first
    wins.

    >>> heaviest([0, 1, 1, NO_ANSWER], [5.0, 2.0, 2.0, 9.0])
    0
    """
    by_label = _weights(labels, weights)
    return max(by_label, key=by_label.__getitem__, default=NO_ANSWER)


Floats = NDArray[np.float64]
Unit = Literal["samples", "tokens", "seconds", "dollars"]
UNITS: tuple[Unit, ...] = ("samples", "tokens", "seconds", "dollars")
CONFIDENCE = "confidence"
"""The name of a rollout's confidence score: the geometric mean of its tokens' probabilities."""
ORACLE = "pass@n"
ALL = "all"
# largest number of rollouts per problem in an order of arrival, unless the user sets a number
_MOST_ROLLOUTS = 64
_POINT = 0.01
_ORDERS = 200
_FEWEST_ORDERS = 20
# Largest number of simulated orders of arrival, summed over all problems. Nevertheless each problem
# gets at least `_FEWEST_ORDERS` orders.
_PLAYED = 100 * _ORDERS


@dataclass(frozen=True, slots=True)
class PlayedRollout:
    """A recorded rollout with the data that stopping rules use."""

    label: int  # index of the class of equal answers that contains the rollout's answer
    is_right: float  # 1 if the answer is correct, 0 if it is wrong or unscored
    # the costs of the rollout, one for each of UNITS; NaN if a cost is not known
    costs: tuple[float, float, float, float]
    scores: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PlayedProblem:
    """A problem, with its rollouts that ran to their end."""

    name: str
    rollouts: tuple[PlayedRollout, ...]

    def right(self) -> dict[int, float]:
        """Return one value per answer class: 1.0 if most of its rollouts were graded as correct,
        otherwise 0.0.
        """
        verdicts: dict[int, list[float]] = defaultdict(list)
        for rollout in self.rollouts:
            verdicts[rollout.label].append(rollout.is_right)
        right = {label: float(np.mean(values) > 0.5) for label, values in verdicts.items()}
        return {**right, NO_ANSWER: 0.0}


@dataclass(frozen=True, slots=True)
class RuleRow:
    """The result of one stopping rule over all problems and all orders of arrival.

    Costs are means per problem, or NaN if they are unknown.

    `against_all` is the accuracy minus the accuracy of the vote of all rollouts. `against_fixed` is
    the accuracy minus the accuracy of a fixed number of rollouts with the same mean cost.
    `problems_for_a_point` is the number of problems needed to detect a loss of 1 percentage point
    with 80 % power. The loss is measured against the vote of all rollouts.
    """

    rule: str
    about: str
    whose: str
    accuracy: Estimate
    samples: Estimate
    tokens: float
    seconds: float
    dollars: float
    # share of simulated votes in which the rule's answer differs from the answer of all rollouts
    changed: Estimate
    against_all: Comparison | None
    against_fixed: Comparison | None
    problems_for_a_point: int | None

    def as_json(self) -> dict[str, Any]:
        """Return the result as data for JSON."""
        names = ("rule", "about", "whose", "tokens", "seconds", "dollars", "problems_for_a_point")
        plain: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in ("accuracy", "samples", "changed"):
            plain[name] = getattr(self, name).as_json()
        for name in ("against_all", "against_fixed"):
            compared = getattr(self, name)
            plain[name] = None if compared is None else compared.difference.as_json()
        return plain


@dataclass(frozen=True, slots=True)
class Referee:
    """The results of all rules on one run."""

    rows: tuple[RuleRow, ...]
    problems: int
    rollouts: int  # number of recorded rollouts that ran to their end, over all problems
    most: int  # largest number of rollouts that a simulation uses of one problem
    orders: int
    seed: int
    unit: Unit  # the unit of cost for comparisons of rules at the same mean cost
    # number of rollouts that are not used, because they were stopped before they could answer
    censored: int
    ungraded: int  # number of problems that are not used, because they are not graded
    scores: tuple[str, ...] = ()  # names of the scores that were recorded for every rollout


@dataclass(frozen=True, slots=True)
class RefereeOptions:
    """The options of a comparison of rules: the rules, the number of rollouts per problem, and the
    number of orders of arrival.

    :raises OptionError: for a number that is not positive, or an unknown unit.
    """

    rules: Sequence[str] = ()  # names of the rules to compare; if empty, all rules are compared
    samples: int | None = None
    # Number of simulated orders of arrival per problem. None means 200, or fewer if there are more
    # than 100 problems, because means over many problems need fewer orders.
    orders: int | None = None
    seed: int = 0
    unit: Unit = "samples"

    def __post_init__(self) -> None:
        if self.orders is not None and self.orders < 1:
            raise OptionError(
                "--orders", f"{self.orders} is too few random orders; give at least 1"
            )
        if self.samples is not None and self.samples < 2:
            raise OptionError(
                "--samples",
                f"{self.samples} is too few rollouts to apply a rule to; give at least 2",
            )
        if self.unit not in UNITS:
            raise OptionError("--match", f"{self.unit!r} is unknown", UNITS)


def referee_run(run: RecordedRun, options: RefereeOptions | None = None) -> Referee:
    """Apply every rule to a run's rollouts.

    :raises OptionError: an unknown rule, or a unit of cost that was not recorded.
    :raises JournalError: no problem is finished and graded, or the journal cannot be read.
    """
    options = options or RefereeOptions()
    problems, censored, ungraded = read_rollouts(run)
    if not problems:
        raise JournalError(
            run.directory,
            "no problem is finished and graded, so there is nothing to compare the rules on",
            "Problems need reference answers; `atts import --dataset NAME` adds them to "
            "imported problems",
        )
    played = referee(problems, options)
    return replace(played, censored=censored, ungraded=ungraded)


def read_rollouts(run: RecordedRun) -> tuple[list[PlayedProblem], int, int]:
    """Return the graded problems, the number of rollouts that were stopped before they answered,
    and the number of ungraded problems.
    """
    state = RunState()
    outcomes: dict[str, list[_Read]] = {}
    kinds: dict[str, Any] = {}
    measured: dict[str, dict[int, Measured]] = defaultdict(dict)
    for entry in run.entries():
        if isinstance(entry.event, Measured):
            measured[entry.event.problem][entry.event.sample] = entry.event
        outcome = state.apply(entry)
        if outcome is not None:
            name = outcome.problem.id
            outcomes[name] = _rollouts(outcome, measured.pop(name, {}))
            kinds[name] = outcome.problem.kind
    problems: list[PlayedProblem] = []
    censored = 0
    ungraded = 0
    for name, rollouts in outcomes.items():
        brief = state.finished[name]
        censored += len(brief.samples) - len(brief.complete_samples)
        if brief.verdict is None and all(one.verdict is None for one in brief.complete_samples):
            ungraded += 1
            continue
        played = _played(brief, rollouts, kinds[name])
        if played.rollouts:
            problems.append(played)
    return problems, censored, ungraded


@dataclass(frozen=True, slots=True)
class _Read:
    """The data of one rollout, stored while the journal of its run is read."""

    sample: int
    costs: tuple[float, float, float, float]
    scores: dict[str, float] = field(default_factory=dict[str, float])


def _rollouts(outcome: Outcome, measured: dict[int, Measured]) -> list[_Read]:
    read: list[_Read] = []
    for rollout in outcome.rollouts:
        its = measured.get(rollout.sample)
        scores = {} if its is None else dict(its.scores)
        logprobs = [value for chunk in rollout.chunks for value in chunk.logprobs]
        if logprobs:
            scores[CONFIDENCE] = math.exp(math.fsum(logprobs) / len(logprobs))
        usage = rollout.usage
        tokens = float(usage.draft_tokens + usage.target_tokens)
        seconds = math.nan if its is None or its.seconds is None else its.seconds
        dollars = math.nan if its is None or its.dollars is None else its.dollars
        read.append(_Read(rollout.sample, (1.0, tokens or math.nan, seconds, dollars), scores))
    return read


def _played(brief: FinishedProblem, rollouts: Sequence[_Read], kind: Any) -> PlayedProblem:
    by_sample = {one.sample: one for one in rollouts}
    complete = brief.complete_samples
    labels = answer_classes([one.answer for one in complete], partial(group, kind=kind))
    classes: dict[Any, int] = {}
    played: list[PlayedRollout] = []
    for one, label in zip(complete, labels, strict=True):
        is_blank = label is None or label == NO_ANSWER
        number = NO_ANSWER if is_blank else classes.setdefault(label, len(classes))
        read = by_sample[one.sample]
        scores = tuple(sorted(read.scores.items()))
        played.append(PlayedRollout(number, float(one.verdict == "correct"), read.costs, scores))
    return PlayedProblem(brief.problem, tuple(played))


def referee(
    problems: Sequence[PlayedProblem],
    options: RefereeOptions,
    more: Sequence[StoppingRule] = (),
) -> Referee:
    """Apply every rule to the same random orders of each problem's rollouts.

    `more` are additional rules.

    :raises OptionError: an unknown rule, or budgets in a unit that was not recorded.
    """
    longest = max(len(problem.rollouts) for problem in problems)
    most = min(options.samples or _MOST_ROLLOUTS, longest)
    scores = _common_scores(problems)
    rules = [*_chosen(rules_for(scores, problems, most), options.rules), *more]
    unit = UNITS.index(options.unit)
    if any(math.isnan(one.costs[unit]) for problem in problems for one in problem.rollouts):
        raise OptionError(
            "--match",
            f"the run does not record the {options.unit} of every rollout; use --match samples "
            "instead",
        )
    orders = options.orders or max(_FEWEST_ORDERS, min(_ORDERS, _PLAYED // len(problems)))
    tables = [_played_by(problem, rules, most, orders, options.seed) for problem in problems]
    fixed_right = np.stack([table.fixed_right for table in tables])
    fixed_cost = np.stack([table.fixed_costs[:, unit] for table in tables])
    all_right = np.array([table.rows[0].right for table in tables])
    rows = [
        _row(
            rule,
            [table.rows[place] for table in tables],
            all_right,
            unit,
            (fixed_right, fixed_cost),
        )
        for place, rule in enumerate(rules)
    ]
    return Referee(
        tuple(rows),
        problems=len(problems),
        rollouts=sum(len(problem.rollouts) for problem in problems),
        most=most,
        orders=orders,
        seed=options.seed,
        unit=options.unit,
        censored=0,
        ungraded=0,
        scores=tuple(scores),
    )


def _common_scores(problems: Iterable[PlayedProblem]) -> list[str]:
    """Return the names of the scores that were recorded for every rollout."""
    counts = Counter[str]()
    total = 0
    for problem in problems:
        for rollout in problem.rollouts:
            total += 1
            counts.update(name for name, value in rollout.scores if math.isfinite(value))
    return sorted(name for name, count in counts.items() if count == total)


def rules_for(
    scores: Sequence[str], problems: Sequence[PlayedProblem], most: int
) -> list[StoppingRule]:
    """Return every rule that can be applied with these scores, starting with the vote of all
    rollouts.
    """
    sizes = [2**power for power in range(12) if 2**power < most]
    rules = [StoppingRule(ALL, f"the vote of all {most} rollouts", take_all)]
    rules += ONE_BY_ONE
    rules += [fixed(size) for size in sizes]
    for score in scores:
        values = [dict(one.scores)[score] for problem in problems for one in problem.rollouts]
        rules.append(best_of_n(score))
        if min(values) >= 0:
            rules.append(weighted_vote(score))
        rules.append(borda_vote(score))
    tail = next((one for one in ("tail confidence", CONFIDENCE) if one in scores), None)
    if tail is not None:
        rules += [deepconf_offline(tail, kept) for kept in (0.1, 0.9)]
    least = next((one for one in ("least confidence", CONFIDENCE) if one in scores), None)
    if least is not None:
        rules.append(deepconf_online(least))
    rules.append(
        StoppingRule(
            ORACLE,
            "a problem counts as correct if any of its rollouts is correct; no rule can be more "
            "accurate",
            take_all,
        )
    )
    return rules


def _chosen(rules: Sequence[StoppingRule], names: Sequence[str]) -> list[StoppingRule]:
    """Return the rules to compare: the vote of all rollouts first, then the named rules."""
    if not names or list(names) == [ALL]:
        return list(rules)
    known = {rule.name: rule for rule in rules}
    for name in names:
        if name not in known:
            raise OptionError("--rules", f"{name!r} is unknown", [*known], name)
    return [rules[0], *(known[name] for name in names if name != ALL)]


@dataclass(frozen=True, slots=True)
class _Mean:
    """The results of a rule on one problem, as means over the orders of arrival."""

    right: float
    costs: Floats  # mean cost in each of UNITS
    changed: float
    # mean of the rule's correctness (0 or 1) minus the correctness of the vote of all rollouts
    difference: float
    square: float  # mean of the squared `difference`


@dataclass(frozen=True, slots=True)
class _ProblemTable:
    rows: list[_Mean]
    # Share of orders of arrival in which the vote of the first rollouts is correct. Item 0 is for 1
    # rollout, item 1 for 2 rollouts, and so on.
    fixed_right: Floats
    # Mean cost of the first rollouts: a row for each number of rollouts, a column for each of
    # UNITS.
    fixed_costs: Floats


def _played_by(
    problem: PlayedProblem, rules: Sequence[StoppingRule], most: int, orders: int, seed: int
) -> _ProblemTable:
    """Apply all rules to one problem in each order of arrival."""
    rollouts = problem.rollouts
    right = problem.right()
    costs = np.array([one.costs for one in rollouts])
    labels = [one.label for one in rollouts]
    verdicts = [one.is_right for one in rollouts]
    names = [name for name, _ in rollouts[0].scores]
    scores = {name: [dict(one.scores).get(name, math.nan) for one in rollouts] for name in names}
    random = generator(Seed(run=seed, problem=problem.name, purpose="order of arrival"))
    size = min(most, len(rollouts))
    sums = np.zeros((len(rules), 4))
    spent = np.zeros((len(rules), len(UNITS)))
    fixed_right = np.zeros(most)
    fixed_costs = np.zeros((most, len(UNITS)))
    for _ in range(orders):
        order = random.permutation(len(rollouts))[:size]
        arrivals = Arrivals(
            [labels[place] for place in order],
            {name: [values[place] for place in order] for name, values in scores.items()},
        )
        running = np.cumsum(costs[order], axis=0)
        winner = take_all(arrivals).label
        for place, rule in enumerate(rules):
            taken = rule.play(arrivals)
            if rule.name == ORACLE:
                is_right = float(any(verdicts[one] for one in order))
            elif taken.rollout is not None:
                is_right = verdicts[order[taken.rollout]]
            else:
                is_right = right[taken.label]
            difference = is_right - right[winner]
            sums[place] += is_right, taken.label != winner, difference, difference**2
            spent[place] += running[taken.used - 1]
        votes = _running_votes(arrivals.labels)
        fixed_right[:size] += [right[label] for label in votes]
        fixed_right[size:] += right[votes[-1]]
        fixed_costs[:size] += running
        fixed_costs[size:] += running[-1]
    return _ProblemTable(
        [
            _Mean(right_share, spent[place] / orders, changed, difference, square)
            for place, (right_share, changed, difference, square) in enumerate(
                (sums / orders).tolist()
            )
        ],
        fixed_right / orders,
        fixed_costs / orders,
    )


def _running_votes(labels: Sequence[int]) -> list[int]:
    """Return the answer class that leads the vote after each arrival; in a tie, the class that
    appears first leads.

    >>> _running_votes([NO_ANSWER, 1, 0, 0])
    [-1, 1, 1, 0]
    """
    counts: dict[int, int] = {}
    winners: list[int] = []
    for label in labels:
        if label != NO_ANSWER:
            counts[label] = counts.get(label, 0) + 1
        winners.append(max(counts, key=counts.__getitem__, default=NO_ANSWER))
    return winners


def _row(
    rule: StoppingRule,
    means: Sequence[_Mean],
    all_right: Floats,
    unit: int,
    fixed_curves: tuple[Floats, Floats],
) -> RuleRow:
    right = np.array([one.right for one in means])
    costs = np.stack([one.costs for one in means])
    n = len(means)
    matched = None
    if rule.name not in (ALL, ORACLE) and not rule.name.startswith("fixed"):
        matched = compare_runs(_at_equal_budget(costs[:, unit], *fixed_curves), right)
    return RuleRow(
        rule.name,
        rule.about,
        rule.whose,
        accuracy=mean_estimate(right, n),
        samples=_mean_number(costs[:, 0], float(fixed_curves[1].shape[1])),
        tokens=float(costs[:, 1].mean()),
        seconds=float(costs[:, 2].mean()),
        dollars=float(costs[:, 3].mean()),
        changed=mean_estimate([one.changed for one in means], n),
        against_all=None if rule.name == ALL else compare_runs(all_right, right),
        against_fixed=matched,
        problems_for_a_point=None if rule.name == ALL else _problems_for_a_point(means),
    )


def _mean_number(values: Floats, most: float) -> Estimate:
    """Return the mean over problems of a value between 0 and `most`, with a 95 % interval by
    Student's t.
    """
    n = values.size
    mean = float(values.mean())
    half = math.nan
    if n > 1:
        error = float(values.std(ddof=1)) / math.sqrt(n)
        half = student_quantile(0.975, n - 1) * error
    low = max(0.0, mean - half)
    high = min(most, mean + half)
    return Estimate(mean, low, high, n, n, "t")


def _problems_for_a_point(means: Sequence[_Mean]) -> int:
    """Return how many problems are needed to detect that a rule's accuracy is 1 percentage point
    lower than that of the vote of all rollouts.

    The variance of a single order of arrival is used, because a real run has only one order per
    problem. It is raised to the variance of a rule that loses 1 % of the problems, if it is
    smaller.
    """
    difference = float(np.mean([one.difference for one in means]))
    square = float(np.mean([one.square for one in means]))
    spread = max(square - difference**2, _POINT - _POINT**2)
    return problems_needed(math.sqrt(spread), _POINT)


def _at_equal_budget(costs: Floats, fixed_right: Floats, fixed_costs: Floats) -> Floats:
    """Return each problem's accuracy if all problems have the same number of rollouts, chosen so
    that the mean cost is the mean of `costs`.

    If this mean is between the costs of two numbers of rollouts, the accuracies with these two
    numbers are interpolated linearly.
    """
    budget = float(costs.mean())
    means = fixed_costs.mean(axis=0)
    upper = int(np.searchsorted(means, budget))
    if upper == 0:
        return fixed_right[:, 0]
    if upper == len(means):
        return fixed_right[:, -1]
    share = (budget - means[upper - 1]) / (means[upper] - means[upper - 1])
    mixed: Floats = (1 - share) * fixed_right[:, upper - 1] + share * fixed_right[:, upper]
    return mixed
