"""`atts pairs`: models that work together, what they need, and the commands that serve them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.output import json_line
from atts.cli.terminal import say

if TYPE_CHECKING:
    from atts.api import Pair, Placement


def pairs(
    name: Annotated[
        str,
        typer.Argument(help="Only this pair, with all that is known of it.", show_default="all"),
    ] = "",
    card: Annotated[
        str | None,
        typer.Option(
            help="Of which GPU: rtx4090, rtx5090, l40s, a100, h100, h200, b200.", metavar="CARD"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per pair.")] = False,
) -> None:
    """List the pairs that `--pair` knows: models, lengths, prompts, and how many GPUs hold them.

    With a name and --card, print the two commands that serve the pair on the fewest such cards.

    Example: atts pairs; atts pairs r1-1.5b/r1-70b --card h100
    """
    from atts.api import USUAL_CARDS, find_pair, known_pairs

    chosen = [find_pair(name)] if name else list(known_pairs().values())
    placed = {
        pair.name: {kind: _placed(pair, kind) for kind in ([card] if card else USUAL_CARDS)}
        for pair in chosen
    }
    if as_json:
        say("\n".join(json_line(_facts(pair, placed[pair.name])) for pair in chosen))
    elif name:
        say("\n".join(_details(chosen[0], placed[name], card)))
    else:
        say("\n".join(_table(chosen, placed)))


def _placed(pair: Pair, card: str) -> Placement | None:
    from atts.api import place

    return place(pair, card, int(str(pair.settings.get("max_tokens", 0))))


def _facts(pair: Pair, placed: dict[str, Placement | None]) -> dict[str, Any]:
    sizes = {role: asdict(pair.size(role)) for role in ("draft", "target")}
    cards = {
        card: None if found is None else _placement(pair, found) for card, found in placed.items()
    }
    published = {benchmark: asdict(row) for benchmark, row in pair.published.items()}
    own = {"name": pair.name, "draft": pair.draft, "target": pair.target, "note": pair.note}
    return {
        **own,
        "settings": dict(pair.settings),
        "sizes": sizes,
        "cards": cards,
        "published": published,
    }


def _placement(pair: Pair, found: Placement) -> dict[str, Any]:
    return {**asdict(found), "commands": list(found.commands(pair))}


def _table(chosen: list[Pair], placed: dict[str, dict[str, Placement | None]]) -> Iterator[str]:
    yield f"{'pair':<26}{'GB':>12}{'tokens':>8}{'chunk':>7}  {'system':<8}" + "".join(
        f"{card:<10}" for card in next(iter(placed.values()))
    )
    for pair in chosen:
        sizes = f"{pair.size('draft').weights:g} + {pair.size('target').weights:g}"
        settings = pair.settings
        tokens = settings.get("max_tokens", "512")
        chunk = settings.get("chunking.draft_tokens", "64")
        system = "none" if settings.get("system") == "" else "yes"
        cards = "".join(f"{_count(found):<10}" for found in placed[pair.name].values())
        yield f"{pair.name:<26}{sizes:>12}{tokens:>8}{chunk:>7}  {system:<8}{cards}".rstrip()
    yield "GB of weights; cards: the fewest that hold both (* target in fp8). Sizes are computed and not yet run."


def _without(pair: Pair, card: str) -> str:
    return f"not even eight {card} hold it" if pair.size("target").layers else "no GPU is needed"


def _count(found: Placement | None) -> str:
    return "-" if found is None else f"x {found.count}{'*' if found.target.is_quantized else ''}"


def _details(pair: Pair, placed: dict[str, Placement | None], card: str | None) -> Iterator[str]:
    yield f"{pair.name}: {pair.note}"
    for role in ("draft", "target"):
        size = pair.size(role)
        yield f"  {role:<9} {pair.model(role)}: {size.weights:g} GB, {size.context:,} tokens of context"
    for key, value in pair.settings.items():
        yield f"  {key:<24} {json_line(value)}"
    for benchmark, row in pair.published.items():
        speeds = f"{row.marginal:g}x marginal, {row.conditional:g}x conditional"
        yield f"  published {benchmark}: right in any of 16 {row.accuracy:.1%}, speed-up {speeds}"
    for kind, found in placed.items():
        yield f"  memory    {found or _without(pair, kind)}"
        if card and found:
            yield from found.commands(pair)
