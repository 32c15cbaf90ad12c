"""The command group `atts zoo`, which stores many models and stores equal blocks only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.options import Json
from atts.cli.terminal import print_json, print_result, say
from atts.errors import CheckFailed, counted

if TYPE_CHECKING:
    from atts.accel import SharedPart, ZooContents
    from atts.api import MeasuredPair

app = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the model in the zoo.")]
Directory = Annotated[
    Path, typer.Option("--zoo", help="Directory of the zoo.", metavar="DIRECTORY")
]


@app.command()
def add(
    name: Name,
    folder: Annotated[
        Path,
        typer.Argument(help="Folder with a model or an adapter, as save_pretrained writes it."),
    ],
    zoo: Directory,
    base: Annotated[
        str,
        typer.Option(
            help="Model of the zoo: the base model of the adapter (LoRA), or the model that "
            "supplies the files missing from the folder.",
            show_default="the base model that the adapter names",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Store a model; a block that the zoo already contains, bit for bit, is not stored again.

    If the directory of --zoo does not exist, it becomes a new zoo.

    Example: atts zoo add base ./Qwen3-1.7B --zoo zoo

    Example: atts zoo add algebra ./algebra-lora --base base --zoo zoo
    """
    from atts.accel import Zoo

    model = Zoo(zoo).add(name, folder, base)
    print_result(
        {
            "name": name,
            "zoo": str(zoo),
            "bytes": model.bytes,
            "blocks": len(model.digests),
            "whole": model.is_whole,
        },
        as_json,
        lambda _: [
            f"{name}: {megabytes(model.bytes)}, {counted(len(model.digests), 'block')}, "
            + (
                "none of them were in the zoo yet, so all of them are stored"
                if model.is_whole
                else "some of them shared with other models"
            ),
            f"Engine address of the model: zoo:{zoo}/{name}",
        ],
    )


@app.command()
def remove(name: Name, zoo: Directory, as_json: Json = False) -> None:
    """Remove a model, and delete its blocks that no other model in the zoo uses.

    Example: atts zoo remove tuned --zoo zoo
    """
    from atts.accel import Zoo

    freed = Zoo(zoo).remove(name)
    print_result(
        {"name": name, "zoo": str(zoo), "freed": freed},
        as_json,
        lambda _: [f"{megabytes(freed)} freed"],
    )


@app.command()
def export(
    name: Name,
    out: Annotated[Path, typer.Argument(help="New folder for the model.")],
    zoo: Directory,
    as_json: Json = False,
) -> None:
    """Write the folder of a stored model, with the same bytes as when the model was added.

    Example: atts zoo export tuned ./tuned-again --zoo zoo
    """
    from atts.accel import Zoo

    Zoo(zoo).export(name, out)
    print_result({"name": name, "zoo": str(zoo), "out": str(out)}, as_json, lambda _: [str(out)])


@app.command()
def show(
    zoo: Directory,
    picture: Annotated[
        Path | None,
        typer.Option(help="SVG file for a drawing of the shared blocks.", metavar="FILE"),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also read every stored block; if a block is damaged, the exit code is 5.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the blocks that models share, and the bytes that sharing saves.

    Example: atts zoo show --zoo zoo --picture zoo.svg
    """
    from atts.accel import Zoo

    contents = Zoo(zoo).show()
    print_result(contents, as_json, written)
    if picture is not None:
        from atts.analysis import save_sharing

        rows = [(model.name, model.parts) for model in contents.models]
        save_sharing(rows, picture)
        say(picture)
    damage = Zoo(zoo).damage() if check else ()
    if damage:
        raise CheckFailed("\n".join(damage))


@app.command()
def compare(
    name: Name,
    zoo: Directory,
    problems: Annotated[
        str,
        typer.Option(help="Dataset to measure the model on; same formats as in `atts eval`."),
    ] = "arithmetic[:30]",
    most: Annotated[
        int,
        typer.Option(
            help="Largest number of replacements to measure for each block of the model; those "
            "with the most similar parameters come first.",
            min=1,
        ),
    ] = 1,
    apart: Annotated[
        float,
        typer.Option(
            help="Largest distance between the parameters of a block and of its replacement, "
            "relative to the norm of the block; unrelated blocks have a distance of about "
            "1.4."
        ),
    ] = 1.0,
    lossy: Annotated[
        float,
        typer.Option(
            help="With --keep: largest acceptable divergence of the model's outputs after all "
            "replacements together, in nats per token.",
            min=0,
        ),
    ] = 0.01,
    keep: Annotated[
        str | None,
        typer.Option(help="Name for a new model with all accepted replacements.", metavar="NAME"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replace each block of a model by a similar block of the zoo, and report how much the outputs
    change.

    Only one block is replaced at a time. With --keep, the largest set of replacements that together
    diverge by at most --lossy is stored as a new model, which "?lossy=" opens.

    Example: atts zoo compare tuned --zoo zoo --lossy 0.01 --keep lean
    """
    from atts.api import compare_blocks

    tell = None if as_json else lambda pair: say(_compared(pair))
    compared = compare_blocks(
        zoo, name, problems, most=most, apart=apart, lossy=lossy, keep=keep, tell=tell
    )
    if as_json:
        print_json(compared)
    elif not compared.pairs:
        say(
            f"no block of another model has the same shape as a block of {name} and a distance "
            f"from it below {apart:g}; give a larger --apart"
        )
    elif compared.kept is not None:
        replaced = counted(len(compared.kept.stands), "replaced block")
        say(f"{keep}: model with {replaced}, {compared.kept}")
        say(f"Engine address of the model: zoo:{zoo}/{name}?lossy={lossy:g}")
    if keep is not None and compared.kept is None:
        raise CheckFailed(
            "no new model was stored, because every replacement has a divergence above "
            f"{lossy:g} nats per token"
        )


def _compared(pair: MeasuredPair) -> str:
    near = pair.likeness
    return (
        f"{near.place} replaced by {near.other}: distance between the parameters "
        f"{near.distance:.3f}, cosine similarity {near.cosine:.3f}\n  {pair.loss}"
    )


def written(contents: ZooContents) -> Iterator[str]:
    """Yield text lines on a zoo: its models, then the tree of shared blocks."""
    yield (
        f"{contents.zoo}: {counted(len(contents.models), 'model')}, "
        f"{counted(contents.blocks, 'block')}; "
        f"{megabytes(contents.stored)} stored, {megabytes(contents.apart)} without "
        f"sharing ({100 * contents.saved:.0f} % saved)"
    )
    wide = max([len(model.name) for model in contents.models], default=0)
    for model in contents.models:
        shared = sum(count > 1 for count in model.parts.values())
        kind = "whole" if model.is_whole else f"{shared} of {len(model.parts)} blocks shared"
        yield (
            f"  {model.name:{wide}}  {megabytes(model.bytes):>9}  "
            f"{kind}{f', on {model.base}' if model.base else ''}"
        )
    yield from _tree(contents.tree, "")


def _tree(parts: Sequence[SharedPart], indent: str) -> Iterator[str]:
    from atts.accel import written_places

    for part in parts:
        yield (
            f"{indent}{', '.join(part.models)}: {written_places(part.places)} "
            f"({megabytes(part.bytes)})"
        )
        yield from _tree(part.below, f"{indent}  ")


def megabytes(size: int) -> str:
    """Return a number of bytes as a short string with its unit.

    >>> megabytes(12_345_678), megabytes(512)
    ('12.3 MB', '0.5 kB')
    """
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
