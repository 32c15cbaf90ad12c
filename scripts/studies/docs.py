"""Write the generated pages and pictures of docs/, and build and check the documentation site."""

from __future__ import annotations

import argparse
import ast
import html
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import typer
from typer.testing import CliRunner

import atts
from atts.api import CARDS, Pair, config_keys, gpu_placement, known_pairs, local_placement
from atts.api.pairs import run_tokens
from atts.cli.app import COMMANDS, EXIT_CODES, build
from atts.methods import PAPER_DEPARTURES, PRESETS
from atts.servers import compatibility_table
from tests.analysis.conftest import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "BENCHMARKS.md": "benchmarks/index.md",
}
"""Pages outside docs/, and their names on the site."""
HIDDEN = {"docs/modules.md"}
"""Pages for developers of atts; the site links to these pages in the repository."""
SEARCHED = ("rate", "vLLM", "resume", "AIME")
"""Words that the search index must contain, because a reader may look for them."""

_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write the generated pages of docs/, check them with --check, build the site, or make the
    pictures.
    """
    parser = argparse.ArgumentParser(prog="docs", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["pages", "site", "pictures"], default="pages")
    parser.add_argument(
        "--check", action="store_true", help="write no page; fail if a page is stale"
    )
    arguments = parser.parse_args()
    if arguments.what == "site":
        build_site()
        return
    if arguments.what == "pictures":
        make_pictures()
        return
    stale = [name for name, text in pages().items() if not _same(ROOT / "docs" / name, text)]
    if arguments.check and stale:
        sys.exit(f"docs: stale: {', '.join(stale)}; run ./scripts/docs")
    for name in stale:
        (ROOT / "docs" / name).write_text(pages()[name])
        print(f"docs: wrote docs/{name}", file=sys.stderr)


def build_site() -> None:
    """Gather the pages of the site and build it; fail on a dead link or a word that the search
    lacks.
    """
    gather(PAGES)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        sys.exit(f"docs: the site cannot be built:\n{built.stdout}{built.stderr}")
    problems = [*dead_links(SITE), *missing_words(SITE)]
    if problems:
        sys.exit("docs: the site has faults:\n" + "\n".join(problems))
    count = len(list(SITE.rglob("index.html")))
    print(f"docs: built {count} pages in {SITE.relative_to(ROOT)}", file=sys.stderr)


def pages() -> dict[str, str]:
    """Return every generated page by its file name."""
    return {"cli.md": cli_page(), "modules.md": module_page(), "gpus.md": gpu_page()}


_GPUS = """\
# Pairs on GPUs

This page is for people with GPUs who choose a pair. For every pair and card, the table shows whether both models fit in
one process, and how many rollouts the pair can process at once. `atts pairs --local` prints the table of the installed
version. `scripts/docs` computes this page with the functions by which an engine divides the memory when it opens. Nothing
on this page has been measured on a GPU yet.

The columns *draft* and *target* give each model's memory as weights + cache, in gigabytes, for bfloat16. Each engine
also reserves 1.5 GB, and atts leaves 8 % of a card's memory free for other programs. The column *at once* is the number
of complete rollouts that fit into the cache, at most 64. With two GPUs, the target is on the first and the draft on the
second. A pair needs servers if it is too large for two cards, or has 4-bit weights or a mixture of experts. The column
*with servers* is the number of cards that vLLM needs for the pair. An asterisk after this number means that the target
must then have FP8 weights.
`atts pairs PAIR --card CARD` prints the commands for vLLM.

| pair | tokens per rollout | card | fits on | draft | target | at once | with servers |
|---|---|---|---|---|---|---|---|"""


def gpu_page() -> str:
    """Return the page that lists which pairs fit on which GPUs."""
    rows = [
        gpu_row(pair, card)
        for pair in known_pairs().values()
        if pair.size("target").layers
        for card in CARDS
    ]
    return "\n".join([_GPUS, *rows, ""])


def gpu_row(pair: Pair, card: str) -> str:
    """Return the table's row for one pair on one kind of GPU."""
    max_tokens = int(str(pair.settings["max_tokens"]))
    placement = local_placement(pair, card, max_tokens)
    served = gpu_placement(pair, card, max_tokens)
    if served is None:
        servers = "more than 8"
    else:
        servers = f"{served.count}{'*' * served.is_quantized}"
    name = f"| {pair.name} | {run_tokens(max_tokens):,} | {card}, {CARDS[card]:g} GB"
    if placement is None:
        return f"{name} | servers | | | | {servers} |"
    parts = [
        f"{share.weights / 1e9:.1f} + {share.cache / 1e9:.1f}"
        for share in placement.shares.values()
    ]
    opens = "1 GPU" if placement.count == 1 else f"{placement.count} GPUs"
    return f"{name} | {opens} | {parts[0]} | {parts[1]} | {placement.rollouts} | {servers} |"


