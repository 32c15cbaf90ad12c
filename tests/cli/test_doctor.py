"""Tests of `atts pairs` and `atts doctor`: the table of pairs, and checks before a long run."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atts.api import CARDS, Setup, config_keys, configure, evaluate_sync, gpu_placement, known_pairs
from atts.core import Role
from atts.engine import Engine
from atts.journal import Warned, open_run
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.pipelines import Policy
from atts.servers import compatibility_table
from atts.testing import ServerQuirks
from atts.testing.servers import DialectServer

Serve = Callable[..., str]


def embedded(role: Any, tokens: int = 2048) -> Callable[[], Engine]:
    """Return a factory of embedded models with a real tokenizer on disk, which the server and the
    checks can both open.
    """
    return lambda: LocalEngine(
        path(role), name=role, options=LocalOptions(worker="thread", kv_tokens=tokens)
    )


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that serves an embedded model and returns the engine's address."""
    with ExitStack() as stack:

        def start(role: Any, dialect: Any = "vllm", model: str = "owner/toy", **quirks: Any) -> str:
            server = stack.enter_context(
                DialectServer(embedded(role), dialect, model=model, quirks=ServerQuirks(**quirks))
            )
            return f"{dialect}:{server.url}/{model}?tokenizer={path(role)}"

        yield start


def test_every_pair_can_be_run_and_placed(tmp_path: Path) -> None:
    """The table has at least twelve pairs; each sets existing keys to valid values and has models
    of known size.
    """
    assert len(known_pairs()) >= 12
    for pair in known_pairs().values():
        assert set(pair.settings) <= config_keys().keys()
        found = configure({"pair": pair.name}, environment={}, folder=tmp_path)
        bounds = found.setup().run_policy.bounds()
        assert (found["draft"], found["target"]) == (pair.words("draft"), pair.words("target"))
        assert bounds.max_tokens < min(pair.size("draft").context, pair.size("target").context)
        assert bounds.turns * bounds.draft_tokens >= bounds.max_tokens
        assert found.setup().warnings == ()
        if pair.name != "embedded":
            assert bounds.max_tokens >= 4096
            assert "boxed" in found["system"] + found["instruction"]
    assert configure({"pair": "r1-1.5b/r1-70b"}, environment={}, folder=tmp_path)["system"] == ""


def test_a_servers_short_context_lowers_unset_lengths(serve: Serve, tmp_path: Path) -> None:
    """A server's short context limits the lengths that the user did not set, and the number of
    turns follows.
    """
    setup = Setup(
        draft=serve("draft"), target=serve("target"), policy=Policy(samples=1), method="draft-only"
    )
    result = evaluate_sync("arithmetic[:1]", setup, directory=tmp_path / "run")
    context = min(int(str(engine["context_length"])) for engine in result.manifest.engines.values())
    policy = open_run(tmp_path / "run").policy
    assert setup.run_policy.max_tokens == 4096
    room = context - context // 4  # a quarter of the context is left for the problem
    assert policy["max_tokens"] == room < 4096
    assert policy["turns"] * policy["chunking"]["draft_tokens"] >= policy["max_tokens"]
    told = [str(entry.event) for entry in open_run(tmp_path / "run").entries({Warned})]
    assert any(f"{room:,} tokens instead of 4,096" in text for text in told)
    assert evaluate_sync("arithmetic[:1]", setup, directory=tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("flags", "most"), [({}, 7680), ({"max_tokens": 12_000}, 12_000), ({"max_tokens": 900}, 900)]
)
def test_a_pair_is_cut_to_the_context_and_a_flag_is_not(
    flags: dict[str, Any], most: int, tmp_path: Path
) -> None:
    """Lengths that a pair sets are lowered if a model's context is too short. A length that the
    user set is kept, with a warning.
    """
    found = configure({"pair": "r1-1.5b/r1-70b", **flags}, environment={}, folder=tmp_path)
    bounds = found.setup().policy_within(8192).bounds()
    assert bounds.max_tokens == most
    assert bounds.turns * bounds.draft_tokens >= most


