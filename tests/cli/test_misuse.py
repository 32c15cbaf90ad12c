"""Tests of users' mistakes: each gets one or two helpful lines on stderr and the documented exit
code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from atts.cli.app import EXIT_CODES
from atts.journal import locked

USAGE = 2
ENGINE = 3
DISK = 4
RUN = "arithmetic[:2] --samples 2 --draft scripted --target scripted --report none"


def nothing(folder: Path) -> None:
    """Do nothing, for cases that need no files."""


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return a function that writes a text to a file."""

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def directory(name: str) -> Callable[[Path], None]:
    """Return a function that makes a directory."""
    return lambda folder: (folder / name).mkdir(parents=True)


def damaged(folder: Path) -> None:
    """Cut the middle out of the journal's fifth line."""
    journal = folder / "runs/atts/journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:10] + lines[4][40:]
    journal.write_bytes(b"".join(lines))


def newer(folder: Path) -> None:
    """Mark the manifest as written by a later version."""
    manifest = folder / "runs/atts/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema": 999}))


def an_array(folder: Path) -> None:
    """Save an array of twelve scores in one row."""
    np.save(folder / "s.npy", np.linspace(1.1, 2.0, 12))


def drafter(kind: str) -> Callable[[Path], None]:
    """Return a function that makes a folder that cannot draft for the embedded target.

    The folder "drafter" has a BERT configuration, a far too large model, or another tokenizer.
    """

    def write(folder: Path) -> None:
        from atts.models import path

        shutil.copytree(path("draft"), folder / "drafter")
        config = folder / "drafter/config.json"
        tokenizer = folder / "drafter/tokenizer.json"
        if kind == "bert":
            config.write_text('{"model_type": "bert"}')
        elif kind == "huge":
            sizes = {"intermediate_size": 1 << 23, "num_hidden_layers": 4096}
            config.write_text(json.dumps({**json.loads(config.read_text()), **sizes}))
        else:
            state = json.loads(tokenizer.read_text())
            words = state["model"]["vocab"]
            words["ox"], words["The"] = words["The"], words["ox"]
            tokenizer.write_text(json.dumps(state))

    return write


DRAFTED = "--target embedded:target?worker=thread&drafter=hf:./drafter"


def a_zoo(folder: Path) -> None:
    """Make a zoo without models."""
    (folder / "zoo/models").mkdir(parents=True)
    (folder / "zoo/blocks").mkdir()
    (folder / "zoo/zoo.json").write_text('{"schema": 1}')


SCORES = "s.jsonl"
SCORED = text(SCORES, '{"score": 1.5}\n{"score": 1.7}\n')


class Case(NamedTuple):
    """A command line, a function that prepares its files, and the text that its message must
    contain.
    """

    name: str
    words: str
    code: int
    says: tuple[str, ...]
    before: Callable[[Path], None] = nothing
    variables: Mapping[str, str] = {}


