"""Time the decoding of a real pair: plain, with every proposer, and by transformers and llama.cpp.

One engine is open at a time, because each holds the target's weights. A round opens every arm once,
in an order that turns from round to round, and each ratio is taken within a round.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

from atts.accel import SpeculationOptions, accelerated
from atts.concurrency import collect
from atts.core import Message, Problem, SampleRequest, Sampling, TokenIds
from atts.local import LocalEngine, LocalOptions
from atts.models import tokenizers
from atts.sampling import Seed
from atts.servers import RemoteEngine, RemoteOptions
from scripts.studies.harness import Options, Parts, Row, Spread, Table, say, tree_seconds
from scripts.studies.local import generated, opened
from scripts.studies.real_models import CannotBeMadeError, cache, folder_of, gguf_of
from scripts.studies.real_pair import problems

THREADS = 2
SAMPLING = Sampling(0.7)
LLAMA = "xllamacpp==2026.10.11549"
"""A package that carries llama.cpp and its server for this processor."""
PLAIN = "plain"
LLAMA_ARMS = {"llama.cpp, 4-bit weights": "Q4_K_M", "llama.cpp, bfloat16 weights": "BF16"}
GROUPS = (2, 4)  # attentions a group, of which a calibration pass chooses


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts written in a round."""

    texts: int  # one after the other, by each way to speculate
    tokens: int  # length of each text
    together: tuple[int, ...]  # rollouts at once, in plain decoding


@dataclass(frozen=True, slots=True)
class Timing:
    """Tokens that one arm wrote in one round, with their seconds."""

    seconds: float
    processor: float  # seconds, of all processes
    tokens: int
    texts: list[list[int]]
    proposed: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds

    @property
    def work(self) -> float:
        """Return processor seconds per token."""
        return self.processor / self.tokens


