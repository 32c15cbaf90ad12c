"""The block zoo: many models stored by their unique blocks, each block once.

zoo = Zoo(Path("zoo"))
zoo.add("base", Path("models/base"))      # split, hashed, stored once
zoo.show().stored, zoo.show().apart       # bytes, beside those of the folders
zoo.export("base", Path("copy"))          # every file as it was added
"""

from atts.blocks.equivalence import Likeness, stand_in
from atts.blocks.folders import check_name
from atts.blocks.replicas import replicated
from atts.blocks.sharing import SharedPart, ZooContents, written_places
from atts.blocks.zoo import Zoo

__all__ = [
    "Likeness",
    "SharedPart",
    "Zoo",
    "ZooContents",
    "check_name",
    "replicated",
    "stand_in",
    "written_places",
]
