"""From text to verdicts, from verdicts to numbers one can defend; knows no engine."""

from atts.evaluators.equivalence import SecondOpinion, equivalent
from atts.evaluators.extraction import Extraction, Extractor, extract, extraction
from atts.evaluators.grouping import group
from atts.evaluators.verdict import Limits, Status, Verdict

__all__ = [
    "Extraction",
    "Extractor",
    "Limits",
    "SecondOpinion",
    "Status",
    "Verdict",
    "equivalent",
    "extract",
    "extraction",
    "group",
]
