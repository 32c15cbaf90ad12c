"""Tests of lossy block replacement: the loss is measured, a variant opens only with consent, and a
drafter may use it without loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atts.accel import Zoo, accelerated, divergence, substituted
from atts.api import build_engine, build_engines, compare_blocks
from atts.core import SampleRequest, Sampling
from atts.errors import ATTSError, OptionError
from atts.local import LocalEngine
from atts.models import path
from atts.models.stored_blocks import Loss
from atts.sampling import Seed
from tests.local.conftest import Naive

from .conftest import Tune, contents
from .test_adapters import save_adapter
from .test_chains import SHARED

Make = Callable[..., Path]
MLP = "layers.1.mlp"


@pytest.fixture
def pair(base: Path, tune: Tune, tmp_path: Path) -> Zoo:
    """Make a base, and a model with two tuned blocks, one of which differs in the lowest bit of one
    number.
    """
    zoo = Zoo(tmp_path / "zoo")
    folder = tune("tuned", f"{MLP}.up_proj")
    tensors = load_file(folder / "model.safetensors")
    flat = tensors["model.layers.2.self_attn.o_proj.weight"].view(torch.int32).flatten()
    flat[7] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    zoo.add("base", base)
    zoo.add("tuned", folder)
    return zoo


def loss_of(zoo: Zoo, nats: float, name: str = "tuned") -> Loss:
    """Return an invented loss of replacing the feed-forward block, in the form of a measured one."""
    marks = zoo.model(name).marks[1]
    stands = {MLP: f"base/{MLP}"}
    return Loss(name, marks, stands, "toys", 30, 900, nats, 0.1, (0.5, 0.4), (-0.3, 0.1))


def kept(zoo: Zoo, name: str = "lean", nats: float = 0.005) -> dict[str, str]:
    """Replace the tuned model's feed-forward block by the base's, and return the digest of the
    replacement.
    """
    digests = {one.place: one.digest for one in zoo.likenesses("tuned") if one.place == MLP}
    zoo.keep(name, zoo.model("tuned"), digests, loss_of(zoo, nats))
    return digests


def test_the_nearest_blocks_of_a_shape_are_found(pair: Zoo, base: Path) -> None:
    """The search for similar blocks compares the parameters of all models' blocks and leaves out
    identical blocks.

    Callers can limit the number of blocks in the result and their distance.
    """
    near = pair.likenesses("tuned", 1, 1.0)
    assert [(one.place, one.other) for one in near] == [
        ("layers.2.attention", "base/layers.2.attention"),
        (MLP, f"base/{MLP}"),
    ]
    assert 0 < near[0].distance < 1e-6
    assert near[0].cosine == pytest.approx(1.0)
    one, other = (
        [load_file(pair.directory / "blocks" / f"{d}.safetensors") for d in digests]
        for digests in _ends(pair)
    )
    flat = [
        torch.cat([part.flatten() for _, part in sorted(each.items())]) for each in (*one, *other)
    ]
    assert near[1].distance == pytest.approx(
        float((flat[0] - flat[1]).norm() / flat[0].norm()), rel=1e-5
    )
    wide = pair.likenesses("tuned", 2, 9.0)
    # embedding and head are identical to those of the base, so only attention and feed-forward
    # blocks are compared
    assert len(wide) == 2 * 6
    assert len({(one.place, one.digest) for one in wide}) == len(wide)
    pair.add("narrow", save_adapter(base.parent / "narrow-likeness", base, "q_proj"), "base")
    with pytest.raises(OptionError, match="such as 'base'"):
        pair.likenesses("narrow")


def _ends(zoo: Zoo) -> list[list[str]]:
    """Return the digest of the feed-forward block in the tuned model, and the digest of the same
    block in the base.
    """
    return [
        [b.digest for b in zoo.model(name).blocks if b.place == MLP] for name in ("tuned", "base")
    ]


def test_divergence_equals_that_of_transformers(pair: Zoo, base: Path, tmp_path: Path) -> None:
    """The measured loss agrees with transformers on the exported folders, and is 0 between a model
    and itself.
    """
    texts = [(tuple(range(5, 60)), 20), (tuple(range(200, 90, -3)), 1)]
    folders = [pair.folder(name) for name in ("tuned", "base")]
    assert divergence(folders[0], folders[0], texts) == (35 + 36, 0.0, 0.0)
    pair.export("tuned", tmp_path / "out")
    nats = 0.0
    flips = 0
    for ids, given in texts:
        laws = [
            Naive(each).logits(ids)[given - 1 : -1].double().log_softmax(-1)
            for each in (tmp_path / "out", base)
        ]
        nats += float((laws[0].exp() * (laws[0] - laws[1])).sum())
        flips += int((laws[0].argmax(-1) != laws[1].argmax(-1)).sum())
    found = divergence(folders[0], folders[1], texts)
    assert (found.tokens, found.flips) == (71, flips / 71)
    assert found.nats == pytest.approx(nats / 71, abs=1e-6)
    assert found.nats > 1e-4


def test_a_variant_is_tried_outside_the_zoo_and_can_be_kept(
    pair: Zoo, base: Path, tmp_path: Path
) -> None:
    """A trial leaves the zoo unchanged; a kept variant is exported as a folder that gives the same
    scores.
    """
    digests = kept(pair)
    texts = [(tuple(range(5, 60)), 1)]
    before = contents(pair.directory)
    with substituted(pair.directory, pair.model("tuned"), digests) as folder:
        assert divergence(folder, pair.folder("lean"), texts).nats == 0.0
        assert divergence(folder, pair.folder("tuned"), texts).nats > 0.0
    assert contents(pair.directory) == before
    assert pair.damage() == []
    pair.export("lean", tmp_path / "out")
    out, theirs = (load_file(each / "model.safetensors") for each in (tmp_path / "out", base))
    assert [name for name in out if not torch.equal(out[name], theirs[name])] == [
        "model.layers.2.self_attn.o_proj.weight"
    ]
    assert pair.add("again", tmp_path / "out").digests == pair.model("lean").digests
    for name in ("base", "tuned"):
        pair.remove(name)
    assert pair.damage() == []


def test_the_lossy_setting_opens_a_variant_within_its_bound(
    pair: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    """`lossy` opens the variant that shares most blocks among those whose loss is within the bound,
    and prints its loss.
    """
    kept(pair, "lean", 0.005)
    kept(pair, "leaner", 0.05)
    opened = {
        bound: build_engine(f"zoo:{pair.directory}/tuned?lossy={bound}&threads=1", "target")
        for bound in (".02", "1")
    }
    folders = [
        Path(engine.model).name for engine in opened.values() if isinstance(engine, LocalEngine)
    ]
    assert folders == ["lean", "leaner"]
    said = caplog.messages[0]
    assert (
        "the lossy replacement lean is used instead of the model (base/layers.1.mlp as "
        "layers.1.mlp). Its loss: 0.005 nats per token; the most likely token changes at 10.00 % "
        "of 900 positions" in said
    )
    assert (
        "accuracy goes from 0.500 to 0.400, difference -0.100 [-0.300, +0.100] (n = 30, toys)"
        in said
    )
    plain = build_engine(f"zoo:{pair.directory}/tuned", "target")
    assert isinstance(plain, LocalEngine)
    assert Path(plain.model).name == "tuned"
    assert len(caplog.messages) == 2
    draft, target = build_engines(
        f"zoo:{pair.directory}/tuned?lossy=1", f"zoo:{pair.directory}/tuned"
    )
    assert isinstance(draft, LocalEngine)
    assert isinstance(target, LocalEngine)
    lent = target._accelerator.lent  # type: ignore[attr-defined]  # pyright: ignore
    assert (Path(draft.model).name, lent) == ("leaner", "")


def test_a_lossy_variant_opens_only_on_request(pair: Zoo, base: Path) -> None:
    """A variant is refused if only its name is given, if its measured loss exceeds the bound, or if
    the loss was measured for other weights.
    """
    kept(pair)
    words = f"zoo:{pair.directory}"
    refused = {
        f"{words}/lean": "is a lossy replacement of 'tuned'",
        f"{words}/tuned?lossy=.001": r"lean diverges by 0\.005",
        f"{words}/tuned?lossy=little": "not a number",
        f"{words}/base?lossy=1": "the zoo has no lossy replacement",
        "embedded?lossy=1": "not a setting of a local engine",
    }
    for engine, says in refused.items():
        with pytest.raises(OptionError, match=says):
            build_engine(engine, "target")
    pair.remove("tuned")
    pair.add("tuned", base)
    with pytest.raises(OptionError, match="the zoo has no lossy replacement"):
        build_engine(f"{words}/tuned?lossy=1", "target")
    with pytest.raises(OptionError, match="already has a model named 'lean'"):
        compare_blocks(pair.directory, "base", keep="lean")


def shallow(folder: Path, whole: Path, layers: int) -> Path:
    """Make a folder that contains only a configuration with fewer layers."""
    folder.mkdir()
    said = json.loads((whole / "config.json").read_text()) | {
        "num_hidden_layers": layers,
        "layer_types": None,
    }
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.anyio
async def test_a_lossy_variant_can_draft_without_loss(
    pair: Zoo, base: Path, tmp_path: Path
) -> None:
    """A variant or a shortened model only proposes tokens; the target verifies them, so the text is
    the target's own.
    """
    kept(pair)
    pair.add("short", shallow(tmp_path / "short", base, 2), "tuned")
    assert pair.model("short").digests < pair.model("tuned").digests
    asks = [
        SampleRequest((5, 6, 7), 40, law, seed=Seed(1, "p", 0, 0, "target", 0))
        for law in (Sampling(0.0), Sampling(0.9))
    ]
    async with accelerated(pair.folder("tuned"), options=SHARED) as plain:
        wanted = [(await plain.sample(ask)).ids for ask in asks]
    for drafter in ("lean", "short"):
        words = f"zoo:{pair.directory}/tuned?drafter=zoo:{pair.directory}/{drafter}&k=4&worker=thread&kernel=native"
        engine = build_engine(words, "target")
        assert isinstance(engine, LocalEngine)
        async with engine:
            assert [(await engine.sample(ask)).ids for ask in asks] == wanted
            found = engine.loop_stats().speculation
            assert found is not None
            assert found.proposed
            assert found.accepted or drafter == "short"


def test_a_folder_with_other_weights_is_not_a_shortened_model(
    pair: Zoo, base: Path, tmp_path: Path
) -> None:
    """A folder with weights of its own is refused as a shortened model, because a shortened model
    uses the base's weights.
    """
    folder = shallow(tmp_path / "short", base, 2)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(ATTSError, match="safetensors"):
        pair.add("short", folder, "base")


def test_relatives_of_the_embedded_target_are_measured(tmp_path: Path) -> None:
    """Among the embedded target's relatives, one pair of blocks is similar enough to replace one by
    the other.

    The loss is measured, stored and reported with the number of problems.
    """
    zoo = Zoo(tmp_path / "zoo")
    zoo.add("base", path("target"))
    zoo.add("tuned", path("target").parent / "family" / "tuned", "base")
    told = list[str]()
    found = compare_blocks(
        zoo.directory,
        "tuned",
        "arithmetic[:2]",
        lossy=0.02,
        keep="lean",
        tell=lambda pair: told.append(pair.likeness.place),
    )
    assert told == ["layers.5.mlp"]
    [pair] = found.pairs
    assert 0 < pair.loss.nats < 0.02
    assert (pair.loss.count, pair.loss.problems) == (2, "arithmetic[:2]")
    assert (
        -1
        <= pair.loss.change[0]
        <= pair.loss.accuracy[1] - pair.loss.accuracy[0]
        <= pair.loss.change[1]
        <= 1
    )
    assert found.kept == replace(pair.loss)
    assert zoo.model("lean").digests == zoo.model("base").digests
    assert zoo.model("lean").loss == found.kept
    assert (
        compare_blocks(zoo.directory, "tuned", "arithmetic[:1]", lossy=0.0, keep="none").kept
        is None
    )
    assert "none" not in zoo.names()
