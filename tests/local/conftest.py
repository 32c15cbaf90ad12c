"""Fixtures of tiny random models of every architecture, and a naive loop to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atts.accel.build import build_accelerated
from atts.local import LoopStats
from atts.local.builder import MakeModel, build_loop
from atts.local.messages import Command, LoopReport
from tests.local.speculating import Driven, Script, planned

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last %}<|end|>{% endif "
    "%}{% endfor %}"
    "{% if add_generation_prompt %}<|end|><|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer of 256 bytes, a few merges and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIALS
    )
    inner.train_from_iterator(["the step is done.\n\nthe next step is not done\n\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Make a random model of `family`. Its logits differ enough that two ways of computing them can
    be compared.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.25,
        **changes,
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **size)).eval()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a tiny random model once per session and return its folder."""
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family}-{sorted(changes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            model = tiny_model(family, **changes)
            if changes.get("attention_bias") or family == "qwen2":
                for name, weight in model.named_parameters():
                    if name.endswith("bias"):
                        torch.nn.init.normal_(weight, std=0.3)
            model.save_pretrained(folder)
            save_tokenizer(folder)
            made[key] = folder
        return made[key]

    return make


class Naive:
    """A slow and simple decoder of one sequence, which runs the whole sequence through the model
    for every token.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Return the logits [length, vocabulary]."""
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits
        return logits[0].float()

    def scores(self, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> list[float]:
        """Return the log-probability of every suffix token."""
        logprobs = self.logits(prefix + suffix).log_softmax(-1)
        rows = range(len(prefix) - 1, len(prefix) + len(suffix) - 1)
        return [float(logprobs[row, token]) for row, token in zip(rows, suffix, strict=True)]

    @torch.inference_mode()
    def exact_scores(self, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> list[float]:
        """Return the log-probabilities of the suffix tokens, computed entirely in float64.

        The model may have neither biases nor norms of queries and keys. transformers is not used,
        because it computes norms and softmax in float32.
        """
        config = self.model.config
        weights: dict[str, torch.Tensor] = {
            name: w.double() for name, w in self.model.state_dict().items()
        }
        ids = prefix + suffix
        width = config.head_dim
        group = config.num_attention_heads // config.num_key_value_heads
        frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (
            torch.arange(0, width, 2).float() / width
        )
        angles = torch.outer(torch.arange(len(ids)).float(), frequencies).repeat(1, 2).double()
        mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            scale = (x.square().mean(-1, keepdim=True) + float(config.rms_norm_eps)).sqrt()
            return x / scale * weights[f"model.{name}.weight"]

        def apply_rope(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()

        def heads(x: torch.Tensor, name: str, times: int) -> torch.Tensor:
            rows = (x @ weights[name].T).view(len(ids), -1, width).transpose(0, 1)
            return rows.repeat_interleave(times, 0)

        x = weights["model.embed_tokens.weight"][list(ids)]
        for layer in range(config.num_hidden_layers):
            own = f"model.layers.{layer}"
            h = normed(x, f"layers.{layer}.input_layernorm")
            query = apply_rope(heads(h, f"{own}.self_attn.q_proj.weight", 1))
            key = apply_rope(heads(h, f"{own}.self_attn.k_proj.weight", group))
            looks = (query @ key.mT / width**0.5 + mask).softmax(-1)
            mixed = looks @ heads(h, f"{own}.self_attn.v_proj.weight", group)
            x = x + mixed.transpose(0, 1).flatten(1) @ weights[f"{own}.self_attn.o_proj.weight"].T
            h = normed(x, f"layers.{layer}.post_attention_layernorm")
            gate, up, down = (
                weights[f"{own}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            x = x + (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
        logprobs = (normed(x, "norm") @ weights["lm_head.weight"].T).log_softmax(-1)
        return [float(logprobs[row - 1, ids[row]]) for row in range(len(prefix), len(ids))]

    def agrees(self, prompt: tuple[int, ...], ids: tuple[int, ...], gap: float = 1e-4) -> bool:
        """Return whether `ids` agree with greedy decoding: each id is the most likely token, or its
        logit is less than `gap` below the largest.
        """
        rows = self.logits(prompt + ids)[len(prompt) - 1 : -1]
        best = rows.amax(-1)
        chosen = rows.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
        return bool((best - chosen <= gap).all())


@pytest.fixture(scope="session")
def naive(make_model: Callable[..., Path]) -> Callable[..., Naive]:
    """Return a factory of the naive loop over the model in a folder."""
    made: dict[Path, Naive] = {}

    def make(folder: Path) -> Naive:
        if folder not in made:
            made[folder] = Naive(folder)
        return made[folder]

    return make


@pytest.fixture
def drive() -> Callable[..., Driven]:
    """Run a step loop over a script in this thread, so that no thread schedule changes the result."""

    def run(
        folder: Path,
        steps: list[list[Command]],
        make_model: MakeModel | None = None,
        **changes: Any,
    ) -> Driven:
        small: dict[str, Any] = {"device": "cpu", "kernel": "torch", "kv_tokens": 4096}
        small |= {"max_batch": 16, "chunk_tokens": 64, "threads": 1}
        drafter = changes.pop("drafter", "")
        plan, config = planned(folder, Path(drafter) if drafter else None, **{**small, **changes})
        driven = Driven({}, LoopStats())

        def tell(report: LoopReport) -> None:
            for reply in report.replies:
                assert reply.request_id not in driven.replies, "a request got two replies"
                driven.replies[reply.request_id] = reply
            if report.stats is not None:
                driven.stats = report.stats

        if plan.is_plain:
            loop = build_loop(config, tell, make_model)[0]
        else:
            loop = build_accelerated(plan, config, tell, make_model)[0]
        loop.run(Script(steps))
        return driven

    return run


@pytest.fixture(scope="session")
def near(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a draft model by adding noise to the weights of the tiny target, so that the target
    accepts about half of its proposals.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_model("llama")
    folder = tmp_path_factory.mktemp("near")
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.04 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
