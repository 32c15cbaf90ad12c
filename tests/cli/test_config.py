"""Tests of the configuration: its sources have a documented order, and a value means the same in
each source.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.api import Setup, config_keys, configure
from atts.errors import OptionError, UsageError
from atts.journal import MANIFEST, load_manifest
from atts.pipelines import Policy
from atts.testing import toy_problems


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    """Defaults, file, environment and flags are applied in this order, so the last one wins. Each
    value records which of them set it.
    """
    (tmp_path / "atts.toml").write_text(
        "rate = 0.3\nsamples = 4\nturns = 5\n[sampling]\ntemperature = 0.5\n"
    )
    found = configure(
        {"turns": 7},
        ["seed=9"],
        environment={"ATTS_SAMPLES": "6", "ATTS_API_KEY": "secret"},
        folder=tmp_path,
    ).settings
    shown = {
        name: (found[name].value, Path(found[name].origin).name)
        for name in ("rate", "samples", "turns", "seed")
    }
    assert shown == {
        "rate": (0.3, "atts.toml"),
        "samples": (6, "ATTS_SAMPLES"),
        "turns": (7, "--turns"),
        "seed": (9, "--set"),
    }
    assert (found["sampling.temperature"].value, found["method"].origin) == (0.5, "default")


def test_a_named_file_replaces_the_usual_one(tmp_path: Path) -> None:
    """Only one configuration file is read: the file named by `--config`, or by ATTS_CONFIG, or
    atts.toml.
    """
    for name, rate in (("atts.toml", 0.1), ("mine.toml", 0.2), ("theirs.toml", 0.3)):
        (tmp_path / name).write_text(f"rate = {rate}")
    variables = {"ATTS_CONFIG": str(tmp_path / "mine.toml")}
    assert configure(environment={}, folder=tmp_path)["rate"] == 0.1
    assert configure(environment=variables, folder=tmp_path)["rate"] == 0.2
    assert (
        configure(environment=variables, folder=tmp_path, file=tmp_path / "theirs.toml")["rate"]
        == 0.3
    )


def test_the_defaults_are_those_of_the_python_api(tmp_path: Path) -> None:
    """An empty command line equals `Setup()` in code."""
    made = configure(environment={}, folder=tmp_path).setup()
    plain = Setup()
    names = [field.name for field in fields(Setup) if field.name not in ("provenance", "stored")]
    assert {name: getattr(made, name) for name in names} == {
        name: getattr(plain, name) for name in names
    }


def test_every_field_of_a_policy_has_a_documented_key() -> None:
    """A configuration file can set everything that Python can, and every key has a description."""
    spoken = {name.partition(".")[0] for name in config_keys()}
    assert {field.name for field in fields(Policy)} <= spoken
    assert [key.name for key in config_keys().values() if not key.help] == []


def test_what_help_calls_a_default_is_the_default(atts: Any) -> None:
    """The defaults in the help of the flags are those of the configuration."""
    from atts.cli import options

    for flag in (
        "method",
        "rate",
        "samples",
        "turns",
        "max_tokens",
        "rate_scope",
        "draft",
        "target",
        "seed",
        "concurrency",
    ):
        shown = options.OPTIONS[flag].default.show_default
        default = config_keys()[flag].default
        if default is None:  # these defaults depend on the models
            assert "none: " in config_keys()[flag].help
            continue
        assert shown == str(default) or (flag == "target" and shown == default), flag


SCALARS = {int: st.integers(0, 10**6), float: st.floats(0, 1), bool: st.booleans()}


@settings(deadline=None)
@given(st.data())
def test_a_value_means_the_same_in_file_variable_and_flag(data: st.DataObject) -> None:
    """The text of a flag and the typed value of a file give the same setting."""
    plain = [key for key in config_keys().values() if key.kind in SCALARS]
    key = data.draw(st.sampled_from(plain))
    value = data.draw(SCALARS[key.kind])
    assert key.read(value, "typed") == key.read(str(value), "words") == value
    chosen = data.draw(st.sampled_from([key for key in config_keys().values() if key.choices]))
    word = data.draw(st.sampled_from(chosen.choices))
    assert chosen.read(word, "word") == word


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", 2.5),
        ("samples", True),
        ("rate", "nan"),
        ("optimistic", "maybe"),
        ("chunking.stop", "[1]"),
        ("draft", 3),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    """A value of the wrong type is refused instead of being rounded, guessed or turned into text."""
    with pytest.raises(OptionError):
        config_keys()[name].read(value, name)


def test_lists_and_none_can_be_written(tmp_path: Path) -> None:
    """A list of delimiters, an empty list and "none" can be written in a file, a variable and a
    flag.
    """
    found = configure(
        {}, ['chunking.stop=["\\n\\n", "Wait"]', "limit=none"], environment={}, folder=tmp_path
    )
    assert found.setup().policy.chunking.stop == ("\n\n", "Wait")
    assert found.job.limit is None
    assert (
        configure({}, ["chunking.stop=[]"], environment={}, folder=tmp_path)
        .setup()
        .policy.chunking.stop
        == ()
    )


def test_a_target_with_some_sampling_of_its_own_shares_the_rest(tmp_path: Path) -> None:
    """If only one key of `target_sampling` is set, its other keys take the values of `sampling`."""
    pairs = ["sampling.top_p=0.9", "target_sampling.temperature=0.1"]
    sampling = configure({}, pairs, environment={}, folder=tmp_path).setup().policy.target_sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.top_p) == (0.1, 0.9)


def test_settings_of_a_method_cannot_be_contradicted(tmp_path: Path) -> None:
    """A setting that the method fixes has the method as its origin; the user may repeat the
    method's value but not change it.
    """
    found = configure({"method": "top-b"}, environment={}, folder=tmp_path).settings["barrier"]
    assert (found.value, found.origin) == (True, "method top-b")
    assert (
        configure({"method": "top-b"}, ["barrier=true"], environment={}, folder=tmp_path)["barrier"]
        is True
    )
    with pytest.raises(OptionError, match="top-b"):
        configure({"method": "top-b"}, ["barrier=false"], environment={}, folder=tmp_path)


def test_only_settings_that_change_results_change_the_directory(tmp_path: Path) -> None:
    """Settings that can change results, such as the seed, change the name of the run directory;
    concurrency and report do not.
    """

    def directory(*pairs: str) -> Path:
        return configure({}, pairs, environment={}, folder=tmp_path).directory

    assert directory() == directory("concurrency=8", "report=none", "limits.target.slots=2")
    assert (
        len(
            {directory(), directory("seed=1"), directory("samples=4"), directory("dataset=math500")}
        )
        == 4
    )
    assert directory("out=elsewhere") == Path("elsewhere")


def test_origins_are_in_the_manifest(atts: Any, scripted: tuple[str, ...], tmp_path: Path) -> None:
    """The manifest has each key, its value and its origin; a resume may give the same value in
    another source.
    """
    (tmp_path / "atts.toml").write_text("samples = 2\n")
    words = ("eval", "arithmetic[:1]", *scripted, "--out", "run")
    assert atts(*words).code == 0
    manifest = load_manifest(tmp_path / "run" / MANIFEST)
    assert manifest is not None
    assert {(name, manifest.settings[name].origin) for name in ("samples", "out", "rate")} == {
        ("samples", "atts.toml"),
        ("out", "--out"),
        ("rate", "default"),
    }
    assert set(config_keys()) <= set(manifest.settings)
    (tmp_path / "atts.toml").unlink()
    assert atts(*words, "--samples", "2").code == 0
    assert atts(*words, "--samples", "3").code == UsageError.exit_code


def test_code_that_changes_a_setup_becomes_the_origin(tmp_path: Path) -> None:
    """If a program changes a value, the origin of this value becomes "code"; other values keep
    their origins.
    """
    from dataclasses import replace

    made = configure({"rate": 0.3, "seed": 5}, environment={}, folder=tmp_path).setup()
    found = replace(made, rate=0.6).settings
    assert [(found[name].value, found[name].origin) for name in ("rate", "seed")] == [
        (0.6, "code"),
        (5, "--seed"),
    ]
    assert Setup(seed=3).settings["seed"].origin == "code"


def test_show_prints_every_key_with_its_origin(atts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`atts config show` prints columns for people, or one JSON object per line for programs, with
    the origin of each key.
    """
    monkeypatch.setenv("ATTS_GROWTH", "2.5")
    said = atts("config", "show", "--json")
    records = {record["key"]: record for record in map(json.loads, said.out.splitlines())}
    assert list(records) == list(config_keys())
    assert (records["growth"]["value"], records["growth"]["origin"]) == (2.5, "ATTS_GROWTH")
    assert records["growth"]["default"] == "inf"
    assert atts("config", "show", "growth").out.split() == ["growth", "2.5", "ATTS_GROWTH"]


