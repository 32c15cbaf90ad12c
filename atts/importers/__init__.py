"""Importers, which turn rollouts of other tools into runs for reports, comparisons and replays."""

from collections.abc import Mapping
from types import MappingProxyType

from atts.importers import (
    columns,
    deepconf,
    inspect_ai,
    lm_eval,
    matharena,
    monkey_business,
    nemo_skills,
)
from atts.importers.samples import (
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
        module.FORMAT.name: module.FORMAT
        for module in (
            inspect_ai, lm_eval, nemo_skills, matharena, monkey_business, deepconf, columns,
        )
    }
)  # fmt: skip
"""All formats that can be imported, by name."""

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