CASES = [
    Case("misspelt command", "evla", USAGE, ("evla", "eval")),
    Case("misspelt option", f"eval {RUN} --sampels 4", USAGE, ("--sampels", "--samples")),
    Case("option without a value", "eval --rate", USAGE, ("--rate",)),
    Case("word for a number", f"eval {RUN} --rate high", USAGE, ("--rate", "number")),
    Case(
        "percent for a number", f"eval {RUN} --rate 20%", USAGE, ("--rate", "'20%' is not", "0.2")
    ),
    Case(
        "fraction of a sample", f"eval {RUN} --samples 2.5", USAGE, ("--samples", "'2.5'", "whole")
    ),
    Case(
        "model of the hub without its scheme",
        f"eval {RUN} --draft Qwen/Qwen3-0.6B",
        USAGE,
        ("hf:Qwen/Qwen3-0.6B",),
    ),
    Case("rate = 2", f"eval {RUN} --rate 2", USAGE, ("--rate", "2", "[0, 1]")),
    Case("rate = nan", f"eval {RUN} --rate nan", USAGE, ("--rate", "nan")),
    Case("m = 0", "eval --samples 0", USAGE, ("--samples", "0")),
    Case("unknown tracker", f"eval {RUN} --log mlflo", USAGE, ("--log", "'mlflow'")),
    Case("tracker that is not installed", f"eval {RUN} --log mlflow", USAGE, ("[mlflow]", "pip")),
    Case("no problems wanted", "eval --limit 0", USAGE, ("--limit", "at least 1")),
    Case(
        "negative temperature",
        f"eval {RUN} --set sampling.temperature=-1",
        USAGE,
        ("temperature", "-1"),
    ),
    Case("unknown method", f"eval {RUN} --method atss", USAGE, ("atss", "'atts'")),
    Case("unknown mode", f"eval {RUN} --rate-scope qestion", USAGE, ("qestion", "'question'")),
    Case("unknown report", f"eval {RUN} --report pdf", USAGE, ("pdf", "html")),
    Case(
        "method contradicted",
        f"eval {RUN} --method top-b --set barrier=false",
        USAGE,
        ("barrier", "top-b"),
    ),
    Case("unknown benchmark", "eval math50", USAGE, ("math50", "'math500'")),
    Case("missing dataset", "eval mine.jsonl", USAGE, ("mine.jsonl",)),
    Case(
        "directory for a dataset",
        "eval mine.jsonl",
        USAGE,
        ("mine.jsonl",),
        directory("mine.jsonl"),
    ),
    Case(
        "missing column",
        "eval mine.csv",
        USAGE,
        ("mine.csv", "column"),
        text("mine.csv", "a,b\n1,2\n"),
    ),
    Case(
        "column that is not named",
        "datasets show mine.csv",
        USAGE,
        ("--column text=NAME",),
        text("mine.csv", "a,answer\n1,2\n"),
    ),
    Case(
        "no reference answers",
        "datasets show mine.csv",
        USAGE,
        ("--column answer=NAME", "--answers optional"),
        text("mine.csv", "question,b\n1,2\n"),
    ),
    Case(
        "row without an answer",
        "datasets show mine.csv",
        USAGE,
        ("--column answer=NAME", "line 3"),
        text("mine.csv", "question,answer\n1,2\n3,\n"),
    ),
    Case(
        "chat API without a URL",
        f"eval {RUN} --dry-run --draft chat:gpt-4o",
        USAGE,
        ("chat:http://HOST",),
    ),
    Case(
        "chat API that is not there",
        "probe chat:http://127.0.0.1:9/v1/m --wait 0",
        ENGINE,
        ("127.0.0.1:9",),
    ),
    Case(
        "probe of what is not a server",
        "probe vllm:nowhere",
        USAGE,
        ("not a URL", "vllm:http://HOST:PORT/MODEL"),
    ),
    Case(
        "URL without the kind of server",
        f"eval {RUN} --dry-run --draft http://user:secret@127.0.0.1:8001/v1",
        USAGE,
        ("did you mean vllm:http://127.0.0.1:8001?", "server:URL"),
    ),
    Case(
        "host and port without the kind of server",
        f"eval {RUN} --dry-run --target localhost:8000/Qwen/Qwen3-8B",
        USAGE,
        ("did you mean vllm:http://localhost:8000/Qwen/Qwen3-8B?",),
    ),
    Case(
        "option that is only a configuration key",
        "serve --max-tokens 120",
        USAGE,
        ("no such option: --max-tokens; write --set max_tokens=120",),
    ),
    Case(
        "option with a key inside a table",
        "serve --temperature=0.6 --print-policies",
        USAGE,
        ("write --set sampling.temperature=0.6",),
    ),
    Case("option without a key", "serve --prot 80", USAGE, ("--prot", "--port")),
    Case("key of a command without --set", "runs --samples 4", USAGE, ("option: --samples",)),
    Case(
        "misspelt pair",
        "eval --pair r1-1.5b/r1-70",
        USAGE,
        ("--pair", "'r1-1.5b/r1-70b'", "atts pairs"),
    ),
    Case(
        "pair of another place",
        "eval --pair embedded --backend cloud",
        USAGE,
        ("--backend", "'cloud'"),
    ),
    Case(
        "no server of a pair",
        "eval --pair embedded --set draft_servers=0",
        USAGE,
        ("draft_servers", "0"),
    ),
    Case("unknown pair to list", "pairs embeded", USAGE, ("'embedded'",)),
    Case("unknown card", "pairs embedded --card h101", USAGE, ("h101", "'h100'")),
    Case(
        "card to the doctor", "doctor --pair r1-1.5b/r1-7b --card h101", USAGE, ("h101", "'h100'")
    ),
    Case("doctor of an unknown pair", "doctor --pair nobody", USAGE, ("nobody", "atts pairs")),
    Case("doctor without an engine", "doctor --draft chat:gpt-4o", USAGE, ("chat:http://HOST",)),
    Case(
        "doctor that would write over a file",
        "doctor --draft scripted --target scripted --out mine.toml",
        USAGE,
        ("mine.toml", "another file"),
        text("mine.toml", "rate = 0.1"),
    ),
    Case(
        "doctor that cannot write",
        "doctor --draft scripted --target scripted --out no/x.toml",
        DISK,
        ("no/x.toml",),
    ),
    Case(
        "dataset without problems",
        "eval mine.jsonl",
        USAGE,
        ("mine.jsonl",),
        text("mine.jsonl", ""),
    ),
    Case(
        "non-UTF-8 dataset",
        "eval mine.jsonl",
        USAGE,
        ("mine.jsonl", "UTF-8"),
        text("mine.jsonl", b'{"text": "\xe9"}'),
    ),
    Case("unknown engine", "eval --draft vlm:http://a", USAGE, ("vlm", "'vllm'")),
    Case("engine without a model", "eval --draft hf:", USAGE, ("hf:", "does not name a model")),
    Case(
        "engine with an unknown setting",
        f"eval {RUN} --draft embedded?devise=cpu",
        USAGE,
        ("devise", "'device'"),
    ),
    Case(
        "speculation that is none",
        f"eval {RUN} --set speculate=fast",
        USAGE,
        ("--set speculate", "suffix"),
    ),
    Case(
        "speculation for a scripted target",
        f"eval {RUN} --set speculate=draft",
        USAGE,
        ("speculate", "embedded"),
    ),
    Case(
        "speculation asked of a server",
        "eval --target vllm:http://127.0.0.1:9/M --set speculate=suffix",
        USAGE,
        ("speculate", "docs/servers.md"),
    ),
    Case(
        "speculation asked of a server in a dry run",
        "eval --target openai:http://127.0.0.1:9/v1/M --set speculate=draft --dry-run",
        USAGE,
        ("speculate", "docs/servers.md"),
    ),
    Case(
        "speculation by a draft on a server",
        "eval --draft vllm:http://127.0.0.1:9/M --set speculate=draft",
        USAGE,
        ("speculate", "use another draft"),
    ),
    Case(
        "drafter on a server",
        f"eval {RUN} --target embedded?drafter=vllm:http://a:1/M",
        USAGE,
        ("hf:OWNER/NAME",),
    ),
    Case(
        "drafter of a server",
        f"eval {RUN} --target vllm:http://a:1/M?drafter=embedded",
        USAGE,
        ("this machine",),
    ),
    Case(
        "no tokens below none",
        f"eval {RUN} --target embedded?drafter=embedded&k=-1",
        USAGE,
        ("-1 is out of range", "0 to 32"),
    ),
    Case(
        "drafter that is not there",
        f"eval {RUN} {DRAFTED}",
        ENGINE,
        ("target's drafter", "drafter"),
    ),
    Case(
        "drafter that is not a model",
        f"eval {RUN} {DRAFTED}",
        ENGINE,
        ("target's drafter", "bert"),
        drafter("bert"),
    ),
    Case(
        "drafter of another tokenizer",
        f"eval {RUN} {DRAFTED}",
        USAGE,
        ("their tokenizers differ",),
        drafter("other"),
    ),
    Case(
        "drafter larger than memory",
        f"eval {RUN} {DRAFTED}",
        ENGINE,
        ("target's drafter", "GB of memory is free"),
        drafter("huge"),
    ),
    Case("missing model folder", "eval --draft hf:./none --limit 1", ENGINE, ("none",)),
    Case(
        "foreign model folder",
        "eval --draft hf:./bert --limit 1",
        ENGINE,
        ("bert",),
        text("bert/config.json", '{"model_type": "bert"}'),
    ),
    Case("server that is not there", "probe http://127.0.0.1:9 --wait 0", ENGINE, ("127.0.0.1:9",)),
    Case("bad TOML", f"eval {RUN}", USAGE, ("atts.toml", "line 1"), text("atts.toml", "rate = \n")),
    Case(
        "non-UTF-8 TOML",
        f"eval {RUN}",
        USAGE,
        ("atts.toml", "UTF-8"),
        text("atts.toml", b"draft = '\xe9'"),
    ),
    Case(
        "unknown key",
        f"eval {RUN}",
        USAGE,
        ("atts.toml", "'sample'", "'samples'"),
        text("atts.toml", "sample = 3"),
    ),
    Case(
        "unknown table",
        f"eval {RUN}",
        USAGE,
        ("'chunk.draft_tokens'", "'chunking.draft_tokens'"),
        text("atts.toml", "[chunk]\ndraft_tokens = 3"),
    ),
    Case(
        "key of another type",
        f"eval {RUN}",
        USAGE,
        ("samples", "atts.toml", "number"),
        text("atts.toml", "samples = 'many'\nmethod = 'atts'"),
    ),
    Case("no such configuration file", f"eval {RUN} --config none.toml", USAGE, ("none.toml",)),
    Case(
        "bad environment value",
        f"eval {RUN} --json",
        USAGE,
        ("ATTS_TURNS", "many"),
        nothing,
        {"ATTS_TURNS": "many"},
    ),
    Case(
        "unknown environment variable",
        f"eval {RUN}",
        USAGE,
        ("ATTS_RAET", "ATTS_RATE"),
        nothing,
        {"ATTS_RAET": "1"},
    ),
    Case("pair without a value", f"eval {RUN} --set rate", USAGE, ("KEY=VALUE",)),
    Case("no key like it", "config show zzz", USAGE, ("zzz",)),
    Case(
        "file where the run should go",
        f"eval {RUN} --out taken",
        DISK,
        ("taken",),
        text("taken", ""),
    ),
    Case(
        "directory of another run",
        "eval arithmetic[:3] --samples 4 --draft scripted --target scripted --report none --out "
        "runs/atts",
        USAGE,
        ("runs/atts", "samples", "4"),
    ),
    Case("truncated journal", "report runs/atts", DISK, ("journal.jsonl", "line 5"), damaged),
    Case("journal of a later version", "report runs/atts", DISK, ("manifest.json", "999"), newer),
    Case("not a run", "report empty", DISK, ("empty", "no run"), directory("empty")),
    Case(
        "comparison with no run",
        "compare runs/atts empty",
        DISK,
        ("empty", "no run"),
        directory("empty"),
    ),
    Case(
        "comparison of strangers",
        "compare runs/atts other.jsonl",
        USAGE,
        ("no problem in common",),
        text("other.jsonl", '{"id": "x", "correct": true}'),
    ),
    Case(
        "results that are none",
        "compare runs/atts other.jsonl",
        USAGE,
        ("other.jsonl", "line 1 is not JSON"),
        text("other.jsonl", "x"),
    ),
    Case(
        "agreement of none",
        f"eval {RUN} --set accept_when_agreeing=0",
        USAGE,
        ("accept_when_agreeing", "0.0"),
    ),
    Case(
        "sparing without a rate",
        f"eval {RUN} --method draft-only --set accept_when_agreeing=0.9",
        USAGE,
        ("accept_when_agreeing", "draft-only"),
    ),
    Case("promise without labels", f"eval {RUN} --abstain .1@.9", USAGE, ("abstain", "labelled")),
    Case(
        "promise that is none",
        f"eval {RUN} --abstain 10 --labelled runs/atts",
        USAGE,
        ("'10'", "0.1@0.9"),
    ),
    Case(
        "labels of no run",
        f"eval {RUN} --abstain .1 --labelled empty",
        DISK,
        ("empty", "no run"),
        directory("empty"),
    ),
    Case(
        "labels of too few problems",
        f"eval {RUN} --abstain .1 --labelled runs/atts",
        USAGE,
        ("abstain", "labelled problems"),
    ),
    Case(
        "comparison without an end",
        f"eval {RUN} --compare-to runs/atts",
        USAGE,
        ("--stop-when", "atts compare"),
    ),
    Case("end without a comparison", f"eval {RUN} --stop-when decided", USAGE, ("--compare-to",)),
    Case(
        "end that is none",
        f"eval {RUN} --compare-to runs/atts --stop-when soon",
        USAGE,
        ("'soon'", "decided=2"),
    ),
    Case(
        "margin that is none",
        f"eval {RUN} --compare-to runs/atts --stop-when decided=x",
        USAGE,
        ("'decided=x'", "decided=2"),
    ),
    Case(
        "margin below nothing",
        f"eval {RUN} --compare-to runs/atts --stop-when decided=-1",
        USAGE,
        ("decided=2",),
    ),
    Case(
        "decision against no run",
        f"eval {RUN} --compare-to empty --stop-when decided",
        DISK,
        ("empty", "no run"),
        directory("empty"),
    ),
    Case(
        "decision against strangers",
        f"eval {RUN} --compare-to other.jsonl --stop-when decided",
        USAGE,
        ("other.jsonl", "same problems"),
        text("other.jsonl", '{"id": "x", "correct": true}'),
    ),
    Case(
        "decision by a shard",
        f"eval {RUN} --compare-to runs/atts --stop-when decided --shard 1/2",
        USAGE,
        ("shard", "--stop-when"),
    ),
    Case(
        "points of nothing",
        "compare runs/atts runs/atts --points 2",
        USAGE,
        ("points", "--sequential"),
    ),
    Case(
        "points beyond all",
        "compare runs/atts runs/atts --sequential --points 101",
        USAGE,
        ("points", "[0, 100]"),
    ),
    Case("plan from nothing", "plan empty", DISK, ("empty", "no run"), directory("empty")),
    Case("cap of nothing", "plan runs/atts --seconds 0", USAGE, ("seconds", "positive")),
    Case("unknown format", "report runs/atts --format pdf", USAGE, ("pdf", "html")),
    Case("scores that are not there", f"eval {RUN} --scores none.jsonl", DISK, ("none.jsonl",)),
    Case(
        "NaN among scores",
        f"eval {RUN} --scores s.jsonl",
        USAGE,
        ("NaN",),
        text("s.jsonl", '{"score": NaN}\n'),
    ),
    Case(
        "NaN among scores to report on",
        "calibration report s.jsonl",
        USAGE,
        ("NaN",),
        text("s.jsonl", '{"score": NaN}\n'),
    ),
    Case(
        "no scores to report on",
        "calibration report s.jsonl",
        USAGE,
        ("s.jsonl", "at least one"),
        text("s.jsonl", ""),
    ),
    Case(
        "report on a picture",
        "calibration report s.npy",
        USAGE,
        ("s.npy", "numbers"),
        text("s.npy", b"\x89PNG\r\n"),
    ),
    Case(
        "report on no JSON",
        "calibration report s.jsonl",
        USAGE,
        ("s.jsonl", "line 1"),
        text("s.jsonl", "1.5 1.7\n"),
    ),
    Case(
        "report on a score below 1",
        "calibration report s.jsonl",
        USAGE,
        ("0.5",),
        text("s.jsonl", '{"score": 0.5}\n'),
    ),
    Case(
        "report on an empty directory",
        "calibration report empty",
        DISK,
        ("empty", "no run"),
        directory("empty"),
    ),
    Case(
        "label that is none",
        "calibration report s.jsonl",
        USAGE,
        ("correct of record 1", "'yes'", "true"),
        text("s.jsonl", '{"score": 2, "correct": "yes"}\n'),
    ),
    Case(
        "report at rate 2", f"calibration report {SCORES} --rate 2", USAGE, ("2", "[0, 1]"), SCORED
    ),
    Case(
        "report in an unknown mode",
        f"calibration report {SCORES} --rate-scope qestion",
        USAGE,
        ("'question'",),
        SCORED,
    ),
    Case(
        "questions that are not known",
        f"calibration report {SCORES} --rate-scope question",
        USAGE,
        ("mode", "do not name their questions", "aci"),
        SCORED,
    ),
    Case(
        "scores of an unknown scale",
        f"calibration report {SCORES} --scale ppl",
        USAGE,
        ("ppl", "perplexity"),
        SCORED,
    ),
    Case(
        "no whole questions",
        "calibration report s.npy --per-question 7",
        USAGE,
        ("per_question", "7"),
        an_array,
    ),
    Case(
        "report of an unknown format",
        f"calibration report {SCORES} --out a --format pdf",
        USAGE,
        ("'pdf'",),
        SCORED,
    ),
    Case(
        "report without a place",
        f"calibration report {SCORES} --format html",
        USAGE,
        ("--out", "file"),
        SCORED,
    ),
    Case(
        "figures without a folder",
        f"calibration report {SCORES} --format svg",
        USAGE,
        ("--out", "folder"),
        SCORED,
    ),
    Case(
        "figures on stdout",
        f"calibration report {SCORES} --format svg --out -",
        USAGE,
        ("folder",),
        SCORED,
    ),
    Case(
        "report into nowhere",
        f"calibration report {SCORES} --out none/a.html",
        DISK,
        ("none/a.html",),
        SCORED,
    ),
    Case(
        "figures into a file",
        f"calibration report {SCORES} --format svg --out s.jsonl",
        DISK,
        ("s.jsonl",),
        SCORED,
    ),
    Case(
        "damaged calibrator",
        "calibration report c.json",
        USAGE,
        ("c.json",),
        text("c.json", '{"kind": "atts calibrator"}'),
    ),
    Case(
        "sweep over nothing", f"sweep {RUN[:14]} --over rate", USAGE, ("--over", "rate=0.1,0.2,0.4")
    ),
    Case("sweep over no values", "sweep --over rate=,", USAGE, ("--over", "KEY=VALUE")),
    Case("sweep over an unknown key", "sweep --over raet=.1", USAGE, ("--over", "'rate'")),
    Case("sweep over an impossible value", "sweep --over rate=.1,2", USAGE, ("rate", "[0, 1]")),
    Case(
        "sweep over a word for a number",
        "sweep --over samples=many",
        USAGE,
        ("samples", "whole number"),
    ),
    Case(
        "sweep over what does not vary",
        "sweep --over dataset=a,b",
        USAGE,
        ("dataset", "cannot vary"),
    ),
    Case("sweep over a key twice", "sweep --over rate=.1 --over rate=.2", USAGE, ("rate", "twice")),
    Case(
        "sweep over what a flag sets",
        "sweep --over rate=.1 --rate .2",
        USAGE,
        ("--over", "rate", "flag"),
    ),
    Case("sweep over a broken list", "sweep --over draft=[a", USAGE, ("--over", "JSON list")),
    Case("sweep over an unknown method", "sweep --over method=atss", USAGE, ("atss", "'atts'")),
    Case(
        "sweep with an unknown engine",
        "sweep --over rate=.1 --draft vlm:x",
        USAGE,
        ("vlm", "'vllm'"),
    ),
    Case(
        "sweep of no dataset",
        "sweep mine.jsonl --draft scripted --target scripted",
        USAGE,
        ("mine.jsonl",),
    ),
    Case(
        "sweep onto a file",
        "sweep --draft scripted --out taken",
        DISK,
        ("taken",),
        text("taken", ""),
    ),
    Case(
        "sweep onto standard output",
        "sweep --draft scripted --out -",
        USAGE,
        ("--out", "directory"),
    ),
    Case(
        "sweep onto a run",
        "sweep --draft scripted --target scripted --out runs/atts",
        DISK,
        ("belongs to a single run",),
    ),
    Case(
        "sweep onto a damaged set",
        "sweep --draft scripted --target scripted --out set",
        DISK,
        ("sweep.json", "does not describe a sweep"),
        text("set/sweep.json", "{"),
    ),
    Case("following no run", "report nope --follow", DISK, ("nope", "no run")),
    Case(
        "following onto standard output",
        "report runs/atts --follow --out -",
        USAGE,
        ("--follow", "--out"),
    ),
    Case(
        "following in no time",
        "report runs/atts --follow --every 0",
        USAGE,
        ("--every", "--follow"),
    ),
    Case("a pace without following", "report runs/atts --every 5", USAGE, ("--every", "--follow")),
    Case("runs of no folder", "runs nope", DISK, ("nope", "no such folder")),
    Case("runs of a file", "runs taken", DISK, ("taken", "no such folder"), text("taken", "")),
    Case("runs of an unknown flag", "runs --jsno", USAGE, ("--jsno", "--json")),
    Case("zoo without a directory", "zoo show", USAGE, ("--zoo",)),
    Case("zoo that is none", "zoo show --zoo nope", ENGINE, ("nope", "not a zoo")),
    Case(
        "newer zoo",
        "zoo show --zoo zoo",
        ENGINE,
        ("newer", "Upgrade"),
        text("zoo/zoo.json", '{"schema": 9}'),
    ),
    Case(
        "damaged zoo",
        "zoo show --zoo zoo",
        ENGINE,
        ("zoo.json", "damaged"),
        text("zoo/zoo.json", "{"),
    ),
    Case("zoo of other things", "zoo add a empty --zoo .", USAGE, ("empty", "not a folder")),
    Case(
        "model of no name",
        "zoo add a/b empty --zoo zoo",
        USAGE,
        ("a/b", "name"),
        directory("empty"),
    ),
    Case(
        "zoo of no model", "zoo add a empty --zoo zoo", ENGINE, ("config.json",), directory("empty")
    ),
    Case("removal from no zoo", "zoo remove a --zoo nope", ENGINE, ("nope", "not a zoo")),
    Case("removal of no model", "zoo remove a --zoo zoo", ENGINE, ("'a'", "none"), a_zoo),
    Case("export of no model", "zoo export a out --zoo zoo", ENGINE, ("'a'", "none"), a_zoo),
    Case(
        "export onto a folder", "zoo export a zoo --zoo zoo", USAGE, ("zoo already exists",), a_zoo
    ),
    Case("comparison of no model", "zoo compare a --zoo zoo", ENGINE, ("'a'", "none"), a_zoo),
    Case(
        "loss of no zoo", f"eval {RUN} --target zoo:nope/a?lossy=.1", ENGINE, ("nope", "not a zoo")
    ),
    Case("engine of no zoo", f"eval {RUN} --target zoo:nope/a", ENGINE, ("nope", "not a zoo")),
    Case(
        "engine of no model of a zoo",
        f"eval {RUN} --target zoo:zoo/a",
        ENGINE,
        ("'a'", "none"),
        a_zoo,
    ),
    Case("engine of a zoo alone", f"eval {RUN} --target zoo:", USAGE, ("zoo:DIR/NAME",)),
    Case("grades of nothing", "grade answers.jsonl", USAGE, ("answers.jsonl",)),
    Case(
        "grades of no JSON",
        "grade answers.jsonl",
        USAGE,
        ("answers.jsonl", "line 1"),
        text("answers.jsonl", "x"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_named_with_a_remedy(
    case: Case, atts: Any, tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two lines on stderr name the problem and the remedy, stdout is empty, and the exit
    code is documented.
    """
    if "runs/" in case.words:
        request.getfixturevalue("runs")
    case.before(tmp_path)
    for name, value in case.variables.items():
        monkeypatch.setenv(name, value)
    said = atts(*case.words.split(" "))
    assert (said.code, said.out) == (case.code, "")
    assert case.code in EXIT_CODES
    # a busy machine may have printed progress before the error
    _, mark, message = said.err.rpartition("atts: ")
    assert mark
    assert len(message.splitlines()) <= 2
    assert len(message) < 600
    assert "Traceback" not in said.err
    assert all(words in message for words in case.says), message


def test_no_case_is_listed_twice() -> None:
    """The list has at least 30 cases, and no case occurs twice."""
    assert len({case.name for case in CASES}) == len(CASES) >= 30


def test_a_second_process_in_a_run_directory_is_refused(atts: Any, runs: Path) -> None:
    """If a second process uses a run directory, it is refused, and the message names the process
    that writes to the directory.
    """
    words = "eval arithmetic[:3] --samples 3 --draft scripted --target scripted --report none --out runs/atts"
    with locked(runs / "atts/lock", runs / "atts"):
        said = atts(*words.split(" "))
    assert said.code == DISK
    assert "another process" in said.err
    assert atts(*words.split(" ")).code == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--limit 2", "--limit: stored none, now 2"),
        ("--samples 5", "--samples: stored 3, now 5"),
        ("--rate 0.4", "--rate: stored 0.2, now 0.4"),
        ("--set sampling.temperature=0.9", "--set sampling.temperature: stored 0.7, now 0.9"),
        ("--method target-only", "--method: stored 'atts', now 'target-only'"),
        ("--max-tokens 90", "--max-tokens: stored 512, now 90"),
        ("--seed 3", "--seed: stored 0, now 3"),
        ("--shard 1/2", "shard: stored none, now '1/2'"),
    ],
)
def test_other_settings_are_refused_before_a_model_is_loaded(
    atts: Any, runs: Path, words: str, named: str
) -> None:
    """If a run directory has other settings, the command is refused before an engine is used. The
    error names the flags that the user typed.

    The engines in this test cannot be reached.
    """
    before = (runs / "atts/journal.jsonl").read_bytes()
    run = "eval arithmetic[:3] --samples 3 --report none --out runs/atts"
    dead = "--draft vllm:http://127.0.0.1:9/d --target vllm:http://127.0.0.1:9/t"
    said = atts(*run.split(), *dead.split(), *words.split())
    assert said.code == USAGE, said.err
    assert f"({named}). Name another directory" in said.err
    assert "going on" not in said.err
    assert (runs / "atts/journal.jsonl").read_bytes() == before


MISSING = (
    "report nope", "replay nope", "plan nope", "trace nope", "compare nope runs/atts", "compare runs/atts nope",
    "merge nope runs/atts --out union", "journal check nope", "journal salvage nope --out saved",
    "calibration check nope", "calibration check runs/atts --live nope", "calibration fit nope --out fitted.json",
    "calibration report nope", "calibration replay nope", "calibration import nope --out "
                                                          "scores.jsonl",
)  # fmt: skip


@pytest.mark.parametrize("words", MISSING)
def test_a_missing_run_has_one_exit_code(atts: Any, runs: Path, words: str) -> None:
    """Each command that reads a run exits with 4 and names the missing path."""
    said = atts(*[word.replace("runs/atts", str(runs / "atts")) for word in words.split()])
    assert (said.code, "nope" in said.err) == (4, True), said.err