def test_a_dry_run_names_the_basis_of_its_estimate(
    atts: Any, scripted: tuple[str, ...], tmp_path: Path
) -> None:
    """Without earlier runs the dry run prints bounds; with earlier runs it prints the tokens and
    time that those runs took.
    """
    words = ("eval", "arithmetic[:4]", *scripted, "--samples", "2")
    first = json.loads(atts(*words, "--dry-run", "--json").out)
    assert (first["problems"], first["rollouts"], first["done"], first["expected"]) == (
        4,
        8,
        0,
        None,
    )
    assert not any(tmp_path.iterdir())
    assert atts(*words).code == 0
    again = json.loads(atts(*words, "--dry-run", "--json").out)
    assert (again["done"], again["directory"]) == (4, first["directory"])
    more = ("eval", "arithmetic[:40]", *words[2:])
    larger = json.loads(atts(*more, "--dry-run", "--json").out)
    assert larger["expected"]["draft"] == pytest.approx(10 * again["expected"]["draft"])
    assert again["expected"]["draft"] <= again["at_most"]["draft"]
    assert first["directory"] in larger["basis"]
    assert "tokens per rollout" not in larger["basis"]
    longer = json.loads(atts(*more, "--max-tokens", "4000", "--dry-run", "--json").out)
    assert longer["basis"].endswith("; that run had at most 512 tokens per rollout")
    # scripted models solve none of these problems, so their run gives no estimate of power
    assert first["power"] == []
    assert larger["power"][0].startswith("all rollouts of 4 problems had the same result")


