"""Functions that find model folders on disk or on the hub, read JSON files of limited size, and
refuse folders with code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from atts.errors import ModelLoadError, UnsupportedByEngine

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Glob patterns of the tokenizer and configuration files of a model."""
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
# Largest accepted token id. It is about forty times the size of the largest published vocabulary.
_MOST_IDS = 1 << 24
_LOOK = "Check the id and the network, or download the model with another tool and give its folder"
_PUBLISHED = {
    "phi3": {
        "configuration_phi3.Phi3Config",
        "modeling_phi3.Phi3ForCausalLM",
        "modeling_phi3.Phi3ForSequenceClassification",
        "modeling_phi3.Phi3ForTokenClassification",
        "Xenova/gpt-4o",
    }
}
"""References to remote code that atts accepts, keyed by model type. Transformers itself contains
these classes.
"""


def find_tokenizer(model: str, name: str) -> Path:
    """Return the folder with a model's tokenizer.

    If `model` is not a folder, it must be the id of a model on the Hugging Face Hub. Then only the
    tokenizer's files are downloaded.

    :raises ModelLoadError: `model` is neither a folder nor a hub id that can be downloaded.
    """
    advice = (
        "Add ?tokenizer=FOLDER at the end of the model's address, where FOLDER contains the "
        "tokenizer files"
    )
    return find_folder(model, name, TEXT_FILES, advice)


def find_folder(model: str, name: str, files: Sequence[str], advice: str = _LOOK) -> Path:
    """Return the folder of a model.

    If `model` is not a folder, it must be the id of a model on the Hugging Face Hub. Then only the
    files that match the patterns in `files` are downloaded.

    :raises ModelLoadError: `model` is neither a folder nor a hub id that can be downloaded.
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
        problem = f"{model!r} is not a folder, and cannot be downloaded from the hub ({first})"
        raise ModelLoadError(name, problem, advice) from error


def read_object(path: Path, name: str) -> dict[str, Any]:
    """Read a file of a model folder that contains one JSON object.

    :raises ModelLoadError: the file contains no JSON object, or is larger than such a file can be.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"the file is longer than {_MOST_BYTES >> 20} MB")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("the file has no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            name, f"{path} cannot be read ({error})", "Download or write the file again"
        ) from error
    return value


def checkpoint_dtype(folder: Path, name: str) -> Literal["float32", "bfloat16"]:
    """Return the data type in which to load a model's weights.

    It is bfloat16 if config.json names this type. Otherwise it is float32, which also represents
    float16 weights exactly.

    :raises ModelLoadError: config.json cannot be read.
    """
    values = read_object(folder / "config.json", name)
    said = values.get("dtype") or values.get("torch_dtype")
    return "bfloat16" if said == "bfloat16" else "float32"


def refuse_code(folder: Path, name: str) -> None:
    """Raise an error if a model folder contains code, or if its configuration refers to code.

    :raises ModelLoadError: the folder names or contains model code, or contains pipes or devices
        (reading them could take forever).
    """
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            problem = f"{entry} is a device, a pipe or a socket, not a file"
            raise ModelLoadError(name, problem, "Download the model again")
    path = folder / "config.json"
    model_type = read_object(path, name).get("model_type") if path.is_file() else None
    harmless = set[str]()
    if isinstance(model_type, str):
        harmless = _PUBLISHED.get(model_type, harmless)
    harmless_files = {f"{entry.partition('.')[0]}.py" for entry in harmless}
    code = [
        f"auto_map in {file}: {entry}"
        for file, entry in _auto_map_entries(folder, name)
        if entry not in harmless
    ]
    for pattern in _CODE:
        code += sorted(p.name for p in folder.glob(pattern) if p.name not in harmless_files)
    if code:
        problem = (
            f"{folder} brings its own code ({', '.join(code)}), but atts never runs code from a "
            "model folder"
        )
        advice = (
            "If the model works without this code, remove it; otherwise serve the model with "
            "vLLM and use that server"
        )
        raise ModelLoadError(name, problem, advice)


def refuse_ids(folder: Path, name: str) -> None:
    """Raise an error if a tokenizer has an impossibly high token id. For such an id, the tokenizers
    library would also allocate memory for all lower ids.

    :raises ModelLoadError: an id is higher than in any real vocabulary.
    """
    path = folder / "tokenizer.json"
    tokenizer = read_object(path, name) if path.is_file() else {}
    ids = list[object]()
    model = tokenizer.get("model")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
        ids += model["vocab"].values()
    added = tokenizer.get("added_tokens")
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    highest = max((number for number in ids if isinstance(number, int)), default=0)
    if highest > _MOST_IDS:
        problem = f"{path} cannot be read (its id {highest} is too high for a vocabulary)"
        raise ModelLoadError(name, problem, "Download or write the file again")