class Watch:
    """Adds up wall and processor seconds of stretches of work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.processor = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """Time what is done in the block."""
        wall = time.perf_counter()
        processor = tree_seconds()
        yield
        self.seconds += time.perf_counter() - wall
        self.processor += tree_seconds() - processor


def ways(drafter: str) -> dict[str, SpeculationOptions]:
    """Return every way to propose tokens, by its name in the table."""
    return {
        PLAIN: SpeculationOptions(),
        "draft, k=2": SpeculationOptions(drafter, "draft", k=2),
        "draft, k=3": SpeculationOptions(drafter, "draft", k=3),
        "draft, k=auto (SmartSpec)": SpeculationOptions(drafter, "draft"),
        "pearl": SpeculationOptions(drafter, "pearl"),
        "ssd": SpeculationOptions(drafter, "ssd"),
        "mirror, exit not trained": SpeculationOptions(drafter, "mirror"),
        **{
            f"grouped drafting (EasySpec), {size} attentions": SpeculationOptions(
                drafter, "draft", fuzzy=size
            )
            for size in GROUPS
        },
        "suffix": SpeculationOptions(speculate="suffix"),
        "auto": SpeculationOptions(drafter, "auto"),
        "plain, once more": SpeculationOptions(),
    }


def study(options: Options) -> list[Table]:
    """Time plain decoding next to other programs, then every way to propose tokens.

    :raises SystemExit: neither models nor problems can be had.
    """
    asked = problems(64)
    if not asked:
        raise SystemExit("no benchmark files at hand: name their folder in ATTS_SHARED_DATA")
    try:
        draft, target = folder_of("qwen05"), folder_of("qwen15")
    except CannotBeMadeError as error:
        raise SystemExit(f"the models cannot be had: {error}") from error
    sizes = Sizes(
        options.pick(1, 3, 4),
        options.pick(24, 64, 128),
        options.pick((1, 4), (1, 4, 16), (1, 4, 16)),
    )
    kept = Parts(options.file(f"real-speed-{options.effort}-{options.seed}.jsonl"))
    lab = Lab(draft, target, asked, sizes, kept)
    for number in range(options.pick(1, 3, 5)):
        lab.round(number)
    return tables(lab)


class Lab:
    """The pair, the problems, and what was timed so far; what is on disk is not timed again."""

    def __init__(
        self, draft: Path, target: Path, asked: Sequence[Problem], sizes: Sizes, kept: Parts
    ) -> None:
        self.draft = draft
        self.target = target
        self.sizes = sizes
        self.kept = kept
        tokenizer = tokenizers.ModelTokenizer(target, "target")
        self._prompts = [tokenizer.render([Message("user", one.text)]) for one in asked]
        self._missing = set[str]()

    def round(self, number: int) -> None:
        """Time every arm once."""
        arms: dict[str, Callable[[int], list[Timing]]] = {
            f"alone|{name}": partial(self.speculated, options)
            for name, options in ways(str(self.draft)).items()
        }
        arms |= {
            "together|atts": self.plain,
            "together|transformers": partial(self.transformers, is_assisted=False),
            "alone|transformers, assisted": partial(self.transformers, is_assisted=True),
        }
        arms |= {f"together|{name}": partial(self.llama, kind) for name, kind in LLAMA_ARMS.items()}
        for name in [*arms][:: -1 if number % 2 else 1]:
            key = f"{name}|{number}"
            if key in self.kept or name in self._missing:
                continue
            say(f"real-speed: {name}, round {number + 1}, load {os.getloadavg()[0]:.1f}")
            try:
                timings = arms[name](number)
            except (CannotBeMadeError, MemoryError) as error:
                say(f"real-speed: {name} is left out: {error}")
                self._missing.add(name)
                continue
            self.kept.keep(key, [asdict(one) for one in timings])

    def prompts(self, number: int, count: int) -> list[TokenIds]:
        """Return the prompts of a round."""
        begin = number * count % len(self._prompts)
        return (self._prompts + self._prompts)[begin : begin + count]

    def requests(self, number: int, count: int, tokens: int) -> list[SampleRequest]:
        """Return requests for texts on the prompts of a round."""
        return [
            SampleRequest(ids, tokens, SAMPLING, Seed(number, sample=place), rollout=f"{place}/0")
            for place, ids in enumerate(self.prompts(number, count))
        ]

    def speculated(self, speculation: SpeculationOptions, number: int) -> list[Timing]:
        """Write one text after another with proposals, by a fresh engine.

        The first text is not timed: in it the drafter is started and what pays is learnt.
        """
        options = LocalOptions(threads=THREADS, kv_tokens=4096)
        engine = accelerated(self.target, options=options, speculation=speculation)
        return [anyio.run(self._one_by_one, engine, number)]

    async def _one_by_one(self, engine: LocalEngine, number: int) -> Timing:
        first, *others = self.requests(number, 1 + self.sizes.texts, self.sizes.tokens)
        texts = list[list[int]]()
        watch = Watch()
        async with engine:
            await engine.sample(first)
            before = engine.loop_stats()
            for request in others:
                await engine.sample(replace(request, max_tokens=1))  # the prompt is read before
                with watch.running():
                    texts.append([*(await engine.sample(request)).ids])
            after = engine.loop_stats()
        found, was = after.speculation, before.speculation
        tokens = sum(map(len, texts))
        steps = after.step_sequences - before.step_sequences - len(others)
        timing = Timing(watch.seconds, watch.processor, tokens, texts, steps=steps)
        if found is None or was is None:
            return timing
        proposed = found.proposed - was.proposed
        return replace(timing, proposed=proposed, accepted=found.accepted - was.accepted)

    def plain(self, number: int) -> list[Timing]:
        """Write several texts at once, plainly."""
        return anyio.run(self._plain, number)

    async def _plain(self, number: int) -> list[Timing]:
        options = LocalOptions(threads=THREADS, kv_tokens=8192)
        async with LocalEngine(self.target, options=options) as engine:
            return [await self._at_once(engine, number, count) for count in self.sizes.together]

    async def _at_once(self, engine: LocalEngine | RemoteEngine, number: int, count: int) -> Timing:
        requests = self.requests(number, count, self.sizes.tokens)
        await collect([partial(engine.sample, replace(one, max_tokens=1)) for one in requests])
        watch = Watch()
        with watch.running():
            done = await collect([partial(engine.sample, request) for request in requests])
        texts = [[*one.ids] for one in done]
        return Timing(watch.seconds, watch.processor, sum(map(len, texts)), texts)

    def transformers(self, number: int, *, is_assisted: bool) -> list[Timing]:
        """Let transformers write in float32, several texts at once or assisted by the draft."""
        torch.set_num_threads(THREADS)
        model = opened(self.target)
        found = list[Timing]()
        if is_assisted:
            helper = opened(self.draft)
            prompts = self.prompts(number, 1 + self.sizes.texts)[1:]
            each = [self._generated(model, [one], assistant_model=helper) for one in prompts]
            texts = [text for one in each for text in one.texts]
            seconds = sum(one.seconds for one in each)
            processor = sum(one.processor for one in each)
            found.append(Timing(seconds, processor, sum(map(len, texts)), texts))
        else:
            for count in self.sizes.together:
                found.append(self._generated(model, self.prompts(number, count)))
        del model
        gc.collect()
        return found

    def _generated(self, model: Any, prompts: Sequence[TokenIds], **more: Any) -> Timing:
        """Write a text on each prompt, padded at the left; reading the prompts is not timed."""
        length = max(map(len, prompts))
        pad = model.generation_config.pad_token_id
        ids = torch.tensor([(pad,) * (length - len(one)) + one for one in prompts])
        mask = torch.tensor([(0,) * (length - len(one)) + (1,) * len(one) for one in prompts])
        settings = {"attention_mask": mask, "pad_token_id": pad, **more}
        if "assistant_model" in settings:
            settings["min_new_tokens"] = 0
        reading = Watch()
        with reading.running():
            generated(model, ids, 1, attention_mask=mask, pad_token_id=pad)
        watch = Watch()
        with watch.running():
            text = generated(model, ids, self.sizes.tokens, **settings)
        written = text[:, length:].tolist()
        seconds = watch.seconds - reading.seconds
        processor = watch.processor - reading.processor
        return Timing(seconds, processor, sum(map(len, written)), written)

    def llama(self, kind: str, number: int) -> list[Timing]:
        """Let llama.cpp's server write several texts at once."""
        with llama_server(gguf_of("qwen15", kind), max(self.sizes.together)) as url:
            return anyio.run(self._llama, url, number)

    async def _llama(self, url: str, number: int) -> list[Timing]:
        options = RemoteOptions(timeout_seconds=600.0, in_flight=64)
        async with RemoteEngine(
            url, dialect="llamacpp", tokenizer=self.target, options=options
        ) as engine:
            return [await self._at_once(engine, number, count) for count in self.sizes.together]

    def timings(self, name: str) -> dict[int, list[Timing]]:
        """Return what an arm came to, round by round."""
        found = dict[int, list[Timing]]()
        for key, value in self.kept.items():
            arm, _, number = key.rpartition("|")
            if arm == name:
                found[int(number)] = [Timing(**one) for one in value]
        return found


