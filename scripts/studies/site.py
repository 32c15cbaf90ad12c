"""Gather the pages of the documentation site, and check the built site's links and search index."""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import atts
from atts.methods import PAPER_DEPARTURES, PRESETS
from atts.servers import compatibility_table
from scripts.studies.pages import configuration_page, without_configuration

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
"""Pages for people who change the code: the site links to them in the repository."""
SEARCHED = ("rate", "vLLM", "resume", "AIME")
"""Words that a reader looks for, which the search index must have."""

_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Gather the pages and build the site."""
    argparse.ArgumentParser(prog="docs site", description=__doc__).parse_args()
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


def gather(folder: Path) -> None:
    """Write every page of the site, and the files that pages show, to an empty folder."""
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
    """Return the name on the site of every tracked file that belongs to it."""
    command = ["git", "ls-files", "docs", *MOVED]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        name: MOVED.get(name, name.removeprefix("docs/"))
        for name in tracked.split()
        if name not in HIDDEN
    }


def site_text(source: str, text: str) -> str:
    """Return a page with its links as the site needs them.

    Links between pages follow the pages to their places on the site. A link to any other file of
    the repository leads to the repository.
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
    """Return the pages that exist on the site only, by their names."""
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
"""The public names in the order in which a reader meets them."""

TWINS = ("solve_sync", "evaluate_sync", "calibrate_sync", "pilot_sync", "sweep_sync")
"""Public names that are made from another one, whose signature and documentation they share."""


def python_page() -> str:
    """Return the reference of every public name, its signature and documentation from the code."""
    lines = [
        "# Python API",
        "",
        "This page has the signature of every name that `import atts` gives, for people who write",
        "programs. [Embed atts in a program](api.md) shows them at work; begin with",
        "`python -c 'import atts; help(atts.solve)'`.",
        "",
    ]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        if title == "Without an event loop":
            twins = ", ".join(f"`{name}`" for name in TWINS)
            lines += [
                f"{twins} take the arguments of the functions whose names they carry, and wait.",
                "",
            ]
        for name in names:
            public = getattr(atts, name)
            lines += [f"::: {public.__module__}.{public.__qualname__}", ""]
    return "\n".join([*lines, *_error_tree()])


def _error_tree() -> Iterator[str]:
    """Yield a table of every error, with its exit code."""
    yield from ("| error | exit code | raised when |", "|---|---|---|")
    for error in _subclasses(atts.ATTSError):
        first = (error.__doc__ or "").strip().split("\n")[0]
        yield f"| `{error.__module__}.{error.__qualname__}` | {error.exit_code} | {first} |"
    yield ""


def _subclasses(error: type[atts.ATTSError]) -> list[type[atts.ATTSError]]:
    """Return the error classes of atts.errors below one, in the order of the module."""
    module = import_module("atts.errors")
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, error) and kind is not error
    ]


def methods_page() -> str:
    """Return the table of methods, and what the paper's two do differently from its release."""
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
    lines += ["", "`paper-marginal` and `paper-conditional` depart from the paper's release:", ""]
    lines += [f"- {departure}" for departure in PAPER_DEPARTURES]
    return "\n".join([*lines, ""])


def versions_page() -> str:
    """Return the table of what each version of vLLM can do for atts."""
    lines = [
        "# Server versions",
        "",
        "This page says which version of vLLM can do what, for people who start servers. The commands",
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
    """Yield every link within the built site that leads to no page or to no heading."""
    anchors = dict[Path, set[str]]()
    pages = sorted(site.rglob("*.html"))
    texts = {page: page.read_text() for page in pages}
    for page, text in texts.items():
        anchors[page] = {html.unescape(name) for name in re.findall(r'\bid="([^"]+)"', text)}
    for page, text in texts.items():
        if page.name == "404.html":
            continue  # its links begin at the server's root
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
    """Yield the words of SEARCHED that the search index does not have."""
    index = json.dumps(json.loads((site / "search.json").read_text())).lower()
    for word in SEARCHED:
        if word.lower() not in index:
            yield f"search.json: the search does not know {word!r}"


if __name__ == "__main__":
    main()
