"""Pairs of models that work together: prompts, lengths, ports and sizes, read from `pairs.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from atts.api.keys import flat
from atts.core import Role
from atts.errors import OptionError
from atts.journal import Json

PAIR = "pair "
"""How the origin of a value begins that a pair has set; the pair's name follows."""
Place = Literal["vllm", "sglang", "local"]
_FIRST_PORT: Mapping[Role, int] = MappingProxyType({"target": 8000, "draft": 8001})
_NEXT_PORT: Mapping[Role, int] = MappingProxyType({"target": 100, "draft": 1})


@dataclass(frozen=True, slots=True)
class PairChoice:
    """Which pair runs, and where its models are."""

    pair: Annotated[
        str | None,
        "models that work together, with their prompts and lengths: `atts pairs` lists them",
    ] = None
    at: Annotated[
        Place,
        "where a pair's models are: servers on this machine (target :8000, draft :8001), or here",
    ] = "vllm"
    draft_servers: Annotated[int, "servers of a pair's draft: ports 8001, 8002, ..."] = 1
    target_servers: Annotated[int, "servers of a pair's target: ports 8000, 8100, ..."] = 1

    def __post_init__(self) -> None:
        for name in ("draft_servers", "target_servers"):
            if not 1 <= getattr(self, name) <= 90:
                raise OptionError(name, f"{getattr(self, name)} is outside 1 to 90")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of the paper's table; accuracy is "right in any of 16", as judged by a model."""

    accuracy: float
    marginal: float
    conditional: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes of a GPU's memory, and how much it can read."""

    weights: float  # gigabytes
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    packed: bool = False  # published in four bits: nothing is won by --quantization

    @property
    def cache_bytes(self) -> int:
        """Of one token, in 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models that work together; `settings` are values of configuration keys."""

    name: str
    draft: str
    target: str
    note: str
    settings: Mapping[str, Json]
    # by benchmark
    prompts: Mapping[str, Mapping[str, Json]] = field(default_factory=dict[str, Mapping[str, Json]])
    published: Mapping[str, PublishedRow] = field(default_factory=dict[str, PublishedRow])

    def model(self, role: Role) -> str:
        """The model of that role, as the hub calls it."""
        return self.draft if role == "draft" else self.target

    def words(self, role: Role, at: Place = "vllm", servers: int = 1) -> str:
        """The engine in words: servers of this machine at their usual ports, or the model in this
        process.

        >>> find_pair("r1-1.5b/r1-7b").words("draft", servers=2)[:72]
        'vllm:http://127.0.0.1:8001/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B,htt'
        """
        model = self.model(role)
        if model == "embedded" or at == "local":
            return model if model == "embedded" else f"hf:{model}?dtype=bfloat16"
        return f"{at}:" + ",".join(
            f"http://127.0.0.1:{port}/{model}" for port in ports(role, servers)
        )

    def size(self, role: Role) -> ModelSize:
        """How large the model of that role is."""
        return model_sizes()[self.model(role)]


def ports(role: Role, servers: int) -> list[int]:
    """Where the servers of a role listen: the draft's side by side, the target's a hundred apart.

    >>> ports("draft", 3), ports("target", 2)
    ([8001, 8002, 8003], [8000, 8100])
    """
    return [_FIRST_PORT[role] + _NEXT_PORT[role] * number for number in range(servers)]


def find_pair(name: str) -> Pair:
    """The pair of that name.

    :raises OptionError: there is none.
    """
    if name not in known_pairs():
        raise OptionError(
            "pair", f"unknown pair {name!r}; `atts pairs` lists them", [*known_pairs()], name
        )
    return known_pairs()[name]


@cache
def known_pairs() -> Mapping[str, Pair]:
    """Every pair by its name."""
    file = _file()
    return MappingProxyType(
        {name: _pair(name, row, file["kinds"][row["kind"]]) for name, row in file["pairs"].items()}
    )


@cache
def model_sizes() -> Mapping[str, ModelSize]:
    """The models of the pairs, as the hub calls them."""
    return MappingProxyType({name: ModelSize(**row) for name, row in _file()["models"].items()})


def _pair(name: str, row: Mapping[str, Any], kind: Mapping[str, Any]) -> Pair:
    published = {
        benchmark: PublishedRow(**numbers)
        for benchmark, numbers in row.get("published", {}).items()
    }
    settings = dict(flat({key: value for key, value in kind.items() if key != "benchmarks"}))
    return Pair(
        name,
        row["draft"],
        row["target"],
        row["note"],
        settings,
        kind.get("benchmarks", {}),
        published=published,
    )


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("pairs.toml").read_text(encoding="utf-8"))