def test_a_dry_run_prints_the_detectable_difference(atts: Any, tmp_path: Path) -> None:
    """Power is computed from the graded rollouts of an earlier run of the same models."""
    problems = tmp_path / "toy.jsonl"
    rows = ({"id": one.id, "problem": one.text, "answer": one.answer} for one in toy_problems(30))
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--draft", "scripted", "--method", "draft-only", "--set", "early_stop=none")
    assert atts("eval", f"{problems}[:12]", *words, "--report", "none").code == 0
    text = atts("eval", str(problems), *words, "--dry-run").out
    assert "  power     30 problems x 8 samples show a difference of " in text
    assert " problems to show 1 point" in text
    assert "of the variance of single rollouts is between problems" in text


def test_a_sweeps_dry_run_prints_one_object_per_run(atts: Any) -> None:
    """A sweep's dry run prints one object per run, with its values and directory, and creates
    nothing.
    """
    words = ("--draft", "scripted", "--target", "scripted", "--over", "rate=.1,.3", "--out", "set")
    said = atts("sweep", "arithmetic[:2]", *words, "--dry-run", "--json")
    assert said.code == 0, said.err
    runs = [json.loads(line) for line in said.out.splitlines()]
    found = {run["name"]: (run["kind"], run["directory"]) for run in runs}
    assert found["rate=0.1"] == ("point", "set/rate=0.1")
    assert not Path("set").exists()


def test_a_dry_run_of_a_shard_covers_its_part(atts: Any, scripted: tuple[str, ...]) -> None:
    """The dry run of a shard has the problems and the directory of the real command; an empty shard
    is refused.
    """
    words = ("eval", "arithmetic[:5]", *scripted, "--dry-run", "--json", "--shard")
    whole = json.loads(atts(*words[:-1]).out)
    part = json.loads(atts(*words, "2/2").out)
    assert (whole["problems"], part["problems"]) == (5, 2)
    assert part["directory"] == f"{whole['directory']}-2-of-2"
    assert "6/6 of 5 problems is empty" in atts(*words, "6/6").err


def test_a_dry_run_of_the_embedded_pair_needs_no_earlier_run(atts: Any, tmp_path: Path) -> None:
    """Without an earlier run, the estimate uses the worked solutions of the generated problems."""
    said = json.loads(atts("eval", "--dry-run", "--json").out)
    assert 20 * said["rollouts"] < said["expected"]["draft"] < said["at_most"]["draft"]
    assert "worked solutions" in said["basis"]
    alone = json.loads(atts("eval", "--method", "draft-only", "--dry-run", "--json").out)
    assert (alone["expected"]["target"], alone["at_most"]["scored"]) == (0, 0)


