"""Train proposers for the embedded target: its early exit, streaming heads and a deep drafter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import anyio
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from atts.accel.overlap.mirror import EXIT_FILE, STREAM_FILE, ExitAdapter, StreamHead, StreamHeads
from atts.core import SampleRequest, TokenIds
from atts.evaluators import share_estimate
from atts.evaluators.datasets.arithmetic import problems
from atts.local import LocalOptions
from atts.local.batch import PrefillChunk, StepPlan, step_batch
from atts.local.loader import load_weights
from atts.local.model import TorchModel
from atts.local.model_config import read_model_config
from atts.local.seams import LayerHook
from atts.local.sequence import new_sequence
from atts.models.folders import checkpoint_dtype
from scripts.studies.local import written
from scripts.studies.train_model import Descent, Llama, ModelConfig, descend, load, save

_RANK = 64  # rank of the exit adapter
_HEADS = 2
_WIDTH = 256
_FADE = 0.8  # streaming heads, their width, and how much less the next one's loss counts
_BATCH = 512
_PEAK = 0.003
_WRITTEN_TOKENS = 300
_TOPS = 1, 3, 8
_HEADS_TESTED = 0.06  # share of the texts kept for tests


@dataclass(frozen=True, slots=True)
class HeadsRecipe:
    """The models, texts and steps that the exit and the heads are trained with."""

    target: Path
    drafter: Path
    prompts: Path | None = None  # file with one prompt per line; None: arithmetic
    texts: int = 1500
    steps: int = 1500
    seed: int = 6
    device: str = "cpu"
    # auto: float32 on a processor, what the checkpoint has on a GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @property
    def options(self) -> LocalOptions:
        """Return the options of an engine that writes the texts."""
        return LocalOptions(worker="thread", threads=1, device=self.device, dtype=self.dtype)

    def type_of(self, folder: Path) -> torch.dtype:
        """Return the type of numbers that a model is read in."""
        found = self.dtype
        if found == "auto":
            on_gpu = self.device.startswith("cuda")
            found = checkpoint_dtype(folder, folder.name) if on_gpu else "float32"
        return torch.bfloat16 if found == "bfloat16" else torch.float32


class Text(NamedTuple):
    """A prompt with what the target wrote after it."""

    ids: TokenIds
    first: int  # index at which the part begins


class States(NamedTuple):
    """The rows of some texts: at the exit, before the output matrix, and the written tokens."""

    exits: Tensor
    finals: Tensor
    tokens: Tensor
    lengths: list[int]  # lengths of the texts


class Reader:
    """A model that reads whole texts and returns its states."""

    def __init__(
        self,
        folder: Path,
        layers: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """Read only the first `layers` layers, then the output matrix."""
        config = read_model_config(folder, folder.name)
        self.device = torch.device(device)
        weights = load_weights(folder, config, dtype, self.device, folder.name)
        if layers is not None:
            fewer = {name: getattr(config, name)[:layers] for name in ("ropes", "windows")}
            config = replace(config, num_layers=layers, **fewer)
            weights = replace(weights, layers=weights.layers[:layers])
        self.config = config
        self.weights = weights
        size = (
            config.num_layers,
            2,
            config.context_length + 2,
            config.num_kv_heads,
            config.head_dim,
        )
        cache = torch.zeros(size, dtype=dtype, device=self.device)
        self.model = TorchModel(config, weights, cache)

    def states(self, texts: Sequence[Text], layers: int) -> States:
        """Return the states of all positions where something was written."""
        heard = list[Tensor]()
        finals = [self.read(text, LayerHook(layers, heard.append)) for text in texts]
        tokens = [torch.tensor(text.ids[text.first :], device=self.device) for text in texts]
        return States(
            torch.cat(heard), torch.cat(finals), torch.cat(tokens), list(map(len, tokens))
        )

    def read(self, text: Text, tap: LayerHook | None = None) -> Tensor:
        """Return rows before the output matrix, at every position after which something was
        written.
        """
        sequence = new_sequence(1, SampleRequest(text.ids, 1), 0.0)
        sequence.row = 0
        stop = len(text.ids) - 1
        table = np.arange(1, stop + 2, dtype=np.int32)[None]
        batch = step_batch(StepPlan([], [PrefillChunk(sequence, 0, stop, stop - 1)], [], []), table)
        places = np.arange(text.first - 1, stop)
        return self.model.forward(replace(batch, logit_rows=places), table, tap)


async def write_texts(recipe: HeadsRecipe) -> list[Text]:
    """Let the target write a text for every prompt of the recipe."""
    if recipe.prompts is None:
        prompts = [each.text for each in problems("train", recipe.texts)]
    else:
        prompts = recipe.prompts.read_text(encoding="utf-8").splitlines()[: recipe.texts]
    found = await written(recipe.target, prompts, _WRITTEN_TOKENS, recipe.seed, recipe.options)
    return sorted(Text(one.ids + text, len(one.ids)) for one, text in found)


def train_exit(reader: Reader, states: States, recipe: HeadsRecipe) -> ExitAdapter:
    """Train rows at the exit towards those from which the output matrix reads the target's
    distribution.

    What is learned is kept in float32, and rounded to the model's type where it meets its rows.
    """
    torch.manual_seed(recipe.seed)
    start = ExitAdapter.untrained(reader.config, reader.weights)
    eps = reader.config.norm_eps
    head = reader.weights.head
    width = reader.config.hidden_size
    down = (torch.randn(_RANK, width) * width**-0.5).to(reader.device)
    up = torch.zeros(width, _RANK, device=reader.device)
    # copied even if it is float32 already
    norm = start.norm.detach().to(torch.float32, copy=True)
    learned = [part.requires_grad_() for part in (norm, down, up)]
    for rows in _descent(learned, len(states.tokens), recipe.steps):
        adapter = ExitAdapter(start.layers, *(part.to(head) for part in learned))
        with torch.no_grad():
            aim = F.log_softmax(F.linear(states.finals[rows], head).float(), -1)
        law = F.log_softmax(F.linear(adapter(states.exits[rows], eps), head).float(), -1)
        F.kl_div(law, aim, log_target=True, reduction="batchmean").backward()  # type: ignore[no-untyped-call]
    return ExitAdapter(start.layers, *(part.detach() for part in learned))


def train_streams(reader: Reader, states: States, recipe: HeadsRecipe) -> StreamHeads:
    """Train heads that name the token after the following ones from the drafter's state."""
    torch.manual_seed(recipe.seed)
    width = reader.config.hidden_size
    head = reader.weights.head
    sizes = [width * (2 + at) for at in range(_HEADS)]
    streams = [
        StreamHead(
            (torch.randn(_WIDTH, size) * size**-0.5).to(reader.device),
            torch.zeros(width, _WIDTH, device=reader.device),
        )
        for size in sizes
    ]
    following = _following(states)
    learned = [part.requires_grad_() for stream in streams for part in stream]
    for rows in _descent(learned, len(following), recipe.steps):
        heads = StreamHeads(reader.weights.embedding, _rounded(streams, head))
        losses = [
            _FADE**at
            * F.cross_entropy(
                F.linear(heads(states.finals[rows], known), head).float(), following[rows, at + 1]
            )
            for at in range(_HEADS)
            for known in [following[rows, : at + 1]]
        ]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    found = [StreamHead(*(part.detach() for part in stream)) for stream in streams]
    return StreamHeads(reader.weights.embedding, found)


