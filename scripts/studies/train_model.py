"""Define the embedded models in plain torch, and compute their gradients in one-threaded processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn

from scripts.studies.train_data import Batch

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The size of a model; embeddings and output matrix are one."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocabulary: int = 512
    head_dim: int = 64


_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
"""What the fields are called in a saved configuration."""


class Norm(nn.Module):
    """RMS norm in float32, handed on in the compute type."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, compute: torch.dtype) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5).to(compute)


class Linear(nn.Module):
    """A weight without bias, cast to the compute type where it is used."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * scale * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


@dataclass(frozen=True, slots=True)
class Where:
    """The positions for attention: rotation tables, and an additive mask."""

    cos: Tensor
    sin: Tensor
    mask: Tensor


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Written out, it is faster than the fused kernel at these lengths.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(
            config.num_heads * config.head_dim, config.hidden_size, (2 * config.num_layers) ** -0.5
        )

    def forward(self, x: Tensor, where: Where) -> Tensor:
        batch, length, _ = x.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)).to(x.dtype)
        joined = (
            F.linear(x, weight)
            .view(batch, length, self.heads + 2 * self.kv_heads, self.dim)
            .transpose(1, 2)
        )
        turned = _rotate(joined[:, : self.heads + self.kv_heads], where.cos, where.sin)
        q = turned[:, : self.heads]
        k = turned[:, self.heads :]
        v = joined[:, self.heads + self.kv_heads :]
        groups = self.heads // self.kv_heads
        if groups > 1:
            k = k.repeat_interleave(groups, 1)
            v = v.repeat_interleave(groups, 1)
        weights = torch.softmax((q * self.dim**-0.5) @ k.transpose(-1, -2) + where.mask, -1)
        mixed: Tensor = self.o_proj(
            (weights @ v).transpose(1, 2).reshape(batch, length, self.heads * self.dim)
        )
        return mixed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(
            config.intermediate_size, config.hidden_size, (2 * config.num_layers) ** -0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat((self.gate_proj.weight, self.up_proj.weight)).to(x.dtype)
        gate, up = F.linear(x, weight).chunk(2, -1)
        narrowed: Tensor = self.down_proj(F.silu(gate) * up)
        return narrowed


class Layer(nn.Module):
    """A transformer layer; the residual stream stays in float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        compute = where.cos.dtype
        middle: Tensor = x + self.self_attn(self.input_layernorm(x, compute), where)
        result: Tensor = middle + self.mlp(self.post_attention_layernorm(middle, compute))
        return result


class Body(nn.Module):
    """Everything but the output matrix; named as the saved weights are."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size)


class Llama(nn.Module):
    """A small Llama with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)

    def where(self, length: int, compute: torch.dtype) -> Where:
        """Return the positions of a fresh sequence."""
        mask = torch.full((length, length), -1e9).triu(1).to(compute)
        rates = 10_000.0 ** (-torch.arange(0, self.config.head_dim, 2) / self.config.head_dim)
        angles = torch.outer(torch.arange(length).float(), rates)
        return Where(angles.cos().to(compute), angles.sin().to(compute), mask)

    def states(self, ids: Tensor, where: Where) -> list[Tensor]:
        """Return the residual stream after every layer, [batch, seq, hidden] each."""
        found = [F.embedding(ids, self.model.embed_tokens.weight)]
        for layer in self.model.layers:
            found.append(layer(found[-1], where))
        return found[1:]

    def logits(self, state: Tensor, compute: torch.dtype) -> Tensor:
        """Return raw next-token scores from a residual stream."""
        return F.linear(self.model.norm(state, compute), self.head.to(compute)).float()

    @property
    def head(self) -> Tensor:
        """Return the output matrix."""
        return self.model.embed_tokens.weight

    def loss(
        self, ids: Tensor, labels: Tensor, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Return the cross-entropy of the labels that are not -100, computed in bfloat16."""
        wanted = labels.reshape(-1)
        compute = torch.bfloat16
        rows = (wanted != -100).nonzero()[:, 0]
        state = self.states(ids, self.where(ids.shape[1], compute))[-1]
        logits = self.logits(state.reshape(-1, state.shape[-1])[rows], compute)
        return F.cross_entropy(logits, wanted[rows], reduction=reduction)


class Descent:
    """Optimizers of a model's weights, each with its peak rate."""

    def __init__(self, *optimizers: tuple[torch.optim.Optimizer, float]) -> None:
        self.optimizers = optimizers

    @classmethod
    def of(cls, model: Llama, muon: float, adam: float, decay: float) -> Descent:
        """Return Muon for the matrices of a model's layers, AdamW for all else."""
        matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
        others = [
            weight for weight in model.parameters() if all(weight is not one for one in matrices)
        ]
        return cls(
            (torch.optim.Muon(matrices, lr=muon, momentum=0.95, weight_decay=decay), muon),
            (torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0), adam),
        )

    def apply(self, factor: float) -> None:
        """Make a step along the gradients at a share of the peak rates, and clear the gradients."""
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()


