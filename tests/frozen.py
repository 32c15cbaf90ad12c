"""A recording of what small seeded runs must repeat: transcripts, decisions, report numbers and
verdicts.

`python -m tests.frozen` compares the code with the recording. `python -m tests.frozen record [PART
...]` records the named parts again, or all parts. Do so only for a change that is meant to change
what atts decides or writes, and let the commit say why each part changed.
"""

from __future__ import annotations

import json
import lzma
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch

from atts.api import Setup, build_engine, compare, evaluate_sync, load_problems, replay, report
from atts.calibration import MODES, StoredScores, replay_scores
from atts.core import Completion, SampleRequest, Sampling, ScoreRequest
from atts.evaluators import equivalent
from atts.local.batch import PrefillChunk, StepPlan, new_sequence, step_batch
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import NativeModel
from atts.local.loader import load_weights
from atts.local.logit_sampling import batch_sampling, sample
from atts.local.model import TorchModel
from atts.local.model_config import read_model_config
from atts.local.seams import Model
from atts.methods import PRESETS
from atts.models import path as model_path
from atts.pipelines import Chunking, ConfidenceStop, Policy, ScoreRule
from atts.sampling import Seed
from atts.testing import ScriptedEngine, toy_problems

TESTS = Path(__file__).resolve().parent
RECORDING = TESTS / "frozen.json.xz"

WORDS = frozenset({"why", "note", "guarantee", "error", "voided_by", "warnings"})
"""Keys whose values are texts for people; these texts may be reworded at any time."""
CLOCKS = frozenset(
    {
        "seconds", "created", "started", "ended", "queued", "timing", "at", "directory",
        "tokens_per_second", "second_ratio",
    }
)  # fmt: skip
"""Keys of values that differ from run to run, or from machine to machine."""
CLOSE = 1e-6
"""Tolerance for sums in double precision, whose last digits differ between processors."""
CLOSE_FLOAT32 = 5e-3
"""Tolerance for values in single precision; the results of two kernels on one machine differ by
about a hundredth of it.
"""


def plain(value: Any) -> Any:
    """Return a value as JSON, without texts for people and without times."""
    return _lean(msgspec.to_builtins(value, str_keys=True))


