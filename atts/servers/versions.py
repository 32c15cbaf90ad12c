"""Versions of vLLM: what each can do for a run, and the flags with which it is started for one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atts.errors import OptionError

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VllmFeature:
    """Something that vLLM can do from one version on."""

    since: Version
    flag: str  # "": no flag asks for it
    does: str
    without: str  # what a run on an older version is without it


FEATURES = (
    VllmFeature((0, 10, 2), "", "token ids come back with every text", "the server cannot be used"),
    VllmFeature(
        (0, 10, 2),
        "--generation-config vllm",
        "sampling defaults are not the model's",
        "the server cannot be used",
    ),
    VllmFeature(
        (0, 10, 2),
        "--enable-prefix-caching",
        "a chunk is scored after its cached prefix",
        "the server cannot be used",
    ),
    VllmFeature(
        (0, 10, 2),
        "--enable-prompt-tokens-details",
        "replies count cached tokens: the only evidence that the cache works",
        "the server cannot be used",
    ),
    VllmFeature(
        (0, 11), "", "speculation by a draft model (`draft_model`)", "other methods can be used"
    ),
    VllmFeature(
        (0, 14),
        "",
        "requests for log-probs, as all of atts are, are decoded with speculation",
        "they are decoded without it, and nothing says so",
    ),
    VllmFeature(
        (0, 16), "", "speculation together with pipeline parallelism", "one of the two is possible"
    ),
    VllmFeature(
        (0, 30), "--enable-scale-out", "requests are aborted by id", "a closed connection aborts"
    ),
    VllmFeature(
        (0, 33),
        "--enable-scale-out",
        "scores are read from the cached prefix",
        "the target reads the whole prefix again for every chunk",
    ),
)
"""In the order of their versions."""
LEAST = FEATURES[0].since
"""The oldest version that can be used."""
NEWEST = FEATURES[-1].since
"""The version whose sources the dialect follows."""


def read_version(text: str) -> Version:
    """Read a version such as 0.29, v0.30.1 or 0.33.0rc1+cu128.

    >>> read_version("v0.30.1rc2+cu128")
    (0, 30, 1)

    :raises OptionError: it is not one, or one that cannot be used.
    """
    form = re.match(r"v?(\d+(?:\.\d+)+)", text.strip())
    if form is None:
        raise OptionError("--server-version", f"{text!r} is not a version such as 0.33")
    version = tuple(int(part) for part in form[1].split("."))
    # 0.10 means the newest of its patches, so it is not refused for being older than 0.10.2.
    if version < LEAST[: len(version)]:
        problem = f"vLLM {text} cannot be used: it returns no token ids"
        raise OptionError("--server-version", f"{problem}; take {dotted(LEAST)} or newer")
    return version


def dotted(version: Version) -> str:
    """Write a version as people do."""
    return ".".join(str(part) for part in version)


def start_flags(version: Version = NEWEST) -> list[str]:
    """Return the flags that the probe wants of a server of this version, and that it knows.

    >>> start_flags((0, 29))[-1], start_flags((0, 30))[-1]
    ('--enable-prompt-tokens-details', '--enable-scale-out')
    """
    flags = [each.flag for each in FEATURES if each.flag and _has(version, each)]
    return list(dict.fromkeys(flags))


def lacking(version: Version) -> list[str]:
    """Return what a server of this version lacks, and what follows for a run, a line each."""
    lines = list[str]()
    for feature in FEATURES:
        if not _has(version, feature):
            lines.append(f"not before {dotted(feature.since)}: {feature.does}; {feature.without}")
    return lines


def compatibility_table() -> list[str]:
    """Return the features by version as the lines of a Markdown table."""
    lines = ["| from vLLM | flag | what it can do | before it |", "|---|---|---|---|"]
    for feature in FEATURES:
        flag = f"`{feature.flag}`" if feature.flag else ""
        lines.append(f"| {dotted(feature.since)} | {flag} | {feature.does} | {feature.without} |")
    return lines


def _has(version: Version, feature: VllmFeature) -> bool:
    return version >= feature.since[: len(version)]
