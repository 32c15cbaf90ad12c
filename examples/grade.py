"""Grade without a run: find the answer in a text, compare the answer with the reference, and group
equal answers.
"""

from atts.evaluators import equivalent, extract, group

SOLUTIONS = [
    (r"\frac{1}{2}", r"The two halves cancel, so the probability is $\boxed{0.5}$."),
    (r"(3,\infty)", r"Therefore $x > 3$. The final answer is $(3, \infty)$."),
    ("12", r"We get $\boxed{13}$."),
    (r"\sqrt{2}", "I ran out of ideas."),
]


def main() -> None:
    """Grade four solutions, and count one vote."""
    for reference, text in SOLUTIONS:
        answer = extract(text)
        if answer is None:
            print(f"{reference:12} no answer")
            continue
        verdict = equivalent(reference, answer)
        print(f"{reference:12} {answer:12} {verdict.status} ({verdict.rule})")
    answers = ["1/2", "0.5", r"\frac{2}{4}", "2", None]
    print(dict(zip(map(str, answers), group(answers), strict=True)))


if __name__ == "__main__":
    main()
