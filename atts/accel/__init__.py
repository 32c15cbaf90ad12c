"""Accelerators of the local engine that do not change its output: speculation, stages and zoos.

Options set speculation and stages. A zoo stores models that share blocks:

    zoo = Zoo(Path("zoo"))
    zoo.add("base", Path("models/base"))  # a block that the zoo already has is not stored again
    zoo.show().stored, zoo.show().apart  # sizes in bytes: of the zoo, and of all models separately
    zoo.export("base", Path("copy"))  # writes every file exactly as it was added
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atts.accel.engine import accelerated
from atts.accel.options import SpeculationOptions, StageOptions, options_of

if TYPE_CHECKING:
    from atts.accel.speculate.goodput import StepCosts, Survival, condition
    from atts.accel.zoo.placement import replicated
    from atts.accel.zoo.zoo import (
        BlockSimilarity,
        Divergence,
        SharedPart,
        Zoo,
        ZooContents,
        check_name,
        divergence,
        substituted,
        written_places,
    )

__all__ = [
    "Divergence",
    "BlockSimilarity",
    "SharedPart",
    "SpeculationOptions",
    "StageOptions",
    "StepCosts",
    "Survival",
    "Zoo",
    "ZooContents",
    "accelerated",
    "check_name",
    "condition",
    "divergence",
    "options_of",
    "replicated",
    "substituted",
    "written_places",
]

_NAMES = {
    "speculate.goodput": "StepCosts Survival condition",
    "zoo.placement": "replicated",
    "zoo.zoo": "BlockSimilarity Divergence SharedPart Zoo ZooContents check_name divergence "
    "substituted written_places",
}
_HOME = {name: f"atts.accel.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name of the package when it is first used, because most engines need no
    accelerator.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'atts.accel' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
