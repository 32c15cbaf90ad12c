"""Tests that pages, docstrings and comments follow those rules of plain prose that can be checked."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from scripts.studies import result_pages
from scripts.studies.docs import sources

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parents[2]
NOT_WRITTEN = {"docs/cli.md", "docs/gpus.md", "docs/grading_policies.md"}

RULES = {
    r"(?<!stand )\bbeside\b": "compared with, next to, or in addition to",
    r"\banew\b": "again",
    r"\bwhoever\b|\bnobody\b": "name the person",
    r"\bstood\b": "was",
    r"\bow(?:es|ed)\b": "deficit",
    r"\bspare[sd]?\b": "cancel, skip or save",
    r"\bgo(?:es)? on\b|\bwent on\b": "continue or resume",
    r"\btold\b": "reported or passed",
    r"\b[Ll]aws?\b": "distribution",
    r"(?<![\w.\]\[*\\/:-])\.\d": "a zero before the point",
    r"\d%": "a space before the percent sign",
    r"(?<![\w.,/-])1 (?:problems|rollouts|samples|chunks|questions|runs|records)\b": "a singular",
    r"(?<!\w)-0 %": "0 %",
    r"(?<!there )(?<!There )\b(?:is|are) no (?:part|number|name|fault|setting|score|model|zoo)s?\b": (
        "is not a ..."
    ),
}
"""Words and forms that no page may have, each with its replacement."""

EXCEPTIONS: dict[str, set[str]] = {
    "docs/grading.md": {r"\d%", r"(?<![\w.\]\[*\\/:-])\.\d"},  # answers as models write them
}
"""Rules that a page may break, with the reason."""


def prose(text: str) -> str:
    """Return a page's text without code, addresses of links and comments."""
    text = result_pages.MARK.sub("", text)  # a study's text changes when the study runs again
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"^    .*$", "", text, flags=re.M)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+", "", text)


def faults(text: str, allowed: Collection[str] = ()) -> list[str]:
    """Return every place where a text breaks a rule, with what to write instead."""
    plain = prose(text)
    return [
        f"{plain[max(0, match.start() - 40) : match.end() + 30]!r}: write {instead}"
        for rule, instead in RULES.items()
        if rule not in allowed
        for match in re.finditer(rule, plain)
    ]


@pytest.mark.parametrize(
    "name",
    sorted(name for name in sources() if name.endswith(".md") and name not in NOT_WRITTEN),
)
def test_a_page_keeps_the_rules(name: str) -> None:
    """The page has no restricted word, and writes decimals, percentages and singulars correctly."""
    found = faults((ROOT / name).read_text(), EXCEPTIONS.get(name, set()))
    assert found == [], "\n".join(found)


def test_a_fault_is_reported_and_code_is_not_read() -> None:
    """Each rule finds its word or form in prose; code blocks, inline code and addresses are not
    checked.
    """
    assert len(faults("It stood beside 5% of .5, anew.")) == 5
    assert faults("`beside` [x](anew.md)\n\n```\n5% of .5\n```\n") == []
    assert faults("Output:\n\n    5% of .5\n\nThis is read, anew.\n") != []
    assert faults("Output:\n\n    5% of .5\n") == []


CODE = ("atts", "calibration", "evaluators", "pipelines", "examples", "scripts/studies", "tests")

VERBS = set(
    """
    accept add admit advise alarm align allocate allow analyse answer append apply arrange ask attend audit
    be begin believe bet bound break bring build
    call cancel capture carry catch certify change charge check choose close combine compare
    compile complete compute configure connect continue convert copy count create cut
    deal decide delete describe discard divide do draft draw drop
    earn edit end escalate escape estimate evaluate evict exchange exempt extend
    fail feed fill find fit fix flush forget fork free
    gather generate give grade grant group guess
    halve hand handle hash have hear hide hold
    identify ignore import index insert install interrupt iterate
    join judge
    keep kill
    learn leave let list listen load lock log look
    make mark measure merge move
    name note number
    open order
    pack pair parse pass pause pick pickle place plan plant play poll prepare press prevent print propose protect put
    queue
    raise rank read rebuild receive record refuse register release remember remove render reorder
    repeat replace replay report request reserve restore return rotate round run
    sample save say score see send serve set shift shorten show shrink simulate skip sleep solve spend
    split spoil stand start state step stop store submit suggest sum summarise swap sync
    tabulate take tell test time toss train truncate try turn
    undo use
    update validate verify
    wait wake walk watch work write
    yield
    """.split()
)
"""Verbs that a function's docstring may begin with. Add the one that you need."""

STATED = {"atts/testing/conformance.py": "a report prints the sentence of a check: what holds"}
"""Files whose functions state a fact as tests do, each with the reason."""

HEADLESS = r"(?:What|Whatever|Which|Whichever|Who|Whose|Whoever|How|Whether|Of|By(?! default))\b"
"""Beginnings of texts that lack a noun or a verb of their own."""

