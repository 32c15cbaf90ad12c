"""Tests of the trainer: errors are not learned, gradients add up, and an interrupted training
continues exactly.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytestmark = pytest.mark.checkout
train = pytest.importorskip("scripts.studies.train", reason="needs a checkout")

import torch  # noqa: E402

from atts.evaluators.datasets.arithmetic import Exercise, exercises, stream  # noqa: E402
from atts.models import path  # noqa: E402


@pytest.fixture(scope="module")
def some() -> list[Exercise]:
    return list(islice(stream("train", seed=21), 400))


@pytest.fixture(scope="module")
def encoder() -> Any:
    return train.Encoder.open(path("target"))


def test_wrong_chunks_are_wrong_and_chunked(some: list[Exercise]) -> None:
    random = Random(0)
    for exercise in some:
        place = random.randrange(len(exercise.chunks))
        wrong = train.wrong_chunk(random, exercise, place)
        assert wrong != exercise.chunks[place]
        assert wrong.count("\n\n") == wrong.endswith("\n\n")


def test_nothing_wrong_is_learned(some: list[Exercise]) -> None:
    """The trainer learns only tokens of the reference solution, the end token and alarms about
    errors, but no error itself.
    """
    random = Random(1)
    flawed = 0
    for exercise in some:
        pieces = train.conversation(random, exercise, train.Mixture(errors=1.0, instructed=0.0))
        learned = "".join(piece.text for piece in pieces if piece.learned)
        flawed += any(not piece.learned for piece in pieces[1:])
        assert "".join(learned.replace(train.ALARM, "").split()) == "".join(
            (exercise.solution + train.END).split()
        )
    assert flawed > 200


def test_every_alarm_that_is_learned_follows_an_error(some: list[Exercise]) -> None:
    random = Random(2)
    for exercise in some:
        pieces = train.conversation(random, exercise, train.Mixture(errors=1.0))
        for before, piece in zip(pieces, pieces[1:], strict=False):
            if piece.learned and piece.text.startswith(train.ALARM):
                assert not before.learned or before.text == "\n\n"


def test_labels_are_the_next_ids_of_learned_pieces(encoder: Any) -> None:
    pieces = [
        train.Piece("<|user|>1 + 1<|end|><|assistant|>", False),
        train.Piece("1 + 1 = 2.<|end|>", True),
    ]
    (ids, labels), *_ = train.encode(encoder, [pieces])
    learned = [label for label in labels if label != -100]
    assert encoder.text(learned) == "1 + 1 = 2."
    assert learned[-1] == encoder.end
    assert ids[-len(learned) :] == learned


def test_the_rendered_prompt_is_the_chat_templates(encoder: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(path("target")))
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "What is 7 * 8?"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encoder.ids([train.prompt("What is 7 * 8?", "S")])[0] == wanted


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trainer generate its data in blocks of 256 conversations instead of 4,096."""
    monkeypatch.setattr(train, "BLOCK_SIZE", 256)


@pytest.mark.usefixtures("small_blocks")
def test_a_cursor_gives_the_rest_of_the_data(encoder: Any) -> None:
    def taken(cursor: Any, count: int) -> Iterator[Any]:
        return islice(train.batches(encoder, train.Mixture(), 5, cursor, (), 4096), count)

    whole = [batch.ids for batch, _ in taken(train.Cursor(), 6)]
    *_, (_, middle) = taken(train.Cursor(), 3)
    rest = [batch.ids for batch, _ in taken(middle, 3)]
    assert all(bool((one == other).all()) for one, other in zip(whole[3:], rest, strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, encoder: Any) -> None:
    """A training killed after any saved step and resumed ends with the same weights, to the last
    bit.
    """
    recipe = train.Recipe(
        train.ModelConfig(64, 2, 1, 1, 64),
        steps=4,
        seed=3,
        stages=(train.Stage(0, train.Mixture()),),
        schedule=((0, 1.0), (4, 0.0)),
        micro_tokens=512,
        micro_batches=2,
        workers=1,
    )

    def go(folder: Path, stop: int, *, resumed: bool) -> dict[str, torch.Tensor]:
        trainer = train.Trainer("tiny", recipe, folder, encoder)
        assert trainer.resume() == resumed
        with train.Workers(trainer.model, 1) as workers:
            stream = trainer.stream(())
            while trainer.progress.step < stop:
                trainer.step(stream, workers)
        trainer.keep()
        return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}

    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole = go(tmp_path / "whole", 4, resumed=False)
    go(tmp_path / "parts", 2, resumed=False)
    parts = go(tmp_path / "parts", 4, resumed=True)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_trained_model_scores_as_in_transformers(tmp_path: Path, encoder: Any) -> None:
    """A saved model that transformers opens gives the same scores."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = train.Llama(train.ModelConfig(128, 2, 2, 1, 96))
    train.save(model, tmp_path, encoder.end, encoder.pad)
    ids = torch.tensor(encoder.ids(["Compute (3 * 4) - 5. What is the result?"]))
    other: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    own = train.load(tmp_path)
    states = own.states(ids, own.where(ids.shape[1], torch.float32))
    with torch.inference_mode():
        assert torch.allclose(own.logits(states[-1], torch.float32), other(ids).logits, atol=1e-4)


def test_texts_come_in_the_order_of_their_prompts() -> None:
    """The texts are in the order of the prompts, and each text is what the saved model writes after
    that prompt.
    """
    tests = exercises("test", 5, seed=8)
    texts = train.generate(
        path("target"), [train.prompt(item.text) for item in tests], temperature=0.0, seed=0
    )
    assert [train.answer(text) for text in texts] == [item.answer for item in tests]


def test_a_saved_relative_scores_as_in_transformers(tmp_path: Path, encoder: Any) -> None:
    """Adapters are merged into the weights and a separate output matrix has the usual name, so
    `transformers` reads the model.
    """
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(encoder.ids(["Compute (3 * 4) - 5. What is the result?"]))
    for name in ("operations", "draft"):
        model = train.relative(name)
        for weight in model.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.05)
        with torch.inference_mode():
            wanted = model.logits(
                model.states(ids, model.where(ids.shape[1], torch.float32))[-1], torch.float32
            )
        train.whole(model, encoder, tmp_path / name)
        other: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / name), dtype=torch.float32)
        with torch.inference_mode():
            assert torch.allclose(wanted, other(ids).logits, atol=0.2)


def test_the_first_wrong_chunk_is_found(some: list[Exercise]) -> None:
    random = Random(4)
    for exercise in some[:100]:
        assert train.first_wrong(exercise, exercise.solution) is None
        place = random.randrange(len(exercise.chunks))
        wrong = train.wrong_chunk(random, exercise, place)
        if place < len(exercise.steps) and f"{exercise.steps[place].operation.worked()}" in wrong:
            continue  # a correct computation about another person counts, because wording is free
        text = "".join(exercise.chunks[:place]) + wrong + "".join(exercise.chunks[place + 1 :])
        assert train.first_wrong(exercise, text) == place
