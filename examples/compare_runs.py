"""Compare two runs on the same problems: the paired difference in accuracy with its interval, and
the ratios of costs.

python examples/compare_runs.py
"""

import tempfile
from pathlib import Path

import atts
from atts.testing import toy_problems


def main() -> None:
    """Compare accuracy and cost of a run of the target alone with a run of atts."""
    problems = toy_problems(20)
    policy = atts.Policy(samples=4)
    with tempfile.TemporaryDirectory() as folder:
        for method in ("target-only", "atts"):
            setup = atts.Setup(draft="scripted", target="scripted", method=method, policy=policy)
            atts.evaluate_sync(problems, setup, directory=Path(folder) / method)
        comparison = atts.compare(Path(folder) / "target-only", Path(folder) / "atts")
    print(f"vote: {comparison.vote}")
    for cost in comparison.costs:
        print(f"{cost.name}: {cost.ratio:.2f} times [{cost.low:.2f}, {cost.high:.2f}]")


if __name__ == "__main__":
    main()