def descend(
    name: str, descent: Descent, loss: Callable[[], Tensor], factors: Sequence[float]
) -> None:
    """Make a step along each loss's gradients, clipped to length 1, at each of these shares of the
    peak rates.
    """
    began = time.process_time()
    weights = [group["params"] for opt, _ in descent.optimizers for group in opt.param_groups]
    for step, factor in enumerate(factors, 1):
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(chain.from_iterable(weights), 1.0)
        descent.apply(factor)
        if step % 50 == 0:
            seconds = time.process_time() - began
            print(
                f"{name} {step}/{len(factors)}: loss {value.item():.4f}, {seconds:.0f} s",
                flush=True,
            )


def save(model: Llama, folder: Path, end: int, pad: int) -> None:
    """Write configuration and bf16 weights; each file is replaced in one step, the weights last."""
    from safetensors.torch import save as to_bytes

    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(model.config, field) for field, name in _FIELDS.items()},
        "vocab_size": model.config.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.head is model.model.embed_tokens.weight,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    generation = {"do_sample": True, "temperature": 0.7, "eos_token_id": end, "pad_token_id": pad}
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "config.json", (json.dumps(fields, indent=2) + "\n").encode())
    _replace(folder / "generation_config.json", (json.dumps(generation, indent=2) + "\n").encode())
    _replace(folder / "model.safetensors", to_bytes(weights, metadata={"format": "pt"}))


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def load(folder: Path) -> Llama:
    """Load a saved model in float32, so that the caller picks the compute type."""
    from safetensors.torch import load_file

    saved = json.loads((folder / "config.json").read_text())
    sizes = {field: saved[name] for field, name in _FIELDS.items()}
    model = Llama(ModelConfig(**sizes, vocabulary=saved["vocab_size"]))
    model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    return model


class Workers:
    """The calling process and its helpers.

    Micro-batches are dealt out in turn, so sums are reproducible.
    """

    def __init__(self, model: Llama, count: int) -> None:
        torch.set_num_threads(1)
        self._model = model.share_memory()
        self._count = count
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            max(1, count - 1), context, initializer=_begin, initargs=(model,)
        )

    def backward(self, batches: Sequence[Batch]) -> float:
        """Leave the whole step's gradients in the model, and return its mean loss per learned
        token.

        :raises BrokenProcessPool: a helper died.
        """
        learned = sum(batch.learned for batch in batches)
        shares = [batches[place :: self._count] for place in range(self._count)]
        others = [self._pool.submit(_assist, share, learned) for share in shares[1:]]
        loss = _backward(self._model, shares[0], learned)
        for other in others:
            own, gradients = other.result()
            loss += own
            for weight, gradient in zip(self._model.parameters(), gradients, strict=True):
                assert weight.grad is not None, "every weight takes part"
                weight.grad += gradient
        return loss

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _backward(model: Llama, batches: Sequence[Batch], learned: int) -> float:
    """Add the gradients of these batches' part of the mean loss over so many tokens; that part."""
    total = 0.0
    for batch in batches:
        loss = model.loss(batch.ids, batch.labels, "sum") / learned
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


# models of a helper process: the one whose weights the caller changes
_models: list[Llama] = []


def _begin(model: Llama) -> None:
    # Linux shares cores between sessions first: in the caller's, all would get one share
    os.setsid()
    torch.set_num_threads(1)
    _models.append(model)


def _assist(batches: Sequence[Batch], learned: int) -> tuple[float, list[Tensor]]:
    """Compute a helper's part of the loss, and its gradients."""
    model = _models[0]
    model.zero_grad()
    loss = _backward(model, batches, learned)
    return loss, [
        torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()
    ]