def template_of(folder: Path) -> str | None:
    """Return the chat template of a model folder as a string.

    The result is "" if the model has no template, and None if its files cannot be read.
    """
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError):
        return None
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = config.get("chat_template") if isinstance(config, dict) else None
    # Some folders contain several named templates. `str` then returns one text that contains all of
    # them.
    return template if isinstance(template, str) else str(template or "")


def refuse_gguf(folder: Path, name: str) -> None:
    """Raise an error if a folder has a GGUF file and no config.json, because atts cannot load GGUF
    files.

    :raises ModelLoadError: the folder has only GGUF weights; the message says how to make a folder
        that can be loaded.
    """
    if (folder / "config.json").exists() or not (files := sorted(folder.glob("*.gguf"))):
        return
    problem = (
        f"{folder} contains {files[0].name} but no config.json, and atts does not load GGUF files "
        "itself"
    )
    advice = (
        f"Serve the file (llama-server -m {files[0].name}) and use the server as "
        "llamacpp:http://HOST:PORT; or convert the file with transformers: "
        "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW), and "
        "the same with AutoTokenizer"
    )
    raise ModelLoadError(name, problem, advice)


def require_template(folder: Path, name: str) -> None:
    """Raise an error if a model folder has no chat template. This check loads no weights.

    :raises UnsupportedByEngine: the folder contains no chat template.
    :raises ModelLoadError: the folder has a GGUF file but no other model.
    """
    refuse_gguf(folder, name)
    path = folder / "tokenizer_config.json"
    try:
        has_template = (folder / "chat_template.jinja").stat().st_size > 0
    except OSError:
        has_template = path.is_file() and bool(read_object(path, name).get("chat_template"))
    if not has_template:
        raise UnsupportedByEngine(
            name, f"the tokenizer in {folder} has no chat template", NO_TEMPLATE
        )


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the model's safetensors files, and check that all files that the index lists exist.

    :raises ModelLoadError: files are missing, the index is damaged, or the weights are pickled.
    """
    index = folder / "model.safetensors.index.json"
    files = _shards(index, name) if index.is_file() else sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelLoadError(
            name, f"{folder} lacks {', '.join(missing)}", "Download the missing shards"
        )
    if not files:
        problem = f"{folder} contains no safetensors weights"
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickled:
            problem += f": {', '.join(pickled[:3])} may be pickled, and a pickle can run code"
        raise ModelLoadError(name, problem, "Convert them with save_pretrained")
    return files


def weights_marks(files: Sequence[Path]) -> tuple[str, str]:
    """Return a short and a long digest of the weights.

    Only samples of each file are read, because reading many gigabytes would take too long.
    """
    return _mark(files, 4, 16), _mark(files, 16, 256)


def _mark(files: Sequence[Path], digest_size: int, pieces: int) -> str:
    """Return a hash of the sizes of the files and of samples of their content. From each file,
    `pieces` evenly spread blocks of 64 KiB are read.
    """
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
    """Return the ids of the end tokens: those in generation_config.json, or else those in
    `default`.

    :raises ModelLoadError: generation_config.json is damaged, or its entries are not ids.
    """
    path = folder / "generation_config.json"
    configured = read_object(path, name).get("eos_token_id") if path.is_file() else None
    ends = default if configured is None else configured
    ids: tuple[Any, ...]
    if ends is None:
        ids = ()
    elif isinstance(ends, list | tuple):
        ids = tuple(ends)
    else:
        ids = (ends,)
    if any(type(end) is not int or end < 0 for end in ids):
        raise ModelLoadError(
            name,
            f"eos_token_id in {folder} is {shown(ends)}, expected token ids",
            "Check the model's files",
        )
    return ids


def shown(value: object) -> str:
    """Return the repr of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _auto_map_entries(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield every entry of the `auto_map` settings in the folder's JSON files, with the name of the
    file that contains the entry.
    """
    for path in sorted(folder.glob("*config.json")):
        for auto_map in _values_of(read_object(path, name), "auto_map"):
            for value in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
                for entry in value if isinstance(value, list) else [value]:
                    if entry:
                        yield path.name, shown(entry).strip("'")


def _values_of(value: object, key: str) -> Iterator[Any]:
    """Yield the value of every entry with this key in nested JSON data."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if key in part:
                yield part[key]
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def _shards(index: Path, name: str) -> list[Path]:
    """Return the weight files that an index file lists. The files must be in the same folder as the
    index.
    """
    listed = read_object(index, name).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else []
    if not names or any(
        not isinstance(shard, str) or not shard or Path(shard).name != shard for shard in names
    ):
        raise ModelLoadError(
            name,
            f"{index} cannot be read (its weight_map lists no files)",
            "Download the model again",
        )
    return [index.with_name(shard) for shard in sorted(set(names))]
