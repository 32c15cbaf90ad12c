"""Hugging Face cache: files of a dataset, fetched once where the network may be used."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from atts.errors import DatasetError

Network = Literal["auto", "never"]
"""auto: fetch what the cache lacks, unless HF_HUB_OFFLINE says otherwise; never: the cache alone."""
DATA = ("*.jsonl", "*.json", "*.csv", "*.tsv", "*.parquet")


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """One commit of a hub dataset on this machine."""

    repo: str
    commit: str
    folder: Path

    def files(self, patterns: Sequence[str]) -> list[Path]:
        """The files that match, in the order of the patterns, then by name; none while a shard or file is missing."""
        names = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        found = dict.fromkeys(name for pattern in patterns for name in names if fnmatch(name, pattern))
        shards = [match for name in found if (match := re.search(r"^(.*)-(\d{5})-of-(\d{5})", name))]
        held = Counter(match[1] for match in shards)
        exact = {pattern for pattern in patterns if not re.search(r"[*?\[]", pattern)}
        is_whole = exact <= {*found} and all(held[match[1]] >= int(match[3]) for match in shards)
        return [self.folder / name for name in found] if is_whole else []


def snapshot(repo: str, revision: str, patterns: Sequence[str], cache: Path | None, network: Network) -> HubSnapshot:
    """The commit that `revision` names, with the files that match `patterns`: from the cache, else fetched.

    A cached branch is not moved: the commit found is the one recorded. Raises DatasetError saying how to get the files.
    """
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RevisionNotFoundError

    if here := cached_snapshot(repo, revision, patterns, cache):
        return here
    if network == "never":
        raise _absent(repo, revision, "it is not in the local cache, and the network is not to be used")
    try:
        here = _download(repo, revision, patterns, cache, fetch=True)
    except GatedRepoError:
        problem = f"it is gated; accept its terms at https://huggingface.co/datasets/{repo} and run: hf auth login"
        raise _absent(repo, revision, problem) from None
    except RevisionNotFoundError:
        problem = f"the hub has no revision {revision!r} of it"
        raise DatasetError(repo, problem, "Name a branch, tag or commit") from None
    except (OSError, EntryNotFoundError, HfHubHTTPError, ValueError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise _absent(repo, revision, f"it could not be fetched ({said})") from error
    if not here.files(patterns):
        raise DatasetError(repo, f"revision {here.commit} has no files {', '.join(patterns)}", "Its layout has changed")
    return here


def cached_snapshot(repo: str, revision: str, patterns: Sequence[str], cache: Path | None) -> HubSnapshot | None:
    """The snapshot if it is on this machine with all files asked for; never uses the network."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        here = _download(repo, revision, patterns, cache, fetch=False)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise DatasetError(repo, f"that is no name of a hub dataset ({error})", "Names are owner/name") from None
    return here if here.files(patterns) else None


def _download(repo: str, revision: str, patterns: Sequence[str], cache: Path | None, *, fetch: bool) -> HubSnapshot:
    from huggingface_hub import snapshot_download

    what: dict[str, Any] = {"revision": revision, "cache_dir": cache, "allow_patterns": list(patterns)}
    folder = Path(snapshot_download(repo, repo_type="dataset", local_files_only=not fetch, **what))
    return HubSnapshot(repo, folder.name, folder)


def split_files(here: HubSnapshot, split: str, config: str) -> list[Path]:
    """The data files of one split of an unknown dataset, told by their names.

    Raises DatasetError naming what there is when the split or the configuration is not clear.
    """

    def parted(name: str, word: str) -> bool:
        return bool(re.search(rf"(^|[-_/.]){re.escape(word)}([-_/.]|$)", name))

    files = (path for path in here.files(DATA) if path.name not in ("dataset_infos.json", "dataset_dict.json"))
    names = [path.relative_to(here.folder).as_posix() for path in files]
    ours = [name for name in names if not config or parted(name, config)]
    chosen = [name for name in ours if parted(name, split)]
    chosen = chosen or (ours if len(ours) == 1 else [])
    folders = {str(Path(name).parent) for name in chosen}
    if not chosen or len(folders) > 1:
        problem = f"{'no' if not chosen else 'more than one'} set of files is split {split!r}"
        raise DatasetError(here.repo, problem, f"Name split and config; its data files are {', '.join(names[:12])}")
    return [here.folder / name for name in sorted(chosen)]


def _absent(repo: str, revision: str, problem: str) -> DatasetError:
    at = "" if revision == "main" else f" --revision {revision}"
    run = f"hf download --repo-type dataset {repo}{at}"
    advice = f"On a machine with network run: {run}; or name a file of it with --file"
    return DatasetError(f"{repo}@{revision}", problem, advice)
