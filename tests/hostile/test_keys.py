"""Tests of API keys: a key in place of a variable's name is refused, and no key is ever printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from atts.cli.app import run
from atts.errors import OptionError
from atts.servers import ApiKey

KEYS = (
    "openai:https://h/v1/m?key=sk-canary1234567890abcdef", "vllm:http://h/m?key=hf_canaryCANARYcanary",
    "chat:http://h/v1/m?key=canary", "sglang:http://h,http://h:2/m?key=CANARY1X2Y3Z4W5Q6",
    "ray:openai:http://h/v1/m?key=k-canary/+==", "server:http://h?key=canary%0Acanary", "ollama:http://h?key=canary\x1b[3m",
)  # fmt: skip


@pytest.mark.parametrize("engine", KEYS)
def test_a_key_in_place_of_a_variable_name_is_refused_unprinted(
    engine: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the user gives a key instead of a variable's name, atts refuses it before a run begins. No
    output contains the key, even if it looks like a variable's name.
    """
    monkeypatch.chdir(tmp_path)
    for words in (["--dry-run"], ["--out", "run"])[: 2 if engine == KEYS[0] else 1]:
        assert run(["eval", "arithmetic[:1]", "--target", engine, *words]) == 2
        said = "".join(capfd.readouterr())
        assert "canary" not in said.lower()
        assert "looks like a key (not shown)" in said or "is not a URL" in said
    assert not list(tmp_path.iterdir())


def test_a_variable_that_is_not_set_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the variable that the user names for the API key is not set, the error names the variable.

    Its name may also be in lower case. If the default variable is not set, the key is empty.
    """
    monkeypatch.delenv("ATTS_API_KEY", raising=False)
    assert ApiKey().read() == ""
    with pytest.raises(OptionError, match="MY_KEY is not set"):
        ApiKey("MY_KEY").read()
    monkeypatch.setenv("my_key", "secret")
    assert ApiKey("my_key").read() == "secret"
    (tmp_path / "key").write_text("\n")
    with pytest.raises(OptionError, match="is empty"):
        ApiKey(file=tmp_path / "key").read()


@pytest.mark.parametrize("key", ["two words", "line\nline", "bell\x07", "naïve", "nul\x00"])
def test_a_key_that_no_header_can_hold_is_refused(key: str, tmp_path: Path) -> None:
    """A key that no HTTP header can contain is refused, and the message does not contain the key."""
    (tmp_path / "key").write_text(key, encoding="utf-8")
    with pytest.raises(OptionError, match="contains a space, a control character") as refused:
        ApiKey(file=tmp_path / "key").read()
    assert key not in str(refused.value)


URLS = (
    "http://[::1",
    "http://[::1]:x/m",
    "http://h:99999",
    "http://h:0/m",
    "http://",
    "http://h/a b",
    "http://h/\x1b[31m",
    "//h",
    "ftp://h",
)


@pytest.mark.parametrize("url", URLS)
def test_an_invalid_url_is_refused_before_a_request(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An invalid URL is refused before a request, and the message shows the URL without its control
    codes.
    """
    for command in (["probe", url], ["eval", "arithmetic[:1]", "--draft", f"vllm:{url}"])[
        : 2 if url == URLS[0] else 1
    ]:
        assert run(command) == 2
        said = capfd.readouterr().err
        assert "URL" in said
        assert "\x1b" not in said
