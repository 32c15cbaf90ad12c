"""Importers that convert rollouts recorded by other tools to runs, which atts can report, compare
and replay.
"""

from collections.abc import Mapping
from types import MappingProxyType

from atts.importers.formats import (
    COLUMNS,
    DEEPCONF,
    INSPECT_AI,
    LM_EVAL,
    MATHARENA,
    MONKEY_BUSINESS,
    NEMO_SKILLS,
    ForeignSample,
    Format,
    ReadOptions,
    RecordError,
    SampleReader,
)
from atts.importers.writing import (
    IMPORTED,
    Grades,
    Imported,
    ImportOptions,
    check_format,
    check_out,
    import_rollouts,
)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        each.name: each
        for each in (
            INSPECT_AI, LM_EVAL, NEMO_SKILLS, MATHARENA, MONKEY_BUSINESS, DEEPCONF, COLUMNS,
        )
    }
)  # fmt: skip
"""All importable file formats, keyed by format name."""

__all__ = [
    "FORMATS",
    "IMPORTED",
    "ForeignSample",
    "Format",
    "Grades",
    "ImportOptions",
    "Imported",
    "ReadOptions",
    "RecordError",
    "SampleReader",
    "check_format",
    "check_out",
    "import_rollouts",
]
