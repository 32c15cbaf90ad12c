"""Two runs on the same problems: what changed, how surely, at what cost.

found = compare(read_side(Path("runs/target-only")), read_side(Path("runs/first")))
found.vote.difference, found.vote.problems_needed, [ratio.name for ratio in found.costs]
"""

from atts.comparison.pairs import Compared, CostRatio, compare
from atts.comparison.sides import Side, Solved, read_side

__all__ = ["Compared", "CostRatio", "Side", "Solved", "compare", "read_side"]
