"""From recorded runs to advice: what to spend on a problem under a cap, and how far that can be trusted.

found = advise([Path("runs/first")], Cap(target_tokens=300))
found.best, found.options, found.other_rates, found.chunks, found.speeds
"""

from atts.planning.advice import Advice, Cap, advise
from atts.planning.options import Option
from atts.planning.rates import RateGuess
from atts.planning.speeds import ChunkAdvice, Speed

__all__ = ["Advice", "Cap", "ChunkAdvice", "Option", "RateGuess", "Speed", "advise"]