def module_page() -> str:
    """Return the page of modules, each with the first sentence of its docstring."""
    lines = ["# Module map", "", "Generated by `scripts/docs` from the modules' first lines.", ""]
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    for package, folder in tool["setuptools"]["package-dir"].items():
        lines += [f"## {folder}/", "", "| module | why it exists |", "|---|---|"]
        lines += [f"| `{name}` | {reason} |" for name, reason in _modules(package, folder)]
        lines.append("")
    return "\n".join(lines)


def cli_page() -> str:
    """Return the help of every command, as a terminal of 100 columns shows it."""
    lines = [
        "# Command line",
        "",
        "Generated by `scripts/docs` from the commands themselves.",
        "",
        _CONVENTIONS,
    ]
    lines += [*_exit_codes(), "", *_keys(), ""]
    for words in [[], *_commands()]:
        lines += [f"## atts {' '.join(words)}".rstrip(), "", "```", _help(words), "```", ""]
    return "\n".join(lines)


def configuration_page() -> str:
    """Return the page of configuration keys, which only the site has as a separate page."""
    opening = [
        "# Configuration keys",
        "",
        "This page lists every key of the configuration, for people who write an `atts.toml`, set `ATTS_*`",
        "variables or pass `--set KEY=VALUE`. `atts config show` prints the values in force.",
        "",
    ]
    return "\n".join([*opening, *_keys(), ""]).replace("## Configuration\n\n", "")


def without_configuration(text: str) -> str:
    """Return the page of commands, in which a link replaces the table of configuration keys."""
    before, heading, rest = text.partition("## Configuration\n")
    _, mark, commands = rest.partition("\n## atts\n")
    link = (
        "\nThe keys, their defaults and variables are on a [page of their own](configuration.md).\n"
    )
    return f"{before}{heading}{link}{mark}{commands}"


_CONVENTIONS = """\
Results go to stdout, messages to stderr; `--json` prints one JSON object per line; `-` is stdin. Without a terminal,
or with `NO_COLOR` set, there are no colours. An error is one line that says what is wrong and what to do; the exit code
is one of the codes below.

Completion of commands and options: `atts --install-completion` (bash, zsh, fish, PowerShell), once; it takes effect in
the next shell. `atts --show-completion` only prints the script.
"""


_CONFIGURATION = """\
## Configuration

Every command that runs something takes its settings from defaults < `atts.toml` (or `--config FILE`, or `ATTS_CONFIG`)
< `ATTS_*` variables < flags; `--set KEY=VALUE` is a flag for any key. Unknown keys are errors. `atts config show`
prints each value and its origin; a run stores both in its `manifest.json`. In Python: `atts.configure({...}).setup()`.

```toml
dataset = "math500[:50]"
rate = 0.2
samples = 16
[sampling]
temperature = 0.6
```

| key | default | variable | what it means |
|---|---|---|---|"""


def _exit_codes() -> Iterator[str]:
    """Yield the lines of the table of exit codes."""
    yield from ("## Exit codes", "", "| code | meaning |", "|---|---|")
    for code, meaning in EXIT_CODES.items():
        words = meaning.replace("|", "\\|")
        yield f"| {code} | {words} |"


def _keys() -> Iterator[str]:
    """Yield the lines of the table of configuration keys."""
    yield _CONFIGURATION
    for key in config_keys().values():
        words = f"{key.help} ({', '.join(key.choices)})" if key.choices else key.help
        yield f"| `{key.name}` | {_default(key.default)} | `{key.variable}` | {words} |"


def _default(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, str) and not value.isprintable():
        value = json.dumps(value)
    return f"`{value}`"


def _commands() -> Iterator[list[str]]:
    for name, entry in sorted(COMMANDS.items()):
        yield [name]
        code = getattr(importlib.import_module(entry.module), entry.attribute)
        if isinstance(code, typer.Typer):
            for command in code.registered_commands:
                yield [
                    name,
                    command.name
                    or str(getattr(command.callback, "__name__", "")).replace("_", "-"),
                ]


