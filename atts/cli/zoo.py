"""`atts zoo`: many models stored by their unique blocks, added, shown, exported and removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.options import Json
from atts.cli.output import print_result
from atts.cli.terminal import say
from atts.errors import CheckFailed

if TYPE_CHECKING:
    from atts.blocks import SharedPart, ZooContents

app = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="What the model is called in the zoo.")]
Directory = Annotated[Path, typer.Option("--zoo", help="The zoo's directory.", metavar="DIRECTORY")]


@app.command()
def add(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="A model's or an adapter's folder, as save_pretrained writes it.")],
    zoo: Directory,
    base: Annotated[
        str,
        typer.Option(
            help="The zoo's model that an adapter (LoRA) was trained on, or that has what the folder lacks.",
            show_default="the one that an adapter names",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Store a model: blocks that are there already are shared, to the bit; a new directory becomes a zoo.

    Example: atts zoo add base ./Qwen3-1.7B --zoo zoo

    Example: atts zoo add algebra ./algebra-lora --base base --zoo zoo
    """
    from atts.blocks import Zoo

    model = Zoo(zoo).add(name, folder, base)
    print_result(
        {"name": name, "zoo": str(zoo), "bytes": model.bytes, "blocks": len(model.digests), "whole": model.is_whole},
        as_json,
        lambda _: [
            f"{name}: {megabytes(model.bytes)}, {len(model.digests)} blocks, "
            + ("none of them shared: stored whole" if model.is_whole else "some of them shared"),
            f"Its engine's name: zoo:{zoo}/{name}",
        ],
    )


@app.command()
def remove(name: Name, zoo: Directory, as_json: Json = False) -> None:
    """Forget a model, and delete the blocks that no other has.

    Example: atts zoo remove tuned --zoo zoo
    """
    from atts.blocks import Zoo

    freed = Zoo(zoo).remove(name)
    print_result({"name": name, "zoo": str(zoo), "freed": freed}, as_json, lambda _: [f"{megabytes(freed)} freed"])


@app.command()
def export(
    name: Name,
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    zoo: Directory,
    as_json: Json = False,
) -> None:
    """Write a model's folder as it was added, byte for byte.

    Example: atts zoo export tuned ./tuned-again --zoo zoo
    """
    from atts.blocks import Zoo

    Zoo(zoo).export(name, out)
    print_result({"name": name, "zoo": str(zoo), "out": str(out)}, as_json, lambda _: [str(out)])


@app.command()
def show(
    zoo: Directory,
    picture: Annotated[Path | None, typer.Option(help="Draw who shares what, as an SVG file.", metavar="FILE")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read every block; exit code 5 if one is damaged.")] = False,
    as_json: Json = False,
) -> None:
    """Show who shares what, and the bytes that are stored beside those of the models apart.

    Example: atts zoo show --zoo zoo --picture zoo.svg
    """
    from atts.blocks import Zoo

    found = Zoo(zoo).show()
    print_result(found, as_json, written)
    if picture is not None:
        from atts.analysis import save_sharing

        rows = [(model.name, model.parts) for model in found.models]
        save_sharing(rows, picture)
        say(picture)
    if check and (damage := Zoo(zoo).damage()):
        raise CheckFailed("\n".join(damage))


def written(found: ZooContents) -> Iterator[str]:
    """A zoo in lines for people: its models, then the tree of what they share."""
    yield (
        f"{found.zoo}: {len(found.models)} models, {found.blocks} blocks; {megabytes(found.stored)} stored, "
        f"{megabytes(found.apart)} apart ({found.saved:.0%} less)"
    )
    wide = max([len(model.name) for model in found.models], default=0)
    for model in found.models:
        shared = sum(count > 1 for count in model.parts.values())
        kind = "whole" if model.is_whole else f"{shared} of {len(model.parts)} blocks shared"
        yield f"  {model.name:{wide}}  {megabytes(model.bytes):>9}  {kind}{f', on {model.base}' if model.base else ''}"
    yield from _tree(found.tree, "")


def _tree(parts: Sequence[SharedPart], indent: str) -> Iterator[str]:
    from atts.blocks import written_places

    for part in parts:
        yield f"{indent}{', '.join(part.models)}: {written_places(part.places)} ({megabytes(part.bytes)})"
        yield from _tree(part.below, f"{indent}  ")


def megabytes(size: int) -> str:
    """Bytes for people.

    >>> megabytes(12_345_678), megabytes(512)
    ('12.3 MB', '0.5 kB')
    """
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
