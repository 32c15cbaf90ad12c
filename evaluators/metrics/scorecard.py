"""Scorecard of a run: every rate with its interval, beside what it left uncounted."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from atts.errors import OptionError
from atts.evaluators.metrics import rates
from atts.evaluators.metrics.intervals import Estimate, Floats
from atts.evaluators.metrics.rates import rate

SampleStatus = Literal["graded", "cut", "no answer", "unscored", "timeout"]
"""What became of a sample: graded; cut at a limit; ended with no answer; the grader cannot tell, or took too long."""


def status_of(answer: str | None, finish: str | None, verdict: str | None, rule: str) -> SampleStatus:
    """What became of a sample that ended by `finish`; `rule` is what the grader went by.

    >>> status_of(None, "tokens", "wrong", ""), status_of("7", "answer", "unscored", "slow: timeout")
    ('cut', 'timeout')
    """
    if answer is None:
        return "cut" if finish in ("turns", "tokens") else "no answer"
    if verdict == "unscored":
        return "timeout" if "timeout" in rule else "unscored"
    return "graded"


@dataclass(frozen=True, slots=True)
class Samples:
    """One problem's samples, in any order: right or not (None: unknown), the class each votes for, what became of it.

    `labels` come from grouping by equivalence, None where there is no answer; without them there is no vote. Raises
    OptionError when the lengths differ.
    """

    problem: str
    correct: tuple[bool | None, ...]
    labels: tuple[Hashable | None, ...] = ()
    statuses: tuple[SampleStatus, ...] = ()

    def __post_init__(self) -> None:
        for name in ("labels", "statuses"):
            held: tuple[object, ...] = getattr(self, name)
            if held and len(held) != len(self.correct):
                raise OptionError(name, f"{self.problem} has {len(held)} {name} for {len(self.correct)} samples")
        if unknown := [status for status in self.statuses if status not in get_args(SampleStatus)]:
            raise OptionError("status", f"{unknown[0]!r} is not a status", get_args(SampleStatus))


class GradedSample(Protocol):
    """A sample that ran to its end, as `samples_of` takes it.

    Its answer (None without one), why it ended, its verdict ("correct", "wrong" or "unscored"; None: it was not
    graded) and the rule the grader went by.
    """

    @property
    def answer(self) -> str | None: ...
    @property
    def finish(self) -> str: ...
    @property
    def verdict(self) -> str | None: ...
    @property
    def rule(self) -> str: ...


def samples_of(
    problem: str, samples: Sequence[GradedSample], group: Callable[[Sequence[str]], Sequence[int]]
) -> Samples | None:
    """One problem's samples for `score`; None where there are none, or one of them was not graded.

    `group` gives each of some texts the class of its equals; every different text is compared once.
    """
    if not samples or any(one.verdict is None for one in samples):
        return None
    return Samples(
        problem,
        tuple(None if one.verdict == "unscored" else one.verdict == "correct" for one in samples),
        answer_classes([one.answer for one in samples], group),
        tuple(status_of(one.answer, one.finish, one.verdict, one.rule) for one in samples),
    )


def answer_classes(
    answers: Sequence[str | None], group: Callable[[Sequence[str]], Sequence[int]]
) -> tuple[int | None, ...]:
    """A class per answer, None where there is none; each different text is compared once.

    >>> answer_classes(["7", None, "8", "7"], lambda texts: range(len(texts)))
    (0, None, 1, 0)
    """
    texts = list(dict.fromkeys(answer for answer in answers if answer is not None))
    classes = dict(zip(texts, group(texts), strict=True))
    return tuple(None if answer is None else classes[answer] for answer in answers)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many samples stand behind a rate, and how many of them are not a plain right or wrong."""

    problems: int
    samples: int
    cut: int
    no_answer: int
    unscored: int
    timed_out: int

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples of {self.problems:,} problems: {self.cut:,} cut, {self.no_answer:,} without "
            f"answer, {self.unscored:,} unscored, {self.timed_out:,} timed out"
        )


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The rates of one run by name, such as "pass@1" and "maj@16", and their coverage."""

    estimates: Mapping[str, Estimate]
    coverage: Coverage


def coverage(problems: Sequence[Samples]) -> Coverage:
    """Counts of each status; a sample without one counts as unscored when it is not known whether it is right."""
    seen = Counter[SampleStatus]()
    for held in problems:
        seen.update(held.statuses or ("unscored" if one is None else "graded" for one in held.correct))
    return Coverage(len(problems), seen.total(), seen["cut"], seen["no answer"], seen["unscored"], seen["timeout"])


def score(problems: Sequence[Samples], *, ks: Sequence[int] | None = None, level: float = 0.95) -> Scorecard:
    """pass@1, and for every k pass@k, maj@k, pass^k and G-pass@k at one half: unbiased, with intervals over problems.

    `ks` are the powers of two up to the fewest samples of a problem, and that number itself, unless told. Samples that
    could not be scored count as wrong, and the rate says what they may change.
    """
    counts = rates.count([held.correct for held in problems])
    fewest = int(counts.n.min(initial=10**9)) if problems else 0
    estimates = {"pass@1": rate(rates.avg_at_n(counts), counts.n, level=level)}
    if unknown := sum(one is None for held in problems for one in held.correct):
        best = rates.count([[one is None or one for one in held.correct] for held in problems])
        estimates["pass@1"] = estimates["pass@1"].beside(rate(rates.avg_at_n(best), best.n, level=level), unknown)
    doubled = {1 << power for power in range(1, fewest.bit_length())}
    for k in sorted(doubled | {fewest} - {0}) if ks is None else ks:
        for name, values in _at_k(problems, counts, k).items():
            estimates[name] = rate(values, counts.n, level=level)
    return Scorecard(estimates, coverage(problems))


def _at_k(problems: Sequence[Samples], counts: rates.Counts, k: int) -> dict[str, Floats]:
    named: dict[str, Floats] = {}
    if k > 1:
        named[f"pass@{k}"] = rates.pass_at_k(counts.n, counts.c, k)
        named[f"pass^{k}"] = rates.pass_hat_k(counts.n, counts.c, k)
        named[f"G-pass@{k}(1/2)"] = rates.g_pass_at_k(counts.n, counts.c, k, 0.5)
    if k > 1 and problems and all(held.labels for held in problems):
        named[f"maj@{k}"] = rates.maj_at_k([rates.votes(held.labels, held.correct) for held in problems], k)
    return named
