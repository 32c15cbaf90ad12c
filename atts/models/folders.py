"""Model folders: found on disk or on the hub, their JSON read within limits, refused when they
bring code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atts.errors import ModelLoadError, UnsupportedByEngine

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""What a tokenizer and a configuration are made of."""
WEIGHT_FILES = ("*.safetensors",)
NO_TEMPLATE = "Use the model's instruct version, or add chat_template.jinja to its folder"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CODE = (
    "configuration_*.py",
    "modeling_*.py",
    "modular_*.py",
    "tokenization_*.py",
    "processing_*.py",
)
_MOST_BYTES = 64 << 20
_MOST_IDS = 1 << 24  # some forty times the largest vocabulary there is
_LOOK = "Check the id and the network, or download the model elsewhere and give its folder"
_PUBLISHED = {
    "phi3": {
        "configuration_phi3.Phi3Config",
        "modeling_phi3.Phi3ForCausalLM",
        "modeling_phi3.Phi3ForSequenceClassification",
        "modeling_phi3.Phi3ForTokenClassification",
        "Xenova/gpt-4o",
    }
}
"""Code that models of a type were published with and do not need: transformers has the same, which
is what is used.
"""


def find_tokenizer(model: str, name: str) -> Path:
    """The folder of a model's tokenizer: `model` itself when it is one, else what the hub has under
    that id.

    :raises ModelLoadError: neither a folder nor a hub id that can be had.
    """
    advice = "Name a folder with its tokenizer files: --tokenizer FOLDER, or ?tokenizer=FOLDER in its name"
    return find_folder(model, name, TEXT_FILES, advice)


def find_folder(model: str, name: str, files: Sequence[str], advice: str = _LOOK) -> Path:
    """The folder `model` is, else the hub's snapshot of that id with the files of these patterns.

    :raises ModelLoadError: neither a folder nor a hub id that can be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        problem = f"{model!r} is neither a folder nor a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'"
        raise ModelLoadError(name, problem, advice)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"{model!r} is no folder and cannot be had from the hub ({first})"
        raise ModelLoadError(name, problem, advice) from error


def read_object(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a model folder.

    :raises ModelLoadError: the file is no such thing, or far too long to be one.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES >> 20} MB")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            name, f"{path} cannot be read ({error})", "Download or write it again"
        ) from error
    return found


def refuse_code(folder: Path, name: str) -> None:
    """See that nothing in the folder asks for code of its own to be run.

    :raises ModelLoadError: something does, or there are pipes or devices among its files, which
        have no end.
    """
    for found in sorted(folder.iterdir()):
        if found.exists() and not (found.is_file() or found.is_dir()):
            problem = f"{found} is a device, a pipe or a socket, not a file"
            raise ModelLoadError(name, problem, "Download the model again")
    path = folder / "config.json"
    kind = read_object(path, name).get("model_type") if path.is_file() else None
    known = _PUBLISHED.get(kind, set[str]()) if isinstance(kind, str) else set[str]()
    files = {f"{entry.partition('.')[0]}.py" for entry in known}
    asked = [
        f"auto_map in {file}: {entry}"
        for file, entry in _named_code(folder, name)
        if entry not in known
    ]
    asked += sorted(
        found.name for code in _CODE for found in folder.glob(code) if found.name not in files
    )
    if asked:
        problem = f"{folder} brings code of its own ({', '.join(asked)}), and code of a model folder is never run"
        advice = "Remove it if the model needs none, or serve the model with vLLM and use the remote engine"
        raise ModelLoadError(name, problem, advice)


def refuse_ids(folder: Path, name: str) -> None:
    """See that the tokenizer names no ids for which its library would take all memory there is, and
    end the process.

    :raises ModelLoadError: it does.
    """
    path = folder / "tokenizer.json"
    found = read_object(path, name) if path.is_file() else {}
    model = found.get("model")
    added = found.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += (
        [token.get("id") for token in added if isinstance(token, dict)]
        if isinstance(added, list)
        else []
    )
    highest = max((number for number in ids if isinstance(number, int)), default=0)
    if highest > _MOST_IDS:
        problem = f"{path} cannot be read (the id {highest} is in no vocabulary)"
        raise ModelLoadError(name, problem, "Download or write it again")


def require_template(folder: Path, name: str) -> None:
    """See that conversations can be written as this model reads them, from the names and sizes of
    files alone.

    :raises UnsupportedByEngine: the folder holds no chat template.
    """
    path = folder / "tokenizer_config.json"
    try:
        is_there = (folder / "chat_template.jinja").stat().st_size > 0
    except OSError:
        is_there = path.is_file() and bool(read_object(path, name).get("chat_template"))
    if not is_there:
        raise UnsupportedByEngine(
            name, f"the tokenizer in {folder} has no chat template", NO_TEMPLATE
        )


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of the model, all there.

    :raises ModelLoadError: some or all are missing, the index is damaged, or the weights are
        pickled.
    """
    index = folder / "model.safetensors.index.json"
    files = _shards(index, name) if index.is_file() else sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelLoadError(
            name, f"{folder} lacks {', '.join(missing)}", "Download the missing shards"
        )
    if not files:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        why = (
            f": {', '.join(pickled[:3])} may be pickled, and a pickle can run code"
            if pickled
            else ""
        )
        raise ModelLoadError(
            name, f"{folder} holds no safetensors weights{why}", "Convert them with save_pretrained"
        )
    return files