CODE_EXCEPTIONS: dict[str, set[str]] = {
    # this file lists the restricted words and plants them in tests
    "tests/docs/test_prose.py": set(RULES),
    # these files use a class named `Law`
    **dict.fromkeys(
        (
            "scripts/studies/calibration.py",
            "scripts/studies/modelled.py",
            "scripts/studies/speculation.py",
            "scripts/studies/servers.py",
            "tests/studies/test_scale.py",
        ),
        {r"\b[Ll]aws?\b"},
    ),
}
"""Rules that the comments and docstrings of a file may break, with the reason."""


def python_files(folder: str) -> Iterator[Path]:
    """Yield the Python files below a folder of the checkout, without following links."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not any(parent.is_symlink() for parent in (path, *path.parents)):
            yield path


def opening_faults(path: Path) -> Iterator[str]:
    """Yield each docstring in a file that does not begin with the verb or noun that functions,
    classes or modules need.
    """
    name = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        place = f"{name}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]!r}"
        is_function = not isinstance(node, ast.Module | ast.ClassDef)
        is_statement = name in STATED or getattr(node, "name", "").startswith("test_")
        if is_function and not is_statement:
            verb = re.split(r"\W", text, maxsplit=1)[0].lower()
            if verb not in VERBS:
                yield f"{place}: begin with a verb (or add it to VERBS)"
        elif re.match(HEADLESS, text):
            yield f"{place}: begin with a noun that has a name"
        if isinstance(node, ast.Module) and re.search(r"[.?!]\s+[A-Z]", text.split("\n\n")[0]):
            yield f"{place}: say in one sentence what the module is"


def remarks(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a file with their lines, without examples of code."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        is_docstring = token.line.lstrip().startswith(('"""', 'r"""'))
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and is_docstring):
            text = re.sub(r"^\s*(?:>>>|\.\.\.|Example:).*$", "", token.string, flags=re.M)
            text = re.sub(r"`[^`]*`|\"[^\"\n]*\"", "", text.strip('r"'))
            # Indentation is removed, because the rules read indented lines as the output of a
            # command.
            yield token.start[0], re.sub(r"^\s+", "", text, flags=re.M)


def dangling_comments(path: Path) -> Iterator[str]:
    """Yield the comments that begin with "of": they lack the noun that they are about."""
    last = 0  # line number of the latest comment that has a line to itself
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        row = token.start[0]
        is_alone = token.line.lstrip().startswith("#")
        if token.string.startswith("# of ") and not (is_alone and last == row - 1):
            yield f"{path.name}:{row}: {token.string}: begin with the noun"
        if is_alone:
            last = row


@pytest.mark.parametrize("folder", CODE)
def test_comments_begin_with_a_noun(folder: str) -> None:
    """No comment begins with "of", as "seconds: float  # of a step" would."""
    found = [fault for path in python_files(folder) for fault in dangling_comments(path)]
    assert found == [], "\n".join(found)


def test_a_dangling_comment_is_reported(tmp_path: Path) -> None:
    """The check reports a comment that begins with "of", but not a line "of ..." that continues a
    comment.
    """
    file = tmp_path / "module.py"
    file.write_text(
        "a = 1  # of a step\n# seconds\n# of a step\nb = 2  # share of a step\n# of c\n"
    )
    assert [fault.split(":")[1] for fault in dangling_comments(file)] == ["1", "5"]


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_begin_as_they_should(folder: str) -> None:
    """Functions begin with a verb, classes and modules with a noun, tests with a statement."""
    found = [fault for path in python_files(folder) for fault in opening_faults(path)]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("folder", CODE)
def test_comments_and_docstrings_keep_the_rules(folder: str) -> None:
    """Comments and docstrings have no restricted word, and write decimals, percentages and
    singulars correctly.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in python_files(folder)
        for line, text in remarks(path)
        for fault in faults(text, CODE_EXCEPTIONS.get(path.relative_to(ROOT).as_posix(), set()))
    ]
    assert found == [], "\n".join(found)


def test_a_headless_docstring_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reports each kind of faulty docstring, and accepts the correct docstrings next to
    them.
    """
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(
        '"""A module. It has two sentences."""\n'
        'class Bad:\n    """What a thing is."""\n'
        'class Good:\n    """A thing."""\n'
        'def bad():\n    """The number of things."""\n'
        'def good():\n    """Return the number of things."""\n'
        'def test_bad():\n    """By its name."""\n'
        'def test_good():\n    """Its name is in the message."""\n'
        "# told beside\n"
    )
    faulty = [fault.split(": ")[1] for fault in opening_faults(file)]
    assert faulty == ["module", "Bad", "bad", "test_bad"]
    assert [len(faults(text)) for _, text in remarks(file)] == [0] * 7 + [2]