def _rounded(streams: Sequence[StreamHead], like: Tensor) -> list[StreamHead]:
    """Return the heads in the type of numbers, and on the device, of another tensor."""
    return [StreamHead(*(part.to(like) for part in stream)) for stream in streams]


def _following(states: States) -> Tensor:
    """Return the tokens at each position and after it, [places, heads + 1]; after the end, the last
    token again.
    """
    parts = [
        torch.cat([part, part[-1:].expand(_HEADS)]).unfold(0, _HEADS + 1, 1)
        for part in torch.split(states.tokens, states.lengths)
    ]
    return torch.cat(parts)


def _descent(parts: list[Tensor], places: int, steps: int) -> Iterator[Tensor]:
    """Yield rows to learn from, step by step.

    Advancing the iterator applies the gradients of the last batch."""
    optimizer = torch.optim.AdamW(parts, lr=_PEAK, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        yield torch.randint(places, (_BATCH,))
        optimizer.step()
        schedule.step()


def tops(adapter: ExitAdapter, reader: Reader, states: States) -> str:
    """Return how often the written token is among the first 1, 3 and 8 of the exit's tokens."""
    with torch.inference_mode():
        logits = F.linear(adapter(states.exits, reader.config.norm_eps), reader.weights.head)
        places = (logits > logits.gather(1, states.tokens[:, None])).sum(1)
    parts = torch.split(places, states.lengths)
    shares = [
        share_estimate([(int((part < most).sum()), len(part)) for part in parts]) for most in _TOPS
    ]
    return "; ".join(f"top {most}: {share}" for most, share in zip(_TOPS, shares, strict=True))


def stream_tops(heads: StreamHeads, reader: Reader, states: States) -> str:
    """Return how often each head's first token is the written one."""
    following = _following(states)
    heads = StreamHeads(heads.embedding, _rounded(heads.streams, reader.weights.head))
    shares = list[str]()
    for at in range(len(heads.streams)):
        with torch.inference_mode():
            first = F.linear(
                heads(states.finals, following[:, : at + 1]), reader.weights.head
            ).argmax(1)
        hits = torch.split(first == following[:, at + 1], states.lengths)
        shares.append(
            f"head {at + 1}: {share_estimate([(int(part.sum()), len(part)) for part in hits])}"
        )
    return "; ".join(shares)


def train_exit_and_streams(recipe: HeadsRecipe) -> None:
    """Write texts, train the exit and the heads, save them, and print results on test texts."""
    texts = anyio.run(write_texts, recipe)
    kept = max(1, round(_HEADS_TESTED * len(texts)))
    _make_exit(recipe, texts[:kept], texts[kept:])
    _make_streams(recipe, texts[:kept], texts[kept:])


def _make_exit(recipe: HeadsRecipe, tests: Sequence[Text], texts: Sequence[Text]) -> None:
    reader = Reader(recipe.target, dtype=recipe.type_of(recipe.target), device=recipe.device)
    layers = ExitAdapter.untrained(reader.config, reader.weights).layers
    tested, learned = (reader.states(part, layers) for part in (tests, texts))
    adapter = train_exit(reader, learned, recipe)
    parts = {name: getattr(adapter, name) for name in ("norm", "down", "up")}
    file = _save(recipe.target / EXIT_FILE, parts, {"layers": str(layers)})
    print(
        f"{file}: after {layers} layers, {len(learned.tokens)} tokens learned, "
        f"{len(tested.tokens)} tested"
    )
    print("untrained", tops(ExitAdapter.untrained(reader.config, reader.weights), reader, tested))
    print(
        "trained",
        tops(
            ExitAdapter.read(recipe.target, reader.config, reader.weights, "heads"), reader, tested
        ),
    )


def _make_streams(recipe: HeadsRecipe, tests: Sequence[Text], texts: Sequence[Text]) -> None:
    reader = Reader(recipe.drafter, dtype=recipe.type_of(recipe.drafter), device=recipe.device)
    tested, learned = (reader.states(part, 1) for part in (tests, texts))
    heads = train_streams(reader, learned, recipe)
    parts = {
        f"{name}.{at}": getattr(each, name)
        for at, each in enumerate(heads.streams)
        for name in ("down", "up")
    }
    file = _save(recipe.drafter / STREAM_FILE, parts, {})
    print(f"{file}: {stream_tops(heads, reader, tested)}")


def _save(file: Path, parts: Mapping[str, Tensor], metadata: dict[str, str]) -> Path:
    file.parent.mkdir(exist_ok=True)
    save_file(
        {name: part.bfloat16().cpu().contiguous() for name, part in parts.items()},
        file,
        metadata=metadata,
    )
    return file


_SHAPE = ModelConfig(
    hidden_size=64,
    num_layers=8,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=96,
    vocabulary=512,
    head_dim=32,
)
_BATCH_TOKENS = 2048
_WARM = 40
_EVEN = 1.6  # factor for the share of steps that are left: rates fall once that is below 1 / 1.6
_MUON = 0.01
_ADAM = 0.004
_DECAY = 0.1
_DRAFTER_TESTED = 0.03  # share of the texts kept for tests


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """The models, texts and steps that the deep drafter is trained with."""

    target: Path
    draft: Path
    out: Path
    texts: int = 6000
    steps: int = 6000
    seed: int = 8


class Lesson(NamedTuple):
    """A text of the target's, and the states that its output matrix read at every token written."""

    ids: TokenIds
    first: int  # index at which writing begins
    states: Tensor


def begun(draft: Llama) -> Llama:
    """Return a model with the draft's embedding, feed-forward blocks and norms spread among the
    layers; else random.
    """
    model = Llama(_SHAPE)
    last = _SHAPE.num_layers - 1
    for at, layer in enumerate(draft.model.layers):
        own = model.model.layers[round(at * last / (len(draft.model.layers) - 1))]
        kept = {
            name: weight
            for name, weight in layer.state_dict().items()
            if not name.startswith("self_attn")
        }
        own.load_state_dict(kept, strict=False)
    model.model.embed_tokens.load_state_dict(draft.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(draft.model.norm.state_dict())
    return model


def lessons(reader: Reader, texts: Sequence[Text]) -> list[Lesson]:
    """Return the training examples of each text."""
    return [Lesson(*text, reader.states([text], 1).finals.bfloat16()) for text in texts]


def _batches(found: Sequence[Lesson], random: Random) -> Iterator[list[Lesson]]:
    """Yield batches of texts of like length, about equally many tokens each, without end."""
    while True:
        order = sorted(found, key=lambda one: (len(one.ids), random.random()))
        batches = list[list[Lesson]]()
        while order:
            count = max(1, _BATCH_TOKENS // len(order[min(len(order), 8) - 1].ids))
            batches.append(order[:count])
            del order[:count]
        random.shuffle(batches)
        yield from batches


def _laws(model: Llama, batch: Sequence[Lesson]) -> Tensor:
    """Return the model's log-distribution at every written token."""
    compute = torch.bfloat16
    width = max(len(one.ids) for one in batch) - 1
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids) - 1] = torch.tensor(one.ids[:-1])
    state = model.states(ids, model.where(width, compute))[-1]
    read = [state[row, one.first - 1 : len(one.ids) - 1] for row, one in enumerate(batch)]
    return F.log_softmax(model.logits(torch.cat(read), compute), -1)


def _aims(head: Tensor, batch: Sequence[Lesson]) -> Tensor:
    """Return the target's log-distribution at every written token."""
    return F.log_softmax(F.linear(torch.cat([one.states for one in batch]), head).float(), -1)


def learn(model: Llama, head: Tensor, found: Sequence[Lesson], recipe: DrafterRecipe) -> None:
    """Train the model's distributions towards the target's."""
    data = _batches(found, Random(recipe.seed))
    steps = recipe.steps

    def loss() -> Tensor:
        batch = next(data)
        return F.kl_div(
            _laws(model, batch), _aims(head, batch), log_target=True, reduction="batchmean"
        )

    factors = [
        min(1.0, (step + 1) / _WARM) * min(1.0, _EVEN * (1 - step / steps)) for step in range(steps)
    ]
    descend("deep", Descent.of(model, _MUON, _ADAM, _DECAY), loss, factors)


@torch.inference_mode()
def agreement(model: Llama, head: Tensor, found: Sequence[Lesson]) -> tuple[float, float]:
    """Return how often the likeliest token is the target's, and the mean divergence from the
    target's distribution.
    """
    same = 0.0
    apart = 0.0
    count = 0
    for start in range(0, len(found), 8):
        batch = found[start : start + 8]
        law = _laws(model, batch)
        aim = _aims(head, batch)
        same += float((law.argmax(-1) == aim.argmax(-1)).sum())
        apart += float(F.kl_div(law, aim, log_target=True, reduction="sum"))
        count += len(aim)
    return same / count, apart / count


def train_deep_drafter(recipe: DrafterRecipe) -> None:
    """Write texts, train the deep drafter, save its folder, and print results on test texts."""
    torch.set_num_threads(1)
    texts = anyio.run(
        write_texts, HeadsRecipe(recipe.target, recipe.draft, texts=recipe.texts, seed=recipe.seed)
    )
    Random(recipe.seed).shuffle(texts)
    reader = Reader(recipe.target)
    kept = max(1, round(_DRAFTER_TESTED * len(texts)))
    tested, learned = (lessons(reader, part) for part in (texts[:kept], texts[kept:]))
    torch.manual_seed(recipe.seed)
    head = reader.weights.head.bfloat16()
    draft = load(recipe.draft)
    model = begun(draft)
    learn(model, head, learned, recipe)
    save(model, recipe.out, reader.config.end_ids[0], 0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(recipe.draft / name, recipe.out / name)
    tokens = sum(len(one.states) for one in learned), sum(len(one.states) for one in tested)
    print(f"{recipe.out}: {tokens[0]} tokens learned, {tokens[1]} tested")
    for name, each in (("draft", draft), ("deep", model)):
        print(
            "{}: likeliest token agrees in {:.4f}, {:.4f} nats apart".format(
                name, *agreement(each, head, tested)
            )
        )