def _lean(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {
            key: _lean(inner)
            for key, inner in value.items()
            if key not in WORDS and key not in CLOCKS
        }
        # the sum is shorter than the list of log-probabilities, and nearly always shows a change
        if "logprobs" in kept:
            kept["logprobs"] = math.fsum(kept["logprobs"])
        if kept.get("draft_ids") == kept.get("target_ids"):
            kept.pop("draft_ids", None)
        return kept
    if isinstance(value, list | tuple):
        return [_lean(inner) for inner in value]
    return value


def numbers(value: Any) -> Any:
    """Return the numbers and truth values of a report under their names, without its sentences."""
    if isinstance(value, Mapping):
        kept = {key: numbers(inner) for key, inner in value.items() if key not in CLOCKS}
        return {key: inner for key, inner in kept.items() if inner not in (None, {}, [])}
    if isinstance(value, list):
        return [numbers(inner) for inner in value]
    return None if isinstance(value, str) else value


def scripted(method: str, **policy: Any) -> Setup:
    """Return the settings of a run of toy models in which only one rollout runs at a time.

    With one rollout at a time, the order of calls is the same under every event loop.
    """
    policy = {"samples": 5, "turns": 12, "chunking": Chunking(12, 12, ()), **policy}
    if method == "deep-conf":
        policy["confidence_stop"] = ConfidenceStop(warmup=3, keep=0.5, window=8)
    # the published rules need scores of earlier runs; one of the rules needs these scores grouped
    # by question
    scores = (1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.8, 2.4)
    questions = [problem.id for problem in toy_problems(4, seed=3)]
    earlier = StoredScores(
        tuple(score + 0.3 * number for number in range(len(questions)) for score in scores),
        tuple(question for question in questions for _ in scores),
        (0,) * len(scores) * len(questions),
    )
    return Setup(
        ScriptedEngine("draft"),
        ScriptedEngine("target"),
        method=method,
        rate=0.4,
        policy=Policy(**policy),
        stored=earlier if method.startswith("paper-") else (),
        conditions="ignore",
        seed=11,
        # with a barrier, all rollouts of a problem must be in flight together
        concurrency=5 if method == "top-b" or policy.get("barrier") else 1,
    )


def outcomes(setup: Setup, problems: int = 3) -> Any:
    """Return the transcripts, decisions and votes of a run.

    For method exact only the texts are returned, because how far the draft writes ahead depends on
    measured speeds.
    """
    result = evaluate_sync(toy_problems(problems, seed=3), setup)
    assert result.status == "finished"
    if setup.method == "exact":
        return [
            [line.sample, line.answer, line.finish, list(line.ids("target"))]
            for outcome in result.outcomes()
            for line in outcome.rollouts
        ]
    # Problems end in an order that depends on time, so they are sorted. A free slot goes to the
    # next problem while the answers of a finished wave are compared.
    ended = sorted(result.outcomes(), key=lambda outcome: outcome.problem.id)
    return [plain(outcome) for outcome in ended]


POLICIES: dict[str, dict[str, Any]] = {
    "takeover continue": {"takeover": "continue"},
    "takeover repair": {"takeover": "repair", "score": ScoreRule("speculative")},
    "optimistic": {"optimistic": True},
    "waves": {"first_wave": 2, "growth": 2.0, "agreement": 0.8},
    "barrier": {"barrier": True},
    "budget forcing": {"budget_forcing": 1},
    "likely stop": {"early_stop": "likely", "confidence": 0.7},
    "rest escalated": {"escalates": "rest"},
    "rollout escalated": {"escalates": "rollout"},
    "select": {"combine": "select"},
    "synthesis": {"combine": "synthesize"},
}


def score_stream() -> list[dict[str, Any]]:
    """Return a fixed stream of scores, in which the scores of 25 questions are interleaved."""
    draws = random.Random(5)
    stream = list[dict[str, Any]]()
    hardness = [draws.random() for _ in range(25)]
    turns = [0] * len(hardness)
    for _ in range(500):
        question = draws.randrange(len(hardness))
        score = 1 + math.exp(draws.gauss(hardness[question] - 1, 0.6))
        length = draws.randrange(5, 60)
        stream.append(
            {"question": question, "turn": turns[question] // 4, "score": score, "length": length}
        )
        turns[question] += 1
    return stream


def decided(mode: str, **options: Any) -> Any:
    """Decide on every score of the stream in a calibration mode; return the decisions, p-values,
    metrics and events.
    """
    done = replay_scores(score_stream(), 0.2, mode, 3, **options)  # type: ignore[arg-type]
    return {
        "escalated": "".join("01"[decision.escalate] for decision in done.decisions),
        "p": [decision.p for decision in done.decisions],
        "origins": sorted({decision.origin for decision in done.decisions}),
        "metrics": dict(done.metrics),
        "events": [plain(event) for event in done.events],
    }


STORED = [1.1 + 0.02 * number for number in range(60)]


def reported() -> Any:
    """Return the numbers of a report of two runs, of their comparison and of a replay."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("first", "second")]
        for run, method in zip(runs, ("atts", "coin"), strict=True):
            evaluate_sync(toy_problems(8, seed=6), scripted(method), directory=run)
        page = report(runs[0], format="json", compare_to=[runs[1]])
        compared = plain(compare(*runs, points=5))
        compared["costs"] = [cost for cost in compared["costs"] if cost["name"] != "seconds"]
        return {
            "report": numbers(json.loads(page.read_text())),
            "compared": numbers(compared),
            "replayed": [
                pair.decision.action for pair in replay(runs[0], rate=0.2, seed=1).decisions
            ],
        }


def verdicts() -> Any:
    """Return the verdicts on 220 pairs of answers."""
    lines = (TESTS / "evaluators" / "blind_pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines[:: len(lines) // 220]][:220]
    return [
        [pair["gold"], pair["answer"], equivalent(pair["gold"], pair["answer"]).status]
        for pair in pairs
    ]


def draws() -> Any:
    """Return the tokens sampled from seeded logits with seeded random numbers, for each kind of
    sampling filter.
    """
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 200, generator=generator) * 2
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64)
    kinds = {
        "greedy": Sampling(0.0),
        "plain": Sampling(1.0),
        "top_k": Sampling(0.8, top_k=20),
        "top_p": Sampling(0.9, top_p=0.7),
        "min_p": Sampling(1.1, min_p=0.05),
    }
    return {
        name: sample(logits, batch_sampling([kind] * 40, 200), uniforms).tokens.tolist()
        for name, kind in kinds.items()
    }


def embedded(kernel: str = "native") -> Any:
    """Return the texts and scores of the embedded models, as token ids and log-probabilities."""
    return anyio.run(_embedded, kernel)


async def _embedded(kernel: str) -> Any:
    written = dict[str, Any]()
    for role in ("draft", "target"):
        words = f"embedded:{role}?worker=thread&threads=1&kernel={kernel}"
        async with build_engine(words, role) as engine:
            for number, problem in enumerate(load_problems("arithmetic", 4)):
                prompt = tuple(engine.tokenizer.encode(problem.text))
                for temperature in (0.0, 0.8):
                    text: Completion = await engine.sample(
                        SampleRequest(prompt, 60, Sampling(temperature), Seed(4, problem.id))
                    )
                    written[f"{role} {number} at {temperature}"] = [list(text.ids), text.ended]
                scores = await engine.score(ScoreRequest(prompt[:8], prompt[8:]))
                written[f"{role} {number} scored"] = [round(one, 5) for one in scores.logprobs]
    return written


def pair_run(kernel: str = "native") -> Any:
    """Return the text of the embedded pair, the model that wrote each part, and the decisions."""
    words = [
        f"embedded:{role}?worker=thread&threads=1&kernel={kernel}" for role in ("draft", "target")
    ]
    setup = Setup(words[0], words[1], rate=0.4, policy=Policy(samples=2), seed=2, concurrency=1)
    result = evaluate_sync(load_problems("arithmetic", 2), setup)
    return [
        {
            "sample": rollout.sample,
            "answer": rollout.answer,
            "finish": rollout.finish,
            "ids": list(rollout.ids("target")),
            "turns": [
                [
                    [chunk.author for chunk in turn.chunks],
                    turn.decision and turn.decision.action,
                    turn.score and round(turn.score, 5),
                ]
                for turn in rollout.turns
            ],
        }
        for outcome in result.outcomes()
        for rollout in outcome.rollouts
    ]


def kernels(kernel: str = "native") -> Any:
    """Return what a local model's kernels compute from small integers.

    Sums of small integers are exact in single precision, so matrix products and sampled tokens are
    the same bits on every processor. Attention contains roots and exponentials, so its outputs
    differ in their last digits.
    """
    folder = model_path("target")
    config = read_model_config(folder, "frozen")
    generator = torch.Generator().manual_seed(3)

    def integers(*shape: int, most: int = 4) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    weights = load_weights(folder, config, torch.float32, torch.device("cpu"), "frozen")
    weights = replace(weights, head=integers(config.vocabulary, config.hidden_size))
    slots = 96
    cache = torch.zeros(config.num_layers, 2, slots, config.num_kv_heads, config.head_dim)
    model: Model
    if kernel == "native":
        model = NativeModel(native_library("frozen", config)[0], config, weights, cache, 1)
    else:
        model = TorchModel(config, weights, cache)

    # The text is fed in four steps: a long prefill, two single tokens, and a short prefill after
    # cached tokens.
    ids = tuple((integers(90, most=200).int() + 220).tolist())
    sequence = new_sequence(1, ScoreRequest(ids[:1], ids[1:]), 0.0)
    sequence.row = 0
    table = torch.arange(1, len(ids) + 1, dtype=torch.int32)[None].numpy()
    parts = [(0, 70, 0), (70, 71, 70), (71, 72, 71), (72, 90, 72)]
    states = [
        model.forward(
            step_batch(StepPlan([], [PrefillChunk(sequence, *part)], [], []), table), table
        )
        for part in parts
    ]

    logits = model.compute_logits(integers(37, config.hidden_size, most=3))
    targets = logits.shape[0] * [int(logits[0].argmax())]
    temperatures = [Sampling(temperature) for temperature in (0.0, 1.0, 16.0, 64.0)]
    uniforms = torch.rand(len(logits), generator=generator, dtype=torch.float64).tolist()
    sampling = batch_sampling(
        [temperatures[row % 4] for row in range(len(logits))], config.vocabulary
    )
    drawn = model.sample(logits, sampling, uniforms)
    return {
        "attention": [state[::6, ::16].double().tolist() for state in states],
        "products": [
            [
                int(row.argmax()),
                row.max().item(),
                blake2b(row.int().numpy().tobytes()).hexdigest()[:16],
            ]
            for row in logits
        ],
        "draws": drawn.tokens.tolist(),
        "drawn log-probabilities": drawn.logprobs.double().tolist(),
        "log-probabilities": model.logprobs(logits, targets),
    }


PARTS: dict[str, Callable[[], Any]] = {
    **{
        f"method {row.name}": partial(lambda name: outcomes(scripted(name)), row.name)
        for row in PRESETS
    },
    **{
        f"policy {name}": partial(lambda changes: outcomes(scripted("atts", **changes), 2), changes)
        for name, changes in POLICIES.items()
    },
    **{
        f"decisions {mode}": partial(decided, mode, stored=STORED if mode == "split" else ())
        for mode in MODES
    },
    "decisions marginal by length": partial(decided, "marginal", by_length=True),
    "decisions aci under a cap": partial(decided, "aci", cap=0.15),
    "decisions aci after stored scores": partial(decided, "aci", stored=STORED),
    "report": reported,
    "verdicts": verdicts,
    "draws": draws,
    "local kernels": kernels,
    "embedded models": embedded,
    "embedded pair": pair_run,
}
KERNELS = ("local kernels", "embedded models", "embedded pair")
"""Parts that depend on sums in single precision; they are recorded only where two kernels agree."""
TOLERANCE = {"local kernels": 1e-5} | dict.fromkeys(KERNELS[1:], CLOSE_FLOAT32)


def differences(recorded: Any, now: Any, close: float, place: str = "") -> Iterator[str]:
    """Yield the positions at which a part differs from the recording; new keys of a mapping are
    allowed.
    """
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        for key, value in recorded.items():
            if key in now:
                yield from differences(value, now[key], close, f"{place}/{key}")
            else:
                yield f"{place}/{key}: gone, was {_short(value)}"
    elif isinstance(recorded, list) and isinstance(now, list):
        for number, (one, other) in enumerate(zip(recorded, now, strict=False)):
            yield from differences(one, other, close, f"{place}/{number}")
        if len(recorded) != len(now):
            yield f"{place}: {len(now)} entries, were {len(recorded)}"
    elif not _equal(recorded, now, close):
        yield f"{place}: {_short(now)}, was {_short(recorded)}"


def _equal(recorded: Any, now: Any, close: float) -> bool:
    if isinstance(recorded, float) and isinstance(now, float | int):
        if math.isnan(recorded):
            return math.isnan(now)
        return math.isclose(recorded, now, rel_tol=close, abs_tol=close)
    return bool(recorded == now)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def recording() -> dict[str, Any]:
    """Return the recording, by part."""
    parts: dict[str, Any] = json.loads(lzma.decompress(RECORDING.read_bytes()))
    return parts


def changed(part: str) -> list[str]:
    """Return at most ten positions at which a part differs from the recording."""
    close = TOLERANCE.get(part, CLOSE)
    # through JSON, so that recording and recomputed values have the same types
    now = json.loads(json.dumps(PARTS[part]()))
    found = list(differences(recording()[part], now, close))
    return found[:10] + ([f"and {len(found) - 10} more places"] if len(found) > 10 else [])


def record(parts: list[str]) -> None:
    """Record parts again, and keep the other parts unchanged."""
    kept = recording() if RECORDING.exists() else {}
    for part in parts:
        kept[part] = PARTS[part]()
        if part in KERNELS:
            # A sampled token or a decision that depends on rounding would differ on another
            # processor.
            other = PARTS[part]("torch")  # type: ignore[call-arg]
            apart = list(differences(kept[part], other, TOLERANCE[part]))
            assert not apart, f"{part}: the kernels differ; take another seed: {apart[0]}"
    text = json.dumps({part: kept[part] for part in PARTS}, separators=(",", ":"))
    RECORDING.write_bytes(lzma.compress(text.encode(), preset=9))


def main(arguments: list[str]) -> int:
    """Compare the code with the recording, or record it again, and return the exit code."""
    if arguments[:1] == ["record"]:
        record(arguments[1:] or list(PARTS))
        return 0
    code = 0
    for part in PARTS:
        places = changed(part)
        print(f"{part}: {'as recorded' if not places else places[0]}")  # noqa: T201
        code = code or bool(places)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
