"""From a stream of scores to decisions with a stated guarantee."""

from atts.calibration.modes import MODES, Mode
from atts.calibration.online import Calibrator
from atts.calibration.ranks import Ranks
from atts.calibration.rates import rate_of
from atts.calibration.replay import Replay, replay
from atts.calibration.scale import LOG_PROB, PERPLEXITY, REAL, Scale
from atts.calibration.stored import StoredScores

__all__ = [
    "Calibrator",
    "LOG_PROB",
    "MODES",
    "Mode",
    "PERPLEXITY",
    "REAL",
    "Ranks",
    "Replay",
    "Scale",
    "StoredScores",
    "rate_of",
    "replay",
]