def _help(words: list[str]) -> str:
    quiet = {
        "TERM": "dumb",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "_TYPER_FORCE_DISABLE_TERMINAL": "1",
    }
    result = CliRunner().invoke(
        build(words), [*words, "--help"], prog_name="atts", env={**os.environ, **quiet}
    )
    if result.exit_code:
        sys.exit(f"docs: atts {' '.join(words)} --help failed: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip("\n").splitlines())


def _modules(package: str, folder: str) -> Iterator[tuple[str, str]]:
    tracked = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for line in sorted(tracked.split()):
        path = ROOT / line
        if path.suffix == ".py" and path.exists():
            inner = path.relative_to(ROOT / folder).with_suffix("")
            name = ".".join([package, *(part for part in inner.parts if part != "__init__")])
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            yield name, " ".join(text.split("\n\n")[0].split())


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def gather(folder: Path) -> None:
    """Write every page of the site, and the files that pages show, into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for source, name in sources().items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            target.write_text(site_text(source, (ROOT / source).read_text()))
        else:
            shutil.copyfile(ROOT / source, target)
    for name, text in generated_pages().items():
        (folder / name).write_text(text)


def sources() -> dict[str, str]:
    """Return every tracked file that belongs to the site, with its name on the site."""
    command = ["git", "ls-files", "docs", *MOVED]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        name: MOVED.get(name, name.removeprefix("docs/"))
        for name in tracked.split()
        if name not in HIDDEN
    }


def site_text(source: str, text: str) -> str:
    """Return a page with its links rewritten for the site.

    A link to a page of the site becomes that page's address on the site; a link to any other file
    becomes its address in the repository.
    """
    if source == "docs/cli.md":
        text = without_configuration(text)
    names = sources()
    folder = Path(names[source]).parent

    def new_link(match: re.Match[str]) -> str:
        link = match[0]
        if urlsplit(link).scheme or link.startswith("#"):
            return link
        path, mark, heading = link.partition("#")
        file = os.path.normpath(Path(source).parent / path)
        if file in names:
            return f"{os.path.relpath(names[file], folder)}{mark}{heading}"
        return f"{repository()}/blob/main/{file}{mark}{heading}"

    parts = list[str]()
    end = 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(new_link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    parts.append(_LINK.sub(new_link, text[end:]))
    return "".join(parts)


def repository() -> str:
    """Return the address of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["urls"]["Repository"])


def generated_pages() -> dict[str, str]:
    """Return the pages that exist on the site only, by name."""
    return {
        "configuration.md": configuration_page(),
        "python.md": python_page(),
        "methods.md": methods_page(),
        "versions.md": versions_page(),
        "citation.md": citation_page(),
    }


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Solve and evaluate": ("solve", "evaluate", "Session", "Setup", "Policy", "configure"),
    "Choose settings": ("pilot", "sweep", "plan", "replay", "calibrate"),
    "Read runs": ("report", "compare", "merge", "trace"),
    "Without an event loop": ("SyncSession",),
    "Results": ("RunResult", "Outcome", "Rollout", "Decision", "Problem"),
    "Engines": (
        "Engine",
        "EngineSpec",
        "SampleRequest",
        "ScoreRequest",
        "Completion",
        "Scores",
        "Sampling",
        "Seed",
    ),
    "Errors": ("ATTSError",),
}
"""Public names in reading order, by section."""

TWINS = ("solve_sync", "evaluate_sync", "calibrate_sync", "pilot_sync", "sweep_sync")
"""Public names derived from another name, with the same signature and documentation."""


def python_page() -> str:
    """Return the reference page of all public names, with signatures and documentation from the
    code.
    """
    lines = [
        "# Python API",
        "",
        "This page has the signature of every public name of `import atts`, for people who write",
        "programs. [Embed atts in a program](api.md) shows them at work; begin with",
        "`python -c 'import atts; help(atts.solve)'`.",
        "",
    ]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        if title == "Without an event loop":
            twins = ", ".join(f"`{name}`" for name in TWINS)
            lines += [
                f"{twins} take the arguments of the functions of the same name, and block until the result is there.",
                "",
            ]
        for name in names:
            public = getattr(atts, name)
            lines += [f"::: {public.__module__}.{public.__qualname__}", ""]
    return "\n".join([*lines, *_error_tree()])


def _error_tree() -> Iterator[str]:
    """Yield the lines of a table of every error, with its exit code."""
    yield from ("| error | exit code | raised when |", "|---|---|---|")
    for error in _subclasses(atts.ATTSError):
        first = (error.__doc__ or "").strip().split("\n")[0]
        yield f"| `{error.__module__}.{error.__qualname__}` | {error.exit_code} | {first} |"
    yield ""


def _subclasses(error: type[atts.ATTSError]) -> list[type[atts.ATTSError]]:
    """Return the subclasses of an error class in atts.errors, in the order of the module."""
    module = importlib.import_module("atts.errors")
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, error) and kind is not error
    ]