def test_files_and_flags_win_over_the_pair(tmp_path: Path) -> None:
    """Values in the configuration file and in flags override those of the pair: here, a server's
    address and the number of tokens.

    The number of turns is adapted to the tokens, and the origin of each value is reported.
    """
    (tmp_path / "atts.toml").write_text(
        'pair = "r1-8b/qwq-32b"\ntarget = "sglang:http://gpu7:8000/Qwen/QwQ-32B"\n'
    )
    found = configure({"max_tokens": 32_000}, environment={}, folder=tmp_path)
    assert found["target"] == "sglang:http://gpu7:8000/Qwen/QwQ-32B"
    assert found["draft"].startswith("vllm:http://127.0.0.1:8001/deepseek-ai/")
    assert found.settings["draft"].origin == "pair r1-8b/qwq-32b"
    assert (
        found["turns"]
        == 2 * configure({"pair": "r1-8b/qwq-32b"}, environment={}, folder=tmp_path / "x")["turns"]
    )
    many = configure(
        {"pair": "r1-8b/qwq-32b"},
        ["draft_servers=3", "target_servers=2"],
        environment={},
        folder="/",
    )
    assert [word.split("/")[2] for word in many["draft"].split(",")] == [
        f"127.0.0.1:800{n}" for n in (1, 2, 3)
    ]
    assert [word.split("/")[2] for word in many["target"].split(",")] == [
        "127.0.0.1:8000",
        "127.0.0.1:8100",
    ]
    local = configure({"pair": "r1-8b/qwq-32b", "backend": "local"}, environment={}, folder="/")
    assert local["target"] == "hf:Qwen/QwQ-32B?dtype=bfloat16"


@pytest.mark.parametrize("card", CARDS)
def test_a_placement_never_promises_more_memory_than_there_is(card: str) -> None:
    """On each kind of card, a printed placement has room for the weights and the cache of one
    rollout within its share of memory.

    With fewer cards they would not fit.
    """
    for pair in known_pairs().values():
        found = gpu_placement(pair, card, 16_000)
        if pair.name == "embedded":
            assert found is None
            continue
        assert found is not None
        assert found.draft is not None
        assert found.target is not None
        shared = set(found.draft.cards) & set(found.target.cards)
        assert sum((found.draft.utilization, found.target.utilization)) <= (
            0.93 if shared else 1.85
        )
        assert found.rollouts >= 1
        assert max((*found.draft.cards, *found.target.cards)) < found.count
        for role, share in (("draft", found.draft), ("target", found.target)):
            size = pair.size(role)  # type: ignore[arg-type]  # it is a role
            held = (
                size.weights * (0.5 if share.is_quantized else 1)
                + found.context * size.cache_bytes / 1e9
            )
            assert held <= share.utilization * CARDS[card] * len(share.cards)
        assert (
            gpu_placement(pair, card, 16_000, tuple(n for n in (1, 2, 4, 8) if n < found.count))
            is None
        )
        commands = list(found.commands(pair))
        assert pair.target in commands[0]
        assert f"--gpu-memory-utilization {found.draft.utilization:.2f}" in commands[1]


def test_pairs_are_listed(atts: Any) -> None:
    """`atts pairs` prints a table, one object per pair, or one pair with the commands that serve
    it.
    """
    table = atts("pairs").out
    objects = [json.loads(line) for line in atts("pairs", "--json").out.splitlines()]
    assert [pair["name"] for pair in objects] == list(known_pairs())
    assert all(pair["name"] in table for pair in objects)
    one = atts("pairs", "qwen-7b/qwq-32b", "--card", "h100").out
    assert "vllm serve Qwen/QwQ-32B --port 8000" in one
    assert (
        "published results on aime25: 40.0 % of problems solved by at least one of 16 rollouts; "
        "speed-up over the target alone: 14.5x (paper-marginal), 12.82x (paper-conditional)" in one
    )
    assert atts("pairs", "embedded").out.count("no GPU is needed") == 3


@pytest.mark.parametrize(
    ("version", "has"), [("", True), ("0.33", True), ("v0.30.1", True), ("0.29.2", False)]
)
def test_commands_have_only_flags_that_the_version_knows(
    atts: Any, version: str, has: bool
) -> None:
    """A flag that was new in vLLM 0.30 is not printed for an older server. A note then says which
    function is missing without the flag.
    """
    words = ("pairs", "r1-1.5b/r1-7b", "--card", "h100")
    said = atts(*words, *(("--server-version", version) if version else ()))
    commands = [line for line in said.out.splitlines() if "vllm serve" in line]
    assert len(commands) == 2
    assert all(("--enable-scale-out" in command) == has for command in commands)
    assert ("since vLLM 0.30, atts can abort a request by its id; with" in said.out) == (not has)
    assert all("--enable-prefix-caching" in command for command in commands)


