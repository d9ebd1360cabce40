"""`speculant cache`: lists, sizes, checks and forgets the files that are kept between runs."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from speculant.cache import BlockFiles
from speculant.cli.flags import accepts_log_level
from speculant.cli.terminal import command_group, examples, print_json, results
from speculant.config import read_bytes, read_folder
from speculant.engine import LearnedFiles
from speculant.errors import ConfigError
from speculant.files import cache_folder
from speculant.kept_files import (
    HEX,
    KeptFile,
    delete,
    entries_of,
    oldest,
    owner_of,
    remove_abandoned,
    salt_digest,
)
from speculant.serving import key_digest

EXAMPLES = examples(
    "speculant cache list",
    "speculant cache list ./learned --json",
    "speculant cache prune ./learned --size 100MiB --older-than 30d",
    "speculant cache verify ./learned",
    "speculant cache forget ./learned --api-key secret",
)


class KeptKind(NamedTuple):
    """A kind of file: how its files are found in a folder, checked, and told apart; None = they can't be."""

    entries: Callable[[Path], list[KeptFile]]
    verify: Callable[[Path], str] | None = None
    model_of: Callable[[Path], str] | None = None
    belongs: Callable[[Path, str | None, str | None], bool] | None = None


KINDS: Mapping[str, KeptKind] = {
    "learned": KeptKind(LearnedFiles.entries, LearnedFiles.verify, LearnedFiles.model_of, LearnedFiles.belongs),
    "prompt": KeptKind(BlockFiles.entries, BlockFiles.verify, BlockFiles.model_of, BlockFiles.belongs),
    "weights": KeptKind(lambda folder: entries_of(folder.glob(f"{HEX * 32}.weights"), "weights")),
    "costs": KeptKind(lambda folder: entries_of(folder.glob("*.json"), "costs")),
}
USERS = ("weights", "costs")  # kinds with a folder of the user's own; elsewhere a JSON file may be anything
NAMED = ("SPECULANT_PROMPT_CACHE", "SPECULANT_LEARN")  # variables that name folders
DIGESTS = {"prompt": " (digests of models)"}  # whose files have no model's name
MOST_SHOWN = 10  # files that can't be read
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

app = command_group(help="List, prune, verify or forget what is kept on disk between runs.", epilog=EXAMPLES)

Folder = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR",
        help="The folder of --learn or --prompt-cache [default: those of SPECULANT_LEARN and SPECULANT_PROMPT_CACHE].",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def cache() -> None:
    """List, prune, verify or forget what is kept on disk between runs."""


@app.command("list", epilog=EXAMPLES)
@accepts_log_level
def list_files(folder: Folder = None, as_json: AsJson = False) -> None:
    """Show the files of each kind: how many, their bytes, models, and oldest and newest use.

    Without DIR, the packed weights and the measurements of this user are listed too.
    """
    rows = [_row(place, entries) for place, entries in _listed(folder) if entries]
    if as_json:
        print_json({"kinds": rows, "bytes": sum(row["bytes"] for row in rows)})
        return
    for row in rows:
        oldest, newest = (datetime.fromtimestamp(row[name]) for name in ("oldest_use", "newest_use"))
        of = f", of {', '.join(row['models'])}{DIGESTS.get(row['kind'], '')}" if row["models"] else ""
        used = f"used from {oldest:%Y-%m-%d %H:%M} to {newest:%Y-%m-%d %H:%M}"
        results().print(f"{row['kind']} in {row['folder']}: {row['files']} files, {_mib(row['bytes'])}, {used}{of}")
    if not rows:
        results().print("nothing is kept")