def methods_page() -> str:
    """Return a page with a table of all methods, and with the differences between the methods
    `paper-marginal` and `paper-conditional` and the paper's published code.
    """
    lines = [
        "# Methods at a glance",
        "",
        "This page lists every method, for people who compare them. `atts eval DATASET --method NAME`",
        "runs one; [Methods and their settings](pipelines.md) explains what can be set.",
        "",
        "| method | what it does | settings that differ from the defaults |",
        "|---|---|---|",
    ]
    for preset in PRESETS:
        changed = ", ".join(f"`{key}`" for key in preset.changes) or "none"
        lines.append(f"| `{preset.name}` | {preset.what} | {changed} |")
    lines += [
        "",
        "`paper-marginal` and `paper-conditional` differ from the paper's release as follows:",
        "",
    ]
    lines += [f"- {departure}" for departure in PAPER_DEPARTURES]
    return "\n".join([*lines, ""])


def versions_page() -> str:
    """Return the table of the features that each version of vLLM has for atts."""
    lines = [
        "# Server versions",
        "",
        "This page lists the features of each version of vLLM, for people who start servers. The commands",
        "for one version are printed by `atts pairs PAIR --card CARD --server-version VERSION`, and",
        "`atts doctor` checks a running server. [Servers](servers.md) has the other servers.",
        "",
    ]
    return "\n".join([*lines, *compatibility_table(), ""])