@pytest.mark.parametrize("version", ["0.9.1", "0.10.1", "new", ""])
def test_a_version_that_cannot_be_used_is_refused(atts: Any, version: str) -> None:
    """A server version that returns no token ids is refused, and so is a text that is not a
    version.
    """
    said = atts("pairs", "r1-1.5b/r1-7b", "--card", "h100", f"--server-version={version or ' '}")
    assert said.code == 2
    assert "--server-version" in said.err


@pytest.mark.checkout
def test_the_pages_have_the_commands_and_versions_that_are_printed(atts: Any) -> None:
    """The two-servers page repeats `atts pairs`, and the servers page has the table of versions."""
    docs = Path(__file__).parents[2] / "docs"
    printed = atts("pairs", "qwen3-1.7b/qwen3-14b", "--card", "l40s").out.splitlines()
    commands = [line for line in printed if "vllm serve" in line]
    page = (docs / "two_servers.md").read_text().splitlines()
    assert [line for line in page if line.startswith(("CUDA", "vllm serve"))] == commands
    table = "\n".join(compatibility_table())
    assert table in (docs / "servers.md").read_text(), "docs/servers.md needs this table:\n" + table


def test_a_share_of_memory_is_larger_than_the_weights_in_it() -> None:
    """On each card and for each pair, the weights fit into the printed share of memory."""
    roles: list[tuple[Role, ...]] = [("draft", "target"), ("target",), ("draft",)]
    for pair in known_pairs().values():
        for card in CARDS:
            for asked in roles:
                placed = gpu_placement(pair, card, 16_000, roles=asked)
                if placed is None:
                    assert pair.name == "embedded"
                    continue
                assert set(placed.shares) == set(asked)
                for role, share in placed.shares.items():
                    size = pair.size(role)
                    weights = size.weights * (0.5 if share.is_quantized else 1)
                    cache = placed.context * size.cache_bytes / 1e9
                    room = share.utilization * CARDS[card] * len(share.cards)
                    assert weights + cache < room, (pair.name, card, role)


