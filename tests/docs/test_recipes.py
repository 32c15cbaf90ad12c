"""Tests that the server recipes in docs/servers.md use the ports that `--pair` expects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atts.api.pairs import ports

pytestmark = pytest.mark.checkout
PAGE = Path(__file__).resolve().parents[2] / "docs/servers.md"


def recipes() -> list[str]:
    """Return the commands of each placement: the lines between two comments of a block that serves
    $T and $D.
    """
    blocks = re.findall(
        r"^```bash\n(.*?)^```$", PAGE.read_text() if PAGE.exists() else "", flags=re.M | re.S
    )
    parts = [
        part
        for block in blocks
        if "vllm serve $D" in block
        for part in re.split(r"^# .*$", block, flags=re.M)
    ]
    return [part for part in parts if "vllm serve $T" in part]


def listening(recipe: str, model: str) -> list[int]:
    """Return the ports on which one model's servers listen, with shell loops unrolled."""
    found = list[int]()
    for line in recipe.splitlines():
        if f"vllm serve ${model} " in line:
            loop = re.match(r"for n in ([\d ]+);", line)
            for number in loop[1].split() if loop else ["0"]:
                port = re.search(r"--port (?:\$\(\((\d+)\+n\)\)|(\d+))", line)
                assert port is not None, line
                found.append(int(port[1]) + int(number) if port[1] else int(port[2]))
    return found


@pytest.mark.parametrize("recipe", recipes())
def test_servers_listen_where_a_pair_looks(recipe: str) -> None:
    """The ports of the recipes are exactly those of `--set draft_servers=N target_servers=M`, with
    one GPU or eight.
    """
    targets = listening(recipe, "T")
    drafts = listening(recipe, "D")
    assert targets == ports("target", len(targets))
    assert drafts == ports("draft", len(drafts))


def test_there_are_recipes() -> None:
    """The page has recipes for the two models, from one GPU to eight."""
    assert len(recipes()) == 8
