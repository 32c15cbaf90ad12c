"""Tests of extraction: the final answer is found in a reasoning text, and no answer is invented."""

import json
from pathlib import Path
from random import Random

import pytest

from atts.errors import OptionError
from atts.evaluators import equivalent, extract, extraction, unmarked

BOXES = [
    (r"The answer is \boxed{42}.", "42"),
    (r"First \boxed{3}, but actually \boxed{4}.", "4"),
    (r"nested \boxed{\frac{1}{1+\frac{1}{2}}}", r"\frac{1}{1+\frac{1}{2}}"),
    (r"put it within \boxed{}. Okay: \boxed{7}", "7"),
    (r"\boxed{...} is where it goes; \boxed{8}", "8"),
    (r"\fbox{9}", "9"),
    (r"\boxed{\fbox{7}}", "7"),
    (r"\boxed 5", "5"),
    (
        r"\boxed{\left\{\begin{array}{l}x=1\\y=2\end{array}\right.}",
        r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.",
    ),
    (r"the roots are \boxed{3}, \boxed{5}", "3, 5"),
    (r"\boxed{1} and \boxed{2} and \boxed{3}", "1, 2, 3"),
    (r"$\boxed{7}$.$\boxed{7}$", "7"),
    ("Problem 1: \\boxed{1}\nProblem 2: \\boxed{2}", "2"),
    (r"<think>maybe \boxed{3}</think> The answer is \boxed{4}", "4"),
    ("<think>\nmaybe \\boxed{3}\n</think>\n\nThe answer is 4.", "4"),
    ("<think>\nso \\boxed{3}\n</think>\n\n", "3"),
    (
        r"\boxed{200} so far. Final Answer: The final answer is $10{,}455$. I hope it is correct.",
        "10{,}455",
    ),
]


@pytest.mark.parametrize(("text", "answer"), BOXES)
def test_the_last_box_counts(text: str, answer: str) -> None:
    """The last box with content gives the answer. If the text joins several boxes, as in "the roots
    are A, B", all of them do.
    """
    assert extract(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{42",
        r"so \boxed{\frac{1}{2",
        r"\boxed{",
        r"The answer is \boxed{\l",
        r"The answer is \bo",
        r"I put it in \boxed{}. Let me think",
    ],
)
def test_a_cut_or_empty_box_gives_no_answer(text: str) -> None:
    """A box that is never closed gives no answer under any fallback."""
    assert extract(text, fallback="number") is None


def test_a_cut_box_differs_from_a_missing_one() -> None:
    """If no answer is extracted, the rule says whether the box is cut off or missing."""
    assert extraction(r"so \boxed{12").rule == "cut"
    assert extraction("hm").rule == "none"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: C", "C"),
        ("ANSWER: 17", "17"),
        ("**Answer:** 12", "12"),
        ("Final answer: 1,234", "1,234"),
        ("The final answer is\n\n$$\n\\frac{5}{2}\n$$", r"\frac{5}{2}"),
        ("Final Answer: The final answer is $[2,5)$. I hope it is correct.", "[2,5)"),
        ("<answer>\n\\frac{1}{2}\n</answer>", r"\frac{1}{2}"),
        ("steps\n#### 1,234", "1,234"),
        ("So the answer is 3.14.", "3.14"),
        ("the answer is $12$ and $13$.", "12, 13"),
    ],
)
def test_an_explicit_mark_counts_without_a_box(text: str, answer: str) -> None:
    """Marks such as "final answer" count without any fallback."""
    assert extract(text, fallback="none") == answer


def test_fallbacks_need_a_setting() -> None:
    """Without a box, a value stated in a sentence is the answer by default. The last number in the
    text is the answer only with the setting "number". With "none" there is no answer.
    """
    text = "We tried 3 and 4 of 17 ways without success"
    assert extract(text) is None
    assert extract(text, fallback="number") == "17"
    stated = "Therefore, the probability that Alice wins the game is 2/3."
    assert (extract(stated), extract(stated, fallback="none")) == ("2/3", None)
    assert extract("This cannot be determined.", fallback="number") is None
    assert extract("", fallback="number") is None


@pytest.mark.parametrize(
    "text",
    [
        "I think the correct answer is (D), not A.",
        "D. it can't be A or B",
        r"\boxed{D}",
        "Answer: D because B fails",
    ],
)
def test_choices_are_found(text: str) -> None:
    """A choice is found in each form in which models write it."""
    found = extract(text, "choice")
    assert found is not None
    assert equivalent("D", found, "choice").is_equal


def test_unknown_options_are_errors() -> None:
    """A misspelt kind or fallback raises an error that names the known ones."""
    with pytest.raises(OptionError, match="math"):
        extract("5", "maths")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="statement"):
        extract("5", fallback="last")  # type: ignore[arg-type]


def test_extraction_agrees_with_a_reader(shared_data: Path) -> None:
    """In each undisputed case, extraction gives the answer that a human reader found."""
    text = (shared_data / "equivalence/extract_cases.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    wrong = [row["id"] for row in rows if row["tag"] == "core" and not _is_right(row)]
    assert wrong == []


def _is_right(row: dict[str, str | None]) -> bool:
    found = extract(str(row["text"]))
    expected = row["expected_extracted"]
    if found is None or expected is None:
        return found == expected
    return (
        found == expected or found in (row["accept"] or ()) or equivalent(expected, found).is_equal
    )


def test_a_box_may_follow_a_letter() -> None:
    r""" "\boxed" counts directly after a letter, but a word that ends in "boxed" does not."""
    assert extract(r"so x\boxed{7}") == "7"
    assert extract("it was unboxed{7}", fallback="none") is None


def test_lines_without_an_answer_can_be_dropped() -> None:
    """Lines that cannot contain an answer may be dropped from a long text without changing the
    extracted answer.
    """
    rng = Random(4)
    pieces = [
        "Let us compute the sum of the digits of n, which we call s.\n",
        "Then $x^2 = 9$ and we go on with the other case.\n\n",
        "A: ", "### 2", "\\boxed{", "7}", "The final", " answer is ", "5.", "\n", "**Answer**",
        "Question: another one\n", "<|im_end|>\n", "<|im_start|>assistant\n", "so we are not done ",
        "答案是", "Antwort", ": ",
    ]  # fmt: skip
    left_out = 0
    for _ in range(300):
        text = "".join(
            rng.choices(pieces, [40, 40, *[1] * (len(pieces) - 2)], k=rng.randint(1, 80))
        )
        for cut in sorted(rng.sample(range(len(text)), min(8, len(text)))):
            left_out += (start := unmarked(text[:cut]))
            assert extract(text[start:], fallback="none") == extract(text, fallback="none"), (
                text,
                cut,
            )
    assert left_out > 100_000