SERVE = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, slots, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_parallel, params.n_ctx, params.port = slots, 1024 * slots, int(sys.argv[4])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(86400)
"""


@contextmanager
def llama_server(model: Path, slots: int) -> Generator[str]:
    """Serve a GGUF file with llama.cpp until the end of the block.

    :raises CannotBeMadeError: llama.cpp cannot be installed, or does not start.
    """
    folder = cache() / LLAMA
    if not folder.is_dir():
        install = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps"]
        install += ["--only-binary", ":all:", "--target", str(folder), LLAMA]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBeMadeError(f"llama.cpp cannot be installed: {done.stderr[-200:]}")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    words = [sys.executable, "-c", SERVE, str(model), str(slots), str(THREADS), "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        try:
            assert process.stdout is not None, "it is a pipe"
            url = process.stdout.readline().strip()
            if not url:
                raise CannotBeMadeError("llama.cpp's server does not start")
            with urllib.request.urlopen(f"{url}/health", timeout=60):
                yield url
        finally:
            process.kill()
            process.wait()


def tables(lab: Lab) -> list[Table]:
    """Return both tables, from what is complete."""
    return [together_table(lab), alone_table(lab)]


def together_table(lab: Lab) -> Table:
    """Return plain decoding next to other programs, by how many rollouts are written at once."""
    own = lab.timings("together|atts")
    rows = list[Row]()
    for name in ["atts", "transformers", *LLAMA_ARMS]:
        theirs = lab.timings(f"together|{name}")
        for place, count in enumerate(lab.sizes.together):
            both = [
                (own[number][place], each[place])
                for number, each in theirs.items()
                if number in own
            ]
            if both:
                rates = Spread.of([other.rate for _, other in both])
                wall = Spread.of([mine.rate / other.rate for mine, other in both])
                work = Spread.of([other.work / mine.work for mine, other in both])
                is_own = name == "atts"
                ratios = ("-", "-") if is_own else (wall.fixed(2), work.fixed(2))
                rows.append((count, name, rates.fixed(1), *ratios))
    rows.sort(key=lambda row: int(str(row[0])))
    return Table.of(
        "Plain decoding",
        "rollouts at once | program | tokens/s | atts is faster by | less processor time by",
        rows,
        f"Qwen2.5-Coder-1.5B-Instruct, texts of {lab.sizes.tokens} tokens at temperature 0.7, "
        f"{THREADS} threads; reading the prompts is not timed. Median, least and most of the rounds; "
        "ratios within rounds. atts reads bfloat16 weights and multiplies in float32, transformers "
        "holds float32 weights, and llama.cpp's server reads what the row says and rounds the other "
        "factor of its products.",
    )


def alone_table(lab: Lab) -> Table:
    """Return every way to propose tokens at one rollout, compared with plain decoding."""
    plain = lab.timings(f"alone|{PLAIN}")
    names = [*ways(""), "transformers, assisted"]
    rows = [row for name in names for row in _alone(name, lab.timings(f"alone|{name}"), plain)]
    return Table.of(
        "Proposed tokens at one rollout",
        "proposed by | tokens/s, of plain decoding's | tokens per processor second | tokens a step | "
        "accepted | texts equal to "
        "plain decoding's",
        rows,
        f"Qwen2.5-Coder-Instruct, 0.5B for 1.5B: {lab.sizes.texts} texts of {lab.sizes.tokens} tokens "
        "one after the other, temperature 0.7, a fresh engine in every round, whose first text is not "
        f"timed. {len(plain)} rounds: median, least and most.",
    )


def _alone(
    name: str, found: Mapping[int, Sequence[Timing]], plain: Mapping[int, Sequence[Timing]]
) -> Iterator[Row]:
    """Yield the row of a way that was timed in a round in which plain decoding was."""
    pairs = [(found[number][0], plain[number][0]) for number in found if number in plain]
    if not pairs:
        return
    wall = Spread.of([mine.rate / base.rate for mine, base in pairs])
    work = Spread.of([base.work / mine.work for mine, base in pairs])
    tokens = sum(mine.tokens for mine, _ in pairs)
    steps = sum(mine.steps for mine, _ in pairs)
    proposed = sum(mine.proposed for mine, _ in pairs)
    accepted = sum(mine.accepted for mine, _ in pairs)
    texts = [(a, b) for mine, base in pairs for a, b in zip(mine.texts, base.texts, strict=True)]
    same = sum(a == b for a, b in texts)
    yield (
        name,
        wall.fixed(2),
        work.fixed(2),
        round(tokens / steps, 2) if steps else None,
        f"{accepted} of {proposed} ({100 * accepted / proposed:.0f} %)" if proposed else "-",
        f"{same} of {len(texts)}" if steps else "other numbers are drawn",
    )