def citation_page() -> str:
    """Return the page on how to cite the method and this implementation."""
    text = (ROOT / "CITATION.cff").read_text()
    lines = [
        "# Citation",
        "",
        "This page is for people who publish numbers made with atts. Cite the paper for the method, and",
        "this implementation by its version, which `atts --version` prints and every report states.",
        "",
        "```yaml",
        text.rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def dead_links(site: Path) -> Iterator[str]:
    """Yield every link of the built site that leads to a missing page or heading."""
    anchors = dict[Path, set[str]]()
    pages = sorted(site.rglob("*.html"))
    texts = {page: page.read_text() for page in pages}
    for page, text in texts.items():
        anchors[page] = {html.unescape(name) for name in re.findall(r'\bid="([^"]+)"', text)}
    for page, text in texts.items():
        if page.name == "404.html":
            # the 404 page has links that begin at the server's root
            continue
        for link in sorted(set(re.findall(r'\b(?:href|src)="([^"]+)"', text))):
            address = urlsplit(html.unescape(link))
            if address.scheme or address.netloc:
                continue
            target = page
            if address.path:
                target = Path(os.path.normpath(page.parent / unquote(address.path)))
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{page.relative_to(site)}: no page at {link}"
            elif address.fragment and unquote(address.fragment) not in anchors.get(target, set()):
                yield f"{page.relative_to(site)}: no heading at {link}"


def missing_words(site: Path) -> Iterator[str]:
    """Yield the words of SEARCHED that the search index lacks."""
    index = json.dumps(json.loads((site / "search.json").read_text())).lower()
    for word in SEARCHED:
        if word.lower() not in index:
            yield f"search.json: the search index lacks {word!r}"


def fenced(text: str) -> str:
    """Put each block that begins with `>>> ` between code fences."""
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```", text)


PICTURES = ROOT / "docs" / "pictures"
EVAL = "eval arithmetic --limit 24 --samples 8 --report none --out runs/long"
KILL_AT = 3500
"""Number of journal lines after which the recorded run is killed."""
LIVE = "eval arithmetic --limit 400 --samples 8 --report none --out runs/live"
LIVE_AT = 4000
"""Number of journal lines of the run after which the picture of the live page is taken."""
PICTURED_PAGES = {
    "report.png": "runs/first/report.html",
    "calibration.png": "calibration.html",
    "sweep.png": "runs/sweep/sweep.html",
}
PICTURED_COMMANDS = (
    "eval arithmetic --limit 24 --samples 8 --report none --out runs/first",
    "eval arithmetic --limit 24 --samples 8 --report none --method target-only --out runs/target-only",
    "report runs/first --compare-to runs/target-only",
    "calibration report runs/first --out calibration.html",
    "sweep arithmetic[:16] --over samples=2,4,8 --over rate=0.1,0.3 --out runs/sweep",
)


def make_pictures() -> None:
    """Make every picture from runs of the embedded models in a temporary folder."""
    program = os.environ.get("ATTS_CHROMIUM") or shutil.which("chromium")
    if program is None:
        sys.exit("pictures: chromium not found; install it, or set ATTS_CHROMIUM to its path")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (PICTURES / "resume.svg").write_text(drawn(recorded(folder)))
        for words in PICTURED_COMMANDS:
            _run_atts(words, folder)
        with Browser(program, folder / "profile") as browser:
            page = browser.page()
            page.look(1100, 760, "light")
            for picture, path in PICTURED_PAGES.items():
                page.open((folder / path).as_uri())
                page.picture(PICTURES / picture)
            live(page, folder)
    for made in sorted(PICTURES.iterdir()):
        print(f"pictures: {made.relative_to(ROOT)}, {made.stat().st_size / 1024:.0f} KiB")


def _atts_command(words: str) -> list[str]:
    return [sys.executable, "-m", "atts", *shlex.split(words)]


def _quiet_environment() -> dict[str, str]:
    quiet = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def _run_atts(words: str, folder: Path) -> str:
    """Run a command of atts and return its output."""
    done = subprocess.run(
        _atts_command(words),
        cwd=folder,
        env=_quiet_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"pictures: atts {words} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def live(page: Page, folder: Path) -> None:
    """Take the picture of `atts view` in the middle of a run."""
    journal = folder / "runs" / "live" / "journal.jsonl"
    with _started_atts(LIVE, folder) as running:
        while running.poll() is None and _count_lines(journal) < LIVE_AT:
            time.sleep(0.02)
        with _started_atts("view runs/live --port 0", folder) as viewer:
            assert viewer.stdout is not None, "the output is piped"
            page.open(viewer.stdout.readline().split()[-1])
            page.wait("!document.querySelector('main').hidden")
            page.picture(PICTURES / "live.png")
        if running.poll() is not None:
            sys.exit("pictures: the live run ended before its picture was taken")


@contextmanager
def _started_atts(words: str, folder: Path) -> Generator[subprocess.Popen[str]]:
    """Run a command of atts in the background, and kill it at the end."""
    with subprocess.Popen(
        _atts_command(words),
        cwd=folder,
        env=_quiet_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a recorded terminal, and the second at which the line appears."""

    text: str
    second: float
    is_typed: bool = False


def recorded(folder: Path) -> list[Line]:
    """Record a terminal in which an evaluation is killed in the middle and then resumed."""
    lines = [Line(f"$ atts {EVAL}", 0.0, is_typed=True)]
    journal = folder / "runs" / "long" / "journal.jsonl"
    # The recording leaves out the output of the killed process, because this output never reached a
    # terminal.
    running = subprocess.Popen(
        _atts_command(EVAL),
        cwd=folder,
        env=_quiet_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while running.poll() is None and _count_lines(journal) < KILL_AT:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    if running.wait() != -signal.SIGKILL:
        sys.exit("pictures: the run ended before it could be killed")
    lines.append(Line("Killed                      (kill -9 from another terminal)", 2.5))
    lines += _shown_output("runs runs", folder, 4.0)
    lines += _shown_output(EVAL, folder, 7.0)
    lines += _shown_output("journal check runs/long", folder, 11.0)
    return lines


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _shown_output(words: str, folder: Path, second: float) -> list[Line]:
    """Run a command, and return the command and its output as lines; in the recording, the output
    appears one second after the command.
    """
    printed = [line.rstrip() for line in _run_atts(words, folder).splitlines()]
    kept = [line for line in printed if line and not line.startswith(("loading", "ended;"))]
    typed = Line(f"$ atts {words}", second, is_typed=True)
    return [typed, *(Line(line, second + 1.0) for line in kept)]


_WIDTH = 100
_STEP = 17
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#d8dee6;white-space:pre}"
    ".typed{fill:#8fd18f}.line{opacity:0;animation:show .01s linear forwards}"
    "@keyframes show{to{opacity:1}}"
    "@media (prefers-reduced-motion:reduce){.line{animation-delay:0s!important}}"
)


def drawn(lines: Sequence[Line]) -> str:
    """Draw a recorded terminal as an SVG file whose lines appear one after the other."""
    rows = list[str]()
    for number, line in enumerate(lines):
        text = line.text if len(line.text) <= _WIDTH else line.text[: _WIDTH - 1] + "…"
        kind = "line typed" if line.is_typed else "line"
        rows.append(
            f'<text class="{kind}" style="animation-delay:{line.second:g}s" x="16" '
            f'y="{28 + _STEP * number}">{escape(text)}</text>'
        )
    height = 28 + _STEP * len(lines) + 8
    label = "A terminal: an evaluation is killed, and the same command resumes it"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        f'aria-label="{label}"><style>{_STYLE}</style>'
        f'<rect width="760" height="{height}" rx="6" fill="#1b1f24"/>{"".join(rows)}</svg>\n'
    )


if __name__ == "__main__":
    main()