def weights_marks(files: Sequence[Path]) -> tuple[str, str]:
    """Two digests, a short one and a long one, that tell weights apart without reading gigabytes."""
    return _mark(files, 4, 16), _mark(files, 16, 256)


def _mark(files: Sequence[Path], digest_size: int, pieces: int) -> str:
    """Of sizes, and of so many pieces of 64 KiB spread over each file."""
    mark = blake2b(digest_size=digest_size)
    for path in files:
        size = path.stat().st_size
        mark.update(str(size).encode())
        with path.open("rb") as file:
            for piece in range(pieces):
                file.seek(size * piece // pieces)
                mark.update(file.read(65536))
    return mark.hexdigest()


def read_end_ids(folder: Path, name: str, default: object) -> tuple[int, ...]:
    """The ids that end a text: those generation_config.json names, else the default's.

    :raises ModelLoadError: generation_config.json is damaged, or what it names are no ids.
    """
    path = folder / "generation_config.json"
    found = read_object(path, name).get("eos_token_id") if path.is_file() else None
    ends = default if found is None else found
    ids: tuple[Any, ...] = (
        () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    )
    if any(type(end) is not int or end < 0 for end in ids):
        raise ModelLoadError(
            name,
            f"eos_token_id in {folder} is {shown(ends)}, expected ids",
            "Check the model's files",
        )
    return ids


def shown(value: object) -> str:
    """The beginning of what a file holds, for a message."""
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


def _named_code(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Every entry of an auto_map, with the file that holds it."""
    for path in sorted(folder.glob("*config.json")):
        for found in _below(read_object(path, name), "auto_map"):
            entries = found.values() if isinstance(found, dict) else [found]
            flat = [
                part
                for entry in entries
                for part in (entry if isinstance(entry, list) else [entry])
            ]
            yield from ((path.name, shown(entry).strip("'")) for entry in flat if entry)


def _below(value: object, key: str) -> Iterator[Any]:
    """What stands under this key in a JSON value, at any depth."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield from (found for name, found in part.items() if name == key)
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _shards(index: Path, name: str) -> list[Path]:
    """The files an index lists, which lie beside it."""
    listed = read_object(index, name).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else []
    if not names or any(
        not isinstance(shard, str) or not shard or Path(shard).name != shard for shard in names
    ):
        raise ModelLoadError(
            name, f"{index} cannot be read (its weight_map lists no files)", "Download it again"
        )
    return [index.with_name(shard) for shard in sorted(set(names))]