@app.command(epilog=EXAMPLES)
@accepts_log_level
def prune(
    folder: Folder = None,
    size: Annotated[str | None, typer.Option(help="The most bytes that stay, such as 5GiB; newest uses stay.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Delete what was not used for this long: 7d, 12h, 30m.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete the files that were used longest ago."""
    if size is None and older_than is None:
        raise ConfigError("nothing says what to delete", "add --size 5GiB, --older-than 7d or both.")
    limit = None if size is None else read_bytes("--size", size)
    before = None if older_than is None else time.time() - _seconds(older_than)
    entries = [entry for place in _folders(folder) for entry in _entries(place)]
    chosen = [entry for entry in entries if before is not None and entry.used < before]
    if limit is not None:
        chosen += oldest([entry for entry in entries if before is None or entry.used >= before], limit)
    _delete(as_json, chosen, len(entries), "deleted")


@app.command(epilog=EXAMPLES)
@accepts_log_level
def verify(folder: Folder = None, as_json: AsJson = False) -> None:
    """Read each file, and delete those that are damaged. Packed weights are checked when a model is loaded."""
    entries = [entry for place in _folders(folder) for entry in _entries(place) if KINDS[entry.kind].verify]
    unread = dict[str, str]()
    found = {entry: problem for entry, problem in _read(entries, _fault_of, unread) if problem}
    problems = {str(entry.path): problem for entry, problem in found.items()}
    if not as_json:
        for path, problem in problems.items():
            results().print(f"{path}: {problem}")
    _delete(as_json, [*found], len(entries), "damaged", unread, problems=problems)


@app.command(epilog=EXAMPLES)
@accepts_log_level
def forget(
    folder: Folder = None,
    salt: Annotated[str | None, typer.Option(help="Only what this cache_salt left, under any key.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Only what this API key of a server left.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete all files, or those of one cache_salt or API key.

    Stop the servers that use the folder first: they write again what they have in memory.
    """
    entries = [entry for place in _folders(folder) for entry in _entries(place)]
    chosen, unread = entries, dict[str, str]()
    if salt is not None or api_key is not None:
        named = [entry for entry in entries if KINDS[entry.kind].belongs is not None]
        chosen = [entry for entry, is_of in _read(named, partial(_is_of, salt, api_key), unread) if is_of]
        if len(named) < len(entries) and not as_json:
            results().print(f"{len(entries) - len(named)} files are of no key or salt alone, and stay")
    _delete(as_json, chosen, len(entries), "forgotten", unread)


def _read(
    entries: Iterable[KeptFile], read: Callable[[KeptFile], Any], unread: dict[str, str]
) -> Iterator[tuple[KeptFile, Any]]:
    """Yield each file that still exists, with what `read` returns for it.

    A file that can't be read is added to `unread`, with the reason.
    """
    for entry in entries:
        try:
            yield entry, read(entry)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            unread[str(entry.path)] = str(error)


def _fault_of(entry: KeptFile) -> str:
    verify = KINDS[entry.kind].verify
    return "" if verify is None else verify(entry.path)


def _is_of(salt: str | None, api_key: str | None, entry: KeptFile) -> bool:
    """Whether a file is of a key and of a salt, which may contain colons in a program."""
    belongs, owner = KINDS[entry.kind].belongs, None if api_key is None else owner_of(key_digest(api_key))
    pairs = [(owner, None if salt is None else salt_digest(f":{salt}"))]
    if salt is not None and owner is None:
        pairs.append((owner_of(salt), salt_digest(salt)))
    return belongs is not None and any(belongs(entry.path, *pair) for pair in pairs)


def _folders(folder: str | None, cleans: bool = True) -> list[Path]:
    """Return the folders that a command is for, without what dead processes left there if `cleans`.

    Raises ConfigError if none is named, the named one is none, or one can't be read.
    """
    given = (
        {"DIR": folder} if folder is not None else {name: os.environ[name] for name in NAMED if os.environ.get(name)}
    )
    if not given:
        raise ConfigError("no folder is named", "name that of --learn or --prompt-cache: speculant cache ... DIR.")
    found = dict.fromkeys(read_folder(name, value) for name, value in given.items())
    for place in [*found]:
        if folder is None and not place.exists():  # nothing was kept yet
            del found[place]
        elif not place.is_dir():
            raise ConfigError(f"{place} is no folder", "name a folder that --learn or --prompt-cache had.")
        for part in (place, *place.glob(HEX * 2)):
            if part.is_dir() and not os.access(part, os.R_OK | os.X_OK):
                raise ConfigError(f"{part} can't be read", "run the command as the user who owns it, or as root.")
            if cleans:
                remove_abandoned(part)
    return [*found]


def _entries(folder: Path) -> Iterator[KeptFile]:
    """Yield the files of all kinds in a folder."""
    for name, kind in KINDS.items():
        if name != "costs":
            yield from kind.entries(folder)


def _listed(folder: str | None) -> Iterator[tuple[Path, list[KeptFile]]]:
    """Yield the folders to list, each with its files of one kind."""
    if folder is not None or any(map(os.environ.get, NAMED)):
        for place in _folders(folder, cleans=False):
            for _, found in groupby(_entries(place), attrgetter("kind")):
                yield place, [*found]
    for name in USERS if folder is None else ():
        yield cache_folder(name), KINDS[name].entries(cache_folder(name))


def _row(folder: Path, entries: list[KeptFile]) -> dict[str, Any]:
    """Describe the files of one kind in a folder."""
    models, described_by = Counter[str](), KINDS[entries[0].kind].model_of
    if described_by is not None:
        for entry in entries:
            with suppress(OSError, ValueError):  # it is damaged, or was deleted meanwhile
                models[described_by(entry.path)] += 1
    return {
        "kind": entries[0].kind,
        "folder": str(folder),
        "files": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "oldest_use": min(entry.used for entry in entries),
        "newest_use": max(entry.used for entry in entries),
        "models": dict(models),
    }


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"--older-than {text!r} is no time", "use a number with s, m, h or d, such as 7d.")
    return float(match[1]) * _SECONDS[match[2]]


def _delete(
    as_json: bool, chosen: Sequence[KeptFile], seen: int, what: str, unread: Mapping[str, str] = {}, **more: Any
) -> None:
    """Delete files, and print how many of those that were seen these are. Exits with 1 if not all could be treated.

    unread: the reasons why files could not be read, by path.
    """
    deleted = delete(chosen)
    size, stay = sum(entry.size for entry in deleted), len(chosen) - len(deleted)
    if as_json:
        failed = {"unread": dict(unread), "stay": stay} if unread or stay else {}
        print_json({"files": seen, what: len(deleted), "bytes": size, **more, **failed})
    else:
        results().print(f"{what}: {len(deleted)} of {seen} files, {_mib(size)}")
        for path, reason in [*unread.items()][:MOST_SHOWN]:
            results().print(f"not read: {path}: {reason}")
        for count, how in ((len(unread), "read"), (stay, "deleted")):
            if count:
                results().print(f"{count} files can't be {how}: run the command as the user who owns them, or as root")
    if unread or stay:
        raise typer.Exit(1)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