@pytest.mark.parametrize(
    ("flag", "value", "key", "read"),
    [
        ("--temperature", "0.5", "sampling.temperature", 0.5),
        ("--top-p", "0.9", "sampling.top_p", 0.9),
        ("--early-stop", "none", "early_stop", "none"),
        ("--epochs", "3", "samples", 3),
        ("--concurrency", "7", "concurrency", 7),
        ("--on-unscored", "escalate", "on_unscored", "escalate"),
        ("--give-up-after", "90", "give_up_after", 90.0),
    ],
)
def test_usual_settings_are_flags(
    atts: Any,
    scripted: tuple[str, ...],
    tmp_path: Path,
    flag: str,
    value: str,
    key: str,
    read: object,
) -> None:
    """Each usual setting has a flag, and the manifest names this flag as the origin."""
    run = tmp_path / "run"
    said = atts(
        "eval", "arithmetic[:1]", *scripted, flag, value, "--out", str(run), "--report", "none"
    )
    assert said.code == 0, said.err
    settings = json.loads((run / "manifest.json").read_text())["settings"]
    assert settings[key]["value"] == read
    assert settings[key]["origin"] == ("--samples" if flag == "--epochs" else flag)


@pytest.mark.parametrize(
    ("flag", "value"), [("--temperature", "-3"), ("--top-p", "1.5"), ("--early-stop", "maybe")]
)
def test_impossible_sampling_is_refused_by_its_flag_before_models_load(
    atts: Any, flag: str, value: str
) -> None:
    """The message on impossible sampling begins with the flag that the user typed, and no model is
    loaded.
    """
    said = atts("eval", "arithmetic[:1]", flag, value)
    assert said.code == 2
    assert f"atts: {flag}: " in said.err
    assert "loading" not in said.err


def test_another_setting_in_the_same_directory_is_refused_by_its_flag(
    atts: Any, scripted: tuple[str, ...], tmp_path: Path
) -> None:
    """Another setting in a run's directory is refused before models load; the message names the
    flag and both values.
    """
    run = ("--out", str(tmp_path / "run"), "--report", "none")
    assert atts("eval", "arithmetic[:1]", *scripted, *run).code == 0
    said = atts("eval", "arithmetic[:1]", *scripted, *run, "--temperature", "0.9")
    assert said.code == 2
    assert "--temperature: stored 0.7, now 0.9" in said.err
    assert "loading" not in said.err
    said = atts("eval", "arithmetic[:2]", *scripted, *run, "--limit", "2")
    assert said.code == 2
    assert "--limit: stored none, now 2" in said.err
    assert "loading" not in said.err


def test_progress_and_summary_print_one_share(atts: Any, scripted: tuple[str, ...]) -> None:
    """The last progress line and the summary print the same share of target tokens."""
    said = atts("eval", "arithmetic[:6]", *scripted, "--samples", "4", "--out", "run")
    assert said.code == 0, said.err
    shares = re.findall(r"tokens ([\d.]+) % written by the target", said.err)
    (summed,) = re.findall(r"by the target \(([\d.]+) %\)", said.out)
    assert float(summed) > 0
    assert shares[-1] == summed


def test_the_text_that_ends_the_thinking_may_be_in_a_file(tmp_path: Path) -> None:
    """The text that ends the thinking may be read from a file. The configuration stores the text
    itself, so a run does not depend on the file.
    """
    file = tmp_path / "end.txt"
    file.write_text("\n</think>\nThe answer: ")
    found = configure({"thinking_tokens": 50}, [f"thinking_end=@{file}"], environment={})
    assert found.setup().policy.thinking_end == "\n</think>\nThe answer: "
    assert found.setup().policy.thinking_tokens == 50
    with pytest.raises(OptionError, match=r"thinking_end: .*absent\.txt cannot be read"):
        configure({}, [f"thinking_end=@{tmp_path}/absent.txt"], environment={})
    with pytest.raises(OptionError, match="leaves none for the answer"):
        configure({"thinking_tokens": 50, "max_tokens": 40}, environment={})


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("draft-only", (800, 0, 0)),
        ("target-only", (0, 0, 800)),
        ("atts --set takeover=continue", (800, 800, 800)),
        ("cascade", (400, 0, 400)),
    ],
)
def test_a_dry_run_counts_no_token_beyond_the_length_of_a_rollout(
    atts: Any, scripted: tuple[str, ...], method: str, most: tuple[int, int, int]
) -> None:
    """For 8 rollouts of at most 100 tokens no count exceeds 800 tokens, even if a chunk may be
    longer than 100.
    """
    words = ("--samples", "4", "--max-tokens", "100", "--set", "chunking.draft_tokens=4096")
    both = ("--set", "chunking.target_tokens=4096", "--method", *method.split())
    said = json.loads(
        atts("eval", "arithmetic[:2]", *scripted, *words, *both, "--dry-run", "--json").out
    )
    assert tuple(said["at_most"][name] for name in ("draft", "scored", "target")) == most
