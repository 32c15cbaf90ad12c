"""Names the draft and target pairs of the paper, with what it says of each and what was run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from atts.core import Role, Sampling
from atts.errors import OptionError
from atts.pipelines import Chunking, Policy

Where = Literal["vllm", "sglang", "local"]
PORTS: Mapping[Role, int] = {"target": 8000, "draft": 8001}
"""Where docs/servers.md puts the two servers of a pair."""

PUBLISHED_POLICY = Policy(
    samples=16,
    turns=15,
    max_tokens=15_000,
    chunking=Chunking(draft_tokens=500, target_tokens=500, stop=()),
    sampling=Sampling(temperature=0.8),
    early_stop="none",
    timeout_seconds=3600.0,
)
"""As the published suites have it: 16 samples, 15 turns, pieces of 500 tokens, temperature 0.8, nothing cut short."""


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the paper's table; accuracy is "right in any of 16", as judged by a model."""

    accuracy: float
    marginal: float
    conditional: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models that work together; `published` is by benchmark, and empty where the paper's numbers are not known."""

    name: str
    draft: str
    target: str
    note: str
    published: Mapping[str, Published] = field(default_factory=dict[str, Published])
    run_here: str = "not run by this project, which had no GPUs for it"
    policy: Policy = PUBLISHED_POLICY
    rate: float = 0.4

    def model(self, role: Role) -> str:
        """The model of that role, as the hub calls it."""
        return self.draft if role == "draft" else self.target

    def words(self, role: Role, where: Where) -> str:
        """The engine in words: a server of this machine at its usual port, or the model in this process.

        >>> find_pair("r1-1.5b/r1-70b").words("target", "vllm")
        'vllm:http://127.0.0.1:8000/deepseek-ai/DeepSeek-R1-Distill-Llama-70B'
        """
        if self.model(role) == "embedded":
            return "embedded"
        model = self.model(role)
        return f"hf:{model}" if where == "local" else f"{where}:http://127.0.0.1:{PORTS[role]}/{model}"


_R1 = "deepseek-ai/DeepSeek-R1-Distill"
_QWQ = "Qwen/QwQ-32B"
_QWEN = "Qwen/Qwen2.5-7B-Instruct"
_LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
_S1 = "simplescaling/s1.1-32B"
_SCRIPTS = "in the published scripts"

_PUBLISHED = {
    "math100": Published(0.96, 7.19, 5.35),
    "aime24": Published(0.467, 5.71, 10.10),
    "aime25": Published(0.40, 14.50, 12.82),
    "amc23": Published(0.76, 10.42, 8.20),
}
PAIRS: tuple[Pair, ...] = (
    Pair("r1-1.5b/r1-70b", f"{_R1}-Qwen-1.5B", f"{_R1}-Llama-70B", "the abstract's pair; its table rows are not known"),
    Pair("r1-8b/qwq-32b", f"{_R1}-Llama-8B", _QWQ, "the pair of the published traces"),
    Pair("qwen-7b/qwq-32b", _QWEN, _QWQ, "the rows of the main table that are known", _PUBLISHED),
    Pair("r1-1.5b/qwq-32b", f"{_R1}-Qwen-1.5B", _QWQ, _SCRIPTS),
    Pair("llama-8b/qwq-32b", _LLAMA, _QWQ, _SCRIPTS),
    Pair("s1-7b/s1-32b", "simplescaling/s1.1-7B", _S1, _SCRIPTS),
    Pair("r1-1.5b/s1-32b", f"{_R1}-Qwen-1.5B", _S1, _SCRIPTS),
    Pair("r1-8b/s1-32b", f"{_R1}-Llama-8B", _S1, _SCRIPTS),
    Pair("qwen-7b/s1-32b", _QWEN, _S1, _SCRIPTS),
    Pair("llama-8b/s1-32b", _LLAMA, _S1, _SCRIPTS),
    Pair("skywork-7b/skywork-32b", "Skywork/Skywork-OR1-7B", "Skywork/Skywork-OR1-32B", _SCRIPTS),
    Pair(
        "embedded",
        "embedded",
        "embedded",
        "the two small models that come with the project; they know arithmetic only",
        run_here="runs anywhere: scripts/math arithmetic --pair embedded",
        policy=Policy(max_tokens=512, chunking=Chunking(draft_tokens=64, target_tokens=64), early_stop="none"),
        rate=0.2,
    ),
)


def find_pair(name: str) -> Pair:
    """The pair of that name.

    :raises OptionError: there is none.
    """
    found = next((pair for pair in PAIRS if pair.name == name), None)
    if found is None:
        raise OptionError("pair", f"unknown pair {name!r}", [pair.name for pair in PAIRS], name)
    return found