def test_a_card_that_is_not_here_is_never_ok(
    atts: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this machine lacks the GPU that the user named or that atts guessed, the memory check
    gives a warning.

    On a GPU of this machine, the check is ok for the models that the method uses.
    """
    words = ("--pair", "r1-1.5b/r1-7b", "--draft", serve("draft"), "--target", serve("target"))

    def memory(*more: str) -> list[dict[str, str]]:
        checks = json.loads(atts("doctor", *words, "--json", *more).out)["checks"]
        return [check for check in checks if check["name"] == "memory"]

    cards = list[tuple[str, float]]()
    monkeypatch.setattr("atts.api.preflight._cards_here", lambda: iter(cards))
    (guessed,) = memory()
    assert guessed["status"] == "warn"
    assert guessed["seen"] == (
        "this machine has no GPU; r1-1.5b/r1-7b needs 1 x rtx4090 (target in fp8) or 1 x h100 or "
        "1 x h200"
    )
    assert "--card" in guessed["advice"]
    (named,) = memory("--card", "h100")
    assert named["status"] == "warn"
    assert "this machine has no h100" in named["seen"]
    cards.append(("h100", 80.0))
    (here,) = memory()
    assert here["status"] == "ok"
    assert "draft" in here["seen"]
    (alone,) = memory("--method", "target-only")
    assert alone["status"] == "ok"
    assert "draft" not in alone["seen"]


def test_a_cache_of_one_rollout_is_written_in_the_singular(atts: Any) -> None:
    """Eight cards of 24 GB leave room for "1 rollout", in the singular, next to the 70B target."""
    report = json.loads(
        atts("doctor", "--pair", "r1-1.5b/r1-70b", "--card", "rtx4090", "--json").out
    )
    (memory,) = [check["seen"] for check in report["checks"] if check["name"] == "memory"]
    assert "the cache has room for 1 rollout;" in memory


def test_the_doctor_predicts_the_memory_of_local_models(
    atts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`atts doctor` predicts the memory of local models without loading them.

    If the models do not fit, its advice names an `atts pairs` command.
    """
    cards = [("h100", 80.0)]
    monkeypatch.setattr("atts.api.preflight._cards_here", lambda: iter(cards))

    def memory(pair: str) -> dict[str, str]:
        words = ("--pair", pair, "--backend", "local", "--json")
        # The models are not on this machine, so their own checks fail as well.
        checks: list[dict[str, str]] = json.loads(atts("doctor", *words).out)["checks"]
        (found,) = [check for check in checks if check["name"] == "memory"]
        return found

    fits = memory("r1-1.5b/r1-7b")
    assert fits["status"] == "ok"
    assert "draft 3.6 GB of weights" in fits["seen"]
    assert "target 15.2 GB of weights" in fits["seen"]
    large = memory("r1-1.5b/r1-70b")
    assert large["status"] == "fail"
    assert "atts pairs r1-1.5b/r1-70b --card h100" in large["advice"]


def test_local_pairs_are_a_table_of_pairs_and_cards(atts: Any) -> None:
    """Each row gives the memory that a pair of models needs on a card, divided by use, or says that
    the pair needs a server.
    """
    table = atts("pairs", "--local").out
    objects = [json.loads(line) for line in atts("pairs", "--local", "--json").out.splitlines()]
    assert {(each["name"], each["card"]) for each in objects} == {
        (pair, card) for pair in known_pairs() for card in CARDS
    }
    for each in objects:
        if each["name"] == "embedded":
            continue
        (line,) = [
            line for line in table.splitlines() if line.split()[:2] == [each["name"], each["card"]]
        ]
        placed = each["placement"]
        if placed is None:
            assert line.endswith("a server")
        else:
            assert line.split()[-1] == str(placed["rollouts"])


def statuses(said: Any) -> dict[str, list[str]]:
    """Return the statuses of every kind of check."""
    found: dict[str, list[str]] = {}
    for check in json.loads(said.out)["checks"]:
        found.setdefault(check["name"], []).append(check["status"])
    return found


def test_two_good_servers_pass_and_the_settings_are_saved(atts: Any, serve: Serve) -> None:
    """With two good servers all checks pass and the settings are saved to a file that starts a run.

    The same command overwrites its own file, but no other file.
    """
    words = (
        "--draft",
        serve("draft"),
        "--target",
        serve("target"),
        "--max-tokens",
        "900",
        "--rate",
        "0.3",
    )
    said = atts("doctor", *words, "--json", "--out", "two.toml")
    assert (said.code, said.err) == (0, "")
    assert (
        statuses(said)["tokenizers"]
        == statuses(said)["trial"]
        == statuses(said)["context"]
        == ["ok"]
    )
    (trial,) = [check for check in json.loads(said.out)["checks"] if check["name"] == "trial"]
    assert "under the target" in trial["seen"]
    kept = tomllib.loads(Path("two.toml").read_text())
    assert (kept["draft"], kept["max_tokens"], kept["rate"]) == (words[1], 900, 0.3)
    plain = json.loads(
        atts("eval", "arithmetic[:1]", "--config", "two.toml", "--dry-run", "--json").out
    )
    assert plain["budget"]["max_tokens"]["value"] == 900
    assert atts("doctor", *words, "--out", "two.toml").code == 0
    Path("mine.toml").write_text("rate = 0.5\n")
    assert atts("doctor", *words, "--out", "mine.toml").code == 2
    assert Path("mine.toml").read_text() == "rate = 0.5\n"


def thinking(folder: Path) -> Path:
    """Copy the draft's tokenizer with a template that opens every answer with `<think>`."""
    copy = Path(
        shutil.copytree(
            path("draft"), folder / "thinking", ignore=shutil.ignore_patterns("*.safetensors")
        )
    )
    config = copy / "tokenizer_config.json"
    told = json.loads(config.read_text())
    for file in copy.glob("*.jinja"):
        file.write_text(file.read_text() + "<think>\n")
    if "chat_template" in told:
        config.write_text(
            json.dumps({**told, "chat_template": told["chat_template"] + "<think>\n"})
        )
    return copy


@pytest.mark.parametrize(
    ("case", "code", "name", "status", "told"),
    [
        ("context", 0, "context", "warn", "so rollouts get at most 1,536 tokens instead of 4,096"),
        ("long", 0, "context", "warn", "or leave --max-tokens out: atts then reduces the default"),
        ("model", 0, "draft", "warn", "the pair names deepseek-ai"),
        ("processed", 0, "draft", "warn", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("scores", 5, "abilities", "fail", "cannot score"),
        ("template", 5, "draft", "fail", "chat template"),
        ("nowhere", 5, "target", "fail", "cannot reach"),
        ("small", 0, "lengths", "warn", "looks too small"),
        ("think", 0, "templates", "warn", "only the template of the draft"),
    ],
)
def test_each_problem_of_a_server_is_one_line_with_advice(
    atts: Any, serve: Serve, case: str, code: int, name: str, status: str, told: str, tmp_path: Path
) -> None:
    """Each fault of a server has its line, status and exit code, and the other checks still run."""
    words = {"--max-tokens": "900", "--draft": serve("draft", "sglang" if case == "processed" else "vllm", **(
        {"logprobs": "processed"} if case == "processed" else {}))}  # fmt: skip
    words["--target"] = serve("target", "llamacpp" if case == "scores" else "vllm")
    if case == "processed":
        # Only a score computed from the draft's log-probabilities needs raw log-probabilities.
        words["--set"] = "score.kind=speculative"
    elif case == "context":
        del words["--max-tokens"]
    elif case == "long":
        words["--max-tokens"] = "4096"
    elif case == "model":
        words["--pair"] = "r1-1.5b/r1-7b"
    elif case == "small":
        words["--max-tokens"] = "300"
    elif case == "think":
        words["--draft"] = words["--draft"].partition("?")[0] + f"?tokenizer={thinking(tmp_path)}"
    elif case == "nowhere":
        words["--target"] = "vllm:http://127.0.0.1:9/m"
    elif case == "template":
        folder = Path(
            shutil.copytree(
                path("draft"),
                tmp_path / "bare",
                ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"),
            )
        )
        config = folder / "tokenizer_config.json"
        config.write_text(
            json.dumps(
                {k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}
            )
        )
        words["--draft"] = words["--draft"].partition("?")[0] + f"?tokenizer={folder}"
    said = atts("doctor", *(word for pair in words.items() for word in pair), "--json")
    assert said.code == code, said.err
    found = json.loads(said.out)["checks"]
    assert [check for check in found if check["name"] == name and check["status"] == status
            and told in check["seen"] + check["advice"]], found  # fmt: skip
    assert {"lengths", "disk", "draft", "target"} <= {check["name"] for check in found}


def test_the_doctor_names_the_tokenizers_that_show_the_kind_of_model(
    atts: Any, serve: Serve
) -> None:
    """If a server names a tokenizer whose template shows that the model does not reason, the doctor
    prints the setting that gives the lengths of instruct models. Then the warning is gone.
    """
    roles: tuple[Role, ...] = ("draft", "target")
    served = {role: serve(role, model=str(path(role))) for role in roles}
    bare = {role: re.sub(r"(//[^/]+).*", r"\1", served[role]) for role in roles}
    mark = "the chat templates have no reasoning marks"
    said = atts("doctor", "--draft", bare["draft"], "--target", bare["target"]).out
    (line,) = [line for line in said.splitlines() if mark in line]
    for role in roles:
        assert f"?tokenizer={path(role)} to the address of the {role}" in line
    words = {role: f"{bare[role]}?tokenizer={path(role)}" for role in roles}
    known = atts("doctor", "--draft", words["draft"], "--target", words["target"]).out
    assert mark not in known
    assert "(instruct models)" in known


def test_a_start_command_is_suggested_only_if_no_server_answers(
    atts: Any, serve: Serve, tmp_path: Path
) -> None:
    """A start command is suggested only if no server answers.

    If a server runs but its tokenizer is missing on this machine, the advice asks for the
    tokenizer's folder.
    """
    draft = serve("draft").partition("?")[0]
    words = (
        "--draft",
        f"{draft}?tokenizer={tmp_path}/none",
        "--target",
        "vllm:http://127.0.0.1:9/m",
    )
    said = atts("doctor", "--pair", "r1-1.5b/r1-7b", *words, "--json")
    checks = {check["name"]: check for check in json.loads(said.out)["checks"]}
    assert "?tokenizer=FOLDER at the end" in checks["draft"]["seen"]
    assert checks["draft"]["advice"] == ""
    assert "start command" in checks["target"]["advice"]


def test_the_disk_check_names_the_folder_of_runs(atts: Any, scripted: tuple[str, ...]) -> None:
    """The check of free space names the folder that gets the runs, and no dataset."""
    (line,) = [
        line
        for line in atts("doctor", *scripted[:4]).out.splitlines()
        if line.split()[1:2] == ["disk"]
    ]
    assert "free for runs in runs" in line
    assert "arithmetic" not in line
