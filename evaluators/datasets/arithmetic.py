"""Arithmetic word problems generated from a seed, with worked solutions, for the embedded models."""

# A problem's level depends on its number of steps: 2, 3, 4, 5-6 and 7-8 steps give the levels 1 to
# 5. A hash of the problem's operations chooses its split, so no computation is in two splits. The
# hash ignores the wording.

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, repeat
from operator import add, floordiv, mul, sub
from pathlib import Path
from random import Random
from typing import Literal, get_args

from atts.core import Problem
from atts.errors import OptionError
from atts.evaluators.syntax.vocabulary import Tables

Split = Literal["train", "calibration", "test"]
Operator = Literal["+", "-", "*", "/"]

LIMIT = 199  # the largest number that may occur in a problem or in its solution
LEVELS: dict[int, tuple[int, ...]] = {1: (2,), 2: (3,), 3: (4,), 4: (5, 6), 5: (7, 8)}
"""For each level, the numbers of steps that its problems may have."""

_WORDS = Tables(Path(__file__).with_name("arithmetic.toml"))
_NAMES, _ITEMS, _OPENERS = (_WORDS.table(name, list[str]) for name in ("names", "items", "openers"))
_INSTRUCTIONS, _EVENTS = (
    _WORDS.table(name, dict[str, list[str]]) for name in ("instructions", "events")
)
_RELATIONS, _GROUPS = (_WORDS.table(name, dict[str, str]) for name in ("relations", "groups"))
_COMPUTED: dict[Operator, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv}
# A hash assigns each computation to one of this number of equal parts. One part is the split
# "test", and one is "calibration". So to get one test problem, about ten exercises must be drawn.
_BUCKETS = 10


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation with two integers; divisions have no remainder."""

    left: int
    operator: Operator
    right: int

    @property
    def value(self) -> int:
        """Return the result of the computation."""
        return _COMPUTED[self.operator](self.left, self.right)

    def middle(self) -> str:
        """Return the intermediate step of mental arithmetic, such as "44 + 7" for 24 + 27; "" if
        none is needed.
        """
        tens = self.right // 10 * 10
        ones = self.right % 10
        match self.operator:
            case "+" if tens and ones and self.left % 10 + ones >= 10:
                return f"{self.left + tens} + {ones}"
            case "-" if tens and ones and self.left % 10 < ones:
                return f"{self.left - tens} - {ones}"
            case "*" if max(self.left, self.right) >= 10:
                large, small = (
                    (self.left, self.right) if self.left >= 10 else (self.right, self.left)
                )
                return f"{large // 10 * 10 * small} + {large % 10 * small}" if large % 10 else ""
            case _:
                return ""

    def worked(self) -> str:
        """Return the computation as a solution shows it, such as "24 + 27 = 44 + 7 = 51"."""
        middle = self.middle()
        steps = [f"{self.left} {self.operator} {self.right}", middle, str(self.value)]
        return " = ".join(step for step in steps if step)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a solution: a computation with the words before and after it."""

    before: str
    operation: Operation
    after: str = ""

    @property
    def text(self) -> str:
        """Return the line as a sentence, without the blank line that ends a chunk."""
        return f"{self.before}{self.operation.worked()}{self.after}."


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question with its worked solution."""

    kind: str
    text: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """Return the value of the last step, which is the answer."""
        return self.steps[-1].operation.value

    @property
    def level(self) -> int:
        """Return the level of the exercise, from 1 to 5, which depends on its number of steps."""
        return next(level for level, lengths in LEVELS.items() if len(self.steps) in lengths)

    @property
    def chunks(self) -> tuple[str, ...]:
        """Return the solution split into the chunks that a model should generate.

        Each step is one chunk, which ends with a blank line. The last chunk has the answer in a
        box.
        """
        return (
            *(f"{step.text}\n\n" for step in self.steps),
            f"The answer is \\boxed{{{self.answer}}}.",
        )

    @property
    def solution(self) -> str:
        """Return the worked solution, with the boxed answer, as one string."""
        return "".join(self.chunks)

    @property
    def canonical(self) -> str:
        """Return the operations as a string that is the same for every wording of the exercise."""
        operations = (step.operation for step in self.steps)
        return "|".join(f"{item.left}{item.operator}{item.right}" for item in operations)


def split_of(canonical: str) -> Split:
    """Return the split of an exercise, from a hash of its operations.

    80 % of all sequences of operations are in train, 10 % in calibration and 10 % in test.
    """
    bucket = int.from_bytes(blake2b(canonical.encode(), digest_size=8).digest(), "big") % _BUCKETS
    if bucket == 0:
        return "test"
    return "calibration" if bucket == 1 else "train"


def problems(
    split: Split, count: int, seed: int = 0, levels: Sequence[int] = (1, 2, 3, 4, 5)
) -> list[Problem]:
    """Return `count` distinct problems. Their levels repeat in the order of `levels`.

    With the same seed, a larger `count` only adds problems at the end.

    :raises OptionError: for an unknown split, an unknown level or a negative count.

    >>> [(p.level, p.answer is not None) for p in problems("test", 2, seed=1, levels=(1, 5))]
    [(1, True), (5, True)]
    """
    name = f"arithmetic-{split}-{seed}"
    return [
        Problem(
            f"{name}-{index}",
            it.text,
            str(it.answer),
            level=it.level,
            subject=it.kind,
            source="arithmetic",
        )
        for index, it in enumerate(exercises(split, count, seed, levels))
    ]


def exercises(
    split: Split, count: int, seed: int = 0, levels: Sequence[int] = (1, 2, 3, 4, 5)
) -> list[Exercise]:
    """Return the same problems as `problems`, but as exercises with worked solutions."""
    if count < 0:
        raise OptionError("count", f"{count} is negative")
    distinct = dict[str, Exercise]()
    source = stream(split, seed, levels)
    while len(distinct) < count:
        exercise = next(source)
        if exercise.level == levels[len(distinct) % len(levels)]:
            distinct.setdefault(exercise.canonical, exercise)
    return [*distinct.values()]


def stream(
    split: Split, seed: int = 0, levels: Sequence[int] = (1, 2, 3, 4, 5)
) -> Iterator[Exercise]:
    """Generate an endless stream of exercises of one split for training. Exercises may repeat.

    A level that is listed twice is drawn twice as often.

    :raises OptionError: for an unknown split or level.
    """
    if split not in get_args(Split):
        raise OptionError("split", f"{split!r} is unknown", get_args(Split))
    for level in levels or (0,):
        if level not in LEVELS:
            raise OptionError("levels", f"{level} is unknown", [str(known) for known in LEVELS])
    random = Random(f"{split}:{seed}")
    levels = tuple(levels)
    lengths = (random.choice(LEVELS[random.choice(levels)]) for _ in repeat(None))
    made = (random.choice(_KINDS)(random, steps) for steps in lengths)
    return (
        exercise
        for exercise in made
        if exercise is not None and split_of(exercise.canonical) == split
    )


def _next_operation(random: Random, value: int) -> Operation:
    """Draw an operation on `value` whose result is between 2 and `LIMIT`.

    The four operators are about equally frequent.
    """
    divisors = [divisor for divisor in range(2, 10) if value % divisor == 0 and value > divisor]
    times = min(9, LIMIT // value) if value > 1 else 0
    largest: dict[Operator, int] = {
        "+": min(99, LIMIT - value),
        "-": min(99, value - 2),
        "*": times,
    }
    choices: list[Operator] = [operator for operator, most in largest.items() if most >= 2]
    if 2 <= value <= LIMIT // 4:
        # Multiplication and division are possible for fewer numbers than addition. To make up for
        # this, list them twice, so that they are chosen more often.
        choices.append("*")
    if divisors:
        choices.extend(("/", "/"))
    operator = random.choice(choices)
    right = random.choice(divisors) if operator == "/" else random.randint(2, largest[operator])
    return Operation(value, operator, right)


def _chain(random: Random, count: int) -> list[Operation]:
    """Draw operations, each of which uses the result of the previous operation."""
    operations = [_next_operation(random, random.randint(2, 99))]
    while len(operations) < count:
        operations.append(_next_operation(random, operations[-1].value))
    return operations


def _instructions(random: Random, count: int) -> Exercise:
    """Write an exercise such as "Start with 24. Multiply by 3. ..."."""
    operations = _chain(random, count)
    phrases = [
        random.choice(_INSTRUCTIONS[item.operator]).format(item.right) for item in operations
    ]
    question = random.choice(("What do you get?", "What is the result?"))
    text = f"Start with {operations[0].left}. {'. '.join(phrases)}. {question}"
    steps = (Step(f"{phrase}: ", item) for phrase, item in zip(phrases, operations, strict=True))
    return Exercise("instructions", text, tuple(steps))


def _expression(random: Random, count: int) -> Exercise:
    """Write an exercise such as "Compute ((24 * 3) - 17) + 5."."""
    operations = _chain(random, count)
    written = str(operations[0].left)
    for index, item in enumerate(operations):
        if index:
            written = f"({written})"
        written = f"{written} {item.operator} {item.right}"
    text = random.choice(("Compute {}.", "What is {}?")).format(written)
    steps = (
        Step(random.choice(_OPENERS) if index else "", item)
        for index, item in enumerate(operations)
    )
    return Exercise("expression", text, tuple(steps))


def _variables(random: Random, count: int) -> Exercise:
    """Write an exercise such as "Let a = 24. Let b = a * 3. Let c = b - a. ..."."""
    values = [random.randint(2, 99)]
    names = "abcdefghi"
    sentences = [f"Let a = {values[0]}."]
    steps = list[Step]()
    for index in range(count):
        item = _next_operation(random, values[-1])
        right = str(item.right)
        room = LIMIT - values[-1]
        earlier = [at for at in range(index) if 2 <= values[at] <= room]
        if earlier and random.random() < 0.4:
            earlier_index = random.choice(earlier)
            operator: Operator = (
                "-" if values[earlier_index] < values[-1] and random.random() < 0.5 else "+"
            )
            item = Operation(values[-1], operator, values[earlier_index])
            right = names[earlier_index]
        formula = f"{names[index + 1]} = {names[index]} {item.operator} {right}"
        sentences.append(f"Let {formula}.")
        steps.append(Step(f"{formula} = ", item))
        values.append(item.value)
    return Exercise("variables", f"{' '.join(sentences)} What is {names[count]}?", tuple(steps))


def _story(random: Random, count: int) -> Exercise | None:
    """Write a story about how many things one person has; return None if a number exceeds `LIMIT`.

    Each event of the story takes one or two steps.
    """
    name = random.choice(_NAMES)
    item = random.choice(_ITEMS)
    value = random.randint(5, 99)
    sentences = [f"{name} has {value} {item}s."]
    steps = list[Step]()
    while len(steps) < count:
        if count - len(steps) >= 2 and random.random() < 0.4:
            total = Operation(random.randint(2, 9), "*", random.randint(2, 20))
            gives = value > total.value and random.random() < 0.5
            whom = "friends" if gives else random.choice(("bags", "boxes"))
            event = _GROUPS["-" if gives else "+"].format(
                n=name, groups=total.left, k=total.right, i=item, whom=whom
            )
            steps.append(Step(f"{event}, so the {whom} {'get' if gives else 'hold'} ", total))
            change = Operation(value, "-" if gives else "+", total.value)
            reason = "Now "
        else:
            change = _next_operation(random, value)
            event = random.choice(_EVENTS[change.operator]).format(n=name, k=change.right, i=item)
            reason = f"{event}, so "
        sentences.append(f"{event}.")
        steps.append(Step(f"{reason}{name} has ", change, f" {item}s"))
        value = change.value
        if value > LIMIT or steps[-2 if len(steps) > 1 else -1].operation.value > LIMIT:
            return None
    return Exercise(
        "story", f"{' '.join(sentences)} How many {item}s does {name} have now?", tuple(steps)
    )


def _comparison(random: Random, count: int) -> Exercise | None:
    """Write a problem that compares how many things several people have; return None if their total
    exceeds `LIMIT`.

    Each person's count depends on an earlier person's. The question asks for the last person's
    count or for the total.
    """
    together = count % 2 == 0 and random.random() < 0.5
    relations = count // 2 if together else count
    item = random.choice(_ITEMS)
    names = random.sample(_NAMES, relations + 1)
    values = [random.randint(2, 40 if together else 99)]
    sentences = [f"{names[0]} has {values[0]} {item}s."]
    steps = list[Step]()
    for index, name in enumerate(names[1:]):
        # If the question is about the last person, compare each person with the one before. Then
        # every step is needed for the answer.
        earlier_index = index if not together else random.randint(0, index)
        change = _next_operation(random, values[earlier_index])
        other = names[earlier_index]
        relation = _RELATIONS[change.operator].format(n=name, o=other, k=change.right, i=item)
        sentences.append(f"{relation}.")
        steps.append(Step(f"{relation}. {other} has {change.left}, so {name} has ", change))
        values.append(change.value)
    if not together:
        return Exercise(
            "comparison",
            f"{' '.join(sentences)} How many {item}s does {names[-1]} have?",
            tuple(steps),
        )
    if sum(values) > LIMIT:
        return None
    steps += _added([f"{names[0]} and {names[1]}", *(f"With {name}" for name in names[2:])], values)
    return Exercise(
        "comparison", f"{' '.join(sentences)} How many {item}s do they have together?", tuple(steps)
    )


def _shopping(random: Random, count: int) -> Exercise | None:
    """Write a problem about buying several goods, which asks for the bill or for the change.

    The result is None if the bill reaches `LIMIT`.
    """
    name = random.choice(_NAMES)
    goods = random.sample(_ITEMS, (count + 1) // 2)
    bills = [Operation(random.randint(2, 9), "*", random.randint(2, 30)) for _ in goods]
    values = [bill.value for bill in bills]
    if sum(values) >= LIMIT:
        return None
    sold = list(zip(goods, bills, strict=True))
    prices = _listed([f"a {good} costs {bill.right}" for good, bill in sold])
    bought = _listed([f"{bill.left} {good}s" for good, bill in sold])
    steps = [
        Step(f"A {good} costs {bill.right}, so {bill.left} {good}s cost ", bill)
        for good, bill in sold
    ]
    steps += _added([f"With the {good}s" for good in goods[1:]], values)
    text = f"{prices[0].upper()}{prices[1:]}. {name} buys {bought}."
    if len(steps) == count:
        return Exercise("shopping", f"{text} How much does {name} pay?", tuple(steps))
    given = random.randint(sum(values) + 1, LIMIT)
    steps.append(
        Step(f"{name} pays with {given}, so the change is ", Operation(given, "-", sum(values)))
    )
    return Exercise(
        "shopping",
        f"{text} {name} pays with {given}. How much change does {name} get?",
        tuple(steps),
    )


def _added(named: Sequence[str], values: Sequence[int]) -> Iterator[Step]:
    """Yield the solution steps that add the values one by one. `named` has the words before each
    step.
    """
    for name, total, value in zip(named, accumulate(values), values[1:], strict=False):
        yield Step(f"{name}: ", Operation(total, "+", value))


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


_KINDS = (_instructions, _expression, _variables, _story, _comparison, _shopping)
