"""Where a checkpoint comes from, and the settings for generation that it recommends.

A checkpoint is the embedded pair, a local folder or GGUF file, or on the Hugging Face hub. Settings are its special
tokens and its sampling. GGUF files have the end tokens in their config (models/gguf.py), and sampling as metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError, ModelError
from speculant.files import read_json, read_optional_json
from speculant.gguf_file import SUFFIX, GgufFile, is_gguf, parts_of
from speculant.models.config import is_whole, show, text_config
from speculant.models.gguf import read_gguf_config
from speculant.params import SamplingParams

_DEMO = Path(__file__).parents[1] / "assets" / "demo"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_TOKENIZER = ["*.json", "tokenizer*", "*.jinja", "spiece.model", "*.spm"]
_WANTED = [*_TOKENIZER, "*.safetensors"]
_UNWANTED = ["consolidated*", "*/*"]  # other formats of the same weights
_WEIGHTS = "*.safetensors"
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files of image encoders, and of statistics
_SHOWN = 12  # files in a message


def resolve_source(
    source: str, role: str = "target", revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the place of a checkpoint: its folder, or its GGUF file (the first part of a split one).

    source: "demo" is the embedded pair, of which `role` ("target" or "draft") selects one. Else the path of a folder or
    GGUF file, which takes precedence over a hub id of the same name; a folder without safetensors stands for its only
    GGUF model. Else a hub id, of which the needed files are downloaded: "org/name:file.gguf" is one of its GGUF files,
    and "org/name:Q4_K_M" the one with this word in its name.
    revision: a branch, a tag or a commit. download_dir: where downloads are kept; None = the hub's own cache.

    With HF_HUB_OFFLINE=1, only what has been downloaded before is found. Raises ModelError.
    """
    if source == "demo":
        return _demo(role)
    path = _local(source)
    if path is not None:
        return _in_folder(path) if path.is_dir() else _file(path)
    name, wanted = _on_hub(source)
    return _download_gguf(name, wanted, revision, download_dir) if wanted else _download(name, revision, download_dir)


def resolve_folder(source: str, role: str) -> Path:
    """Return the folder of a checkpoint that can't be a GGUF file, such as a head; see `resolve_source`.

    Raises ModelError.
    """
    if source == "demo":
        return _demo(role)
    path = _local(source)
    if path is not None and path.is_dir():
        return path
    name, wanted = (source, source) if path is not None else _on_hub(source)
    if wanted:
        raise ModelError(f"{source} is a file, and a folder is needed here", "name a folder that holds safetensors.")
    return _snapshot(name, None, None, _WANTED, _UNWANTED)


def resolve_tokenizer(source: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the place of a tokenizer: a folder with tokenizer.json, of any weights; else the place of the model."""
    path = _local(source)
    if path is None and source != "demo" and not _on_hub(source)[1]:
        path = _snapshot(source, revision, download_dir, _TOKENIZER, _UNWANTED)
    if path is not None and (path / "tokenizer.json").is_file():
        return path
    return resolve_source(source, revision=revision, download_dir=download_dir)


def is_model_file(path: Path) -> bool:
    """Whether a path is a GGUF file of a model, or the first part of one."""
    named = path.suffix.lower() == SUFFIX and not _NO_MODEL.search(path.name)
    return named and path.is_file() and parts_of(path)[0] == path


def read_model_config(place: Path) -> dict[str, Any]:
    """Return config.json of a folder, or the metadata of a GGUF file in its keys. Raises ModelError."""
    if place.is_dir():
        return text_config(read_json(place / "config.json"))
    return read_gguf_config(GgufFile.open(place))


def read_optional_config(place: Path) -> dict[str, Any]:
    """Return the same as `read_model_config`, but nothing for a folder without config.json."""
    return text_config(read_optional_json(place / "config.json")) if place.is_dir() else read_model_config(place)


def embedded_heads() -> list[str]:
    """Return the methods that the embedded target has a head for."""
    return sorted(folder.name for folder in (_DEMO / "heads").glob("*/"))


def _demo(role: str) -> Path:
    folder = _DEMO / role
    if not folder.is_dir():
        if role.startswith("heads/"):
            raise ModelError(
                f"there is no embedded head for the method {role.removeprefix('heads/')!r}",
                f"use one of {', '.join(embedded_heads())}, or train a head by `speculant train head`.",
            )
        raise ModelError(
            f"this installation has no embedded {role} model ({folder} is missing)",
            "reinstall speculant, or name a folder or a Hugging Face id.",
        )
    return folder


def _local(source: str) -> Path | None:
    """Return the path that a source names; None = there is nothing."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # not allowed, too long, or the home of an unknown user
        raise ModelError(f"{source!r} can't be looked up: {error}", "check the path.") from error


def _on_hub(source: str) -> tuple[str, str]:
    """Return the repository and the GGUF file that a source names; "" = none. Raises ModelError if it names neither."""
    name, _, wanted = source.partition(":")
    if _HUB_ID.fullmatch(name) and not wanted.startswith("/") and not name.lower().endswith(SUFFIX):
        return name, wanted
    kind = "file" if source.lower().endswith(SUFFIX) else "folder"
    raise ModelError(
        f"there is no {kind} {source}",
        "check the path, or give a Hugging Face id such as org/name, or org/name:file.gguf.",
    )


def _file(path: Path) -> Path:
    if not is_gguf(path):
        raise ModelError(
            f"{path} is a file, neither a folder nor in the GGUF format", "name the folder that holds config.json."
        )
    return parts_of(path)[0]


def _in_folder(folder: Path) -> Path:
    """Return a folder, or the GGUF file that is its only model."""
    if any(folder.glob(_WEIGHTS)):
        return folder
    try:
        files = [path.name for path in folder.iterdir() if path.suffix.lower() == SUFFIX]
    except OSError as error:
        raise ModelError(f"{folder} can't be looked up: {error}", "check the path.") from error
    return folder / _choose(files, "", str(folder), "/")[0] if files else folder


def _choose(files: Sequence[str], wanted: str, where: str, separator: str) -> list[str]:
    """Return the parts of one model among GGUF files: the wanted one, or the only one.

    wanted: a file's name, or a word in it such as Q4_K_M. The user names a file by `where`, `separator` and its own
    name. Raises ModelError if there is not exactly one.
    """
    found = {str(parts_of(Path(file))[0]) for file in files}
    if wanted.lower().endswith(SUFFIX):
        first = str(parts_of(Path(wanted))[0])
        found = {file for file in found if first in (file, Path(file).name)}
    else:
        word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])" if wanted else "", re.IGNORECASE)
        found = {file for file in found if not _NO_MODEL.search(Path(file).name) and word.search(file)}
    if len(found) == 1:
        return [str(part) for part in parts_of(Path(found.pop()))]
    named = f" that {wanted} stands for" if wanted else ""
    listed = ", ".join(f"{where}{separator}{file}" for file in sorted(found or files)[:_SHOWN])
    raise ModelError(
        f"{where} has {len(found) or 'no'} GGUF models{named}",
        f"name one file: {listed}." if listed else "name another repository.",
    )


def _download(name: str, revision: str | None, folder: str | None) -> Path:
    """Download a checkpoint from the hub: its safetensors, else its only GGUF model."""
    found = _snapshot(name, revision, folder, _WANTED, _UNWANTED)
    if any(found.glob(_WEIGHTS)):
        return found
    files = _gguf_files(name, revision, folder)
    return _download_gguf(name, "", revision, folder) if files else found


def _download_gguf(name: str, wanted: str, revision: str | None, folder: str | None) -> Path:
    """Download all parts of one GGUF model."""
    parts = _choose(_gguf_files(name, revision, folder), wanted, name, ":")
    return _snapshot(name, revision, folder, parts, None) / parts[0]


def _gguf_files(name: str, revision: str | None, folder: str | None) -> list[str]:
    """Return the GGUF files of a repository; if the hub can't be reached, those that have been downloaded."""
    from huggingface_hub import list_repo_files, snapshot_download

    try:
        return [file for file in list_repo_files(name, revision=revision) if file.lower().endswith(SUFFIX)]
    except Exception as error:
        try:
            local = Path(snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True))
        except Exception:  # noqa: BLE001 - the first error says more
            local = None
        paths = local.rglob("*") if local else ()
        found = [path.relative_to(local).as_posix() for path in paths if local and path.suffix.lower() == SUFFIX]
        if not found:
            raise _hub_error(name, error) from error
        return found


def _snapshot(
    name: str, revision: str | None, folder: str | None, wanted: list[str], unwanted: list[str] | None
) -> Path:
    """Download files from the hub, resumable and with progress; offline, take them from the local cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=folder, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
    except Exception as error:  # which errors a dead network raises depends on the client's version
        raise _hub_error(name, error) from error


def _hub_error(name: str, error: Exception) -> ModelError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    reason = str(error).strip().split("\n")[0]
    if isinstance(error, GatedRepoError):
        return ModelError(f"access to {name} is restricted on the hub", "ask for it there, then run `hf auth login`.")
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{name} on the hub has no such revision ({reason})", "check the revision.")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return ModelError(
            f"{name} is neither a folder here nor a model on the hub ({reason})",
            "check the spelling; for a private one run `hf auth login`.",
        )
    offline = isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE
    cause = "HF_HUB_OFFLINE is set" if offline else f"the hub could not be reached ({type(error).__name__}: {reason})"
    return ModelError(
        f"{name} is no folder here, some of its files have not been downloaded before, and {cause}",
        "connect to the network" + (" and unset HF_HUB_OFFLINE" if offline else "") + ", or give a local folder.",
    )


_CONFIG, _GENERATION = "config.json", "generation_config.json"
_WORDS = "bad_words_ids"
_NEW_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # of settings, here
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_SAMPLING = "general.sampling."  # before the name of a setting, in metadata
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}  # of settings with other names


def read_generation(place: Path) -> dict[str, Any]:
    """Return generation_config.json as it is, or the sampling settings of a GGUF file in its keys; empty without them.

    Raises ModelError.
    """
    if not place.is_file():
        return read_optional_json(place / _GENERATION)
    metadata = GgufFile.open(place).metadata
    stored = {name: metadata.get(_GGUF_SAMPLING + _GGUF_NAMES.get(name, name)) for name in _SAMPLING}
    given = {name: _shortest(value) for name, value in stored.items() if value is not None}
    return {"do_sample": True, **given} if given else {}


def sampling_entries(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a GGUF file with the sampling settings in generation_config.json that have an effect."""
    given = _SAMPLING if generation.get("do_sample") else ()
    return {
        _GGUF_SAMPLING + _GGUF_NAMES.get(name, name): generation[name]
        for name in given
        if generation.get(name) is not None
    }


def _shortest(value: Any) -> Any:
    """Return a float32 number in seven decimal digits: 0.6, not 0.6000000238."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_end_tokens(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the end tokens. generation_config.json takes precedence, as it also lists the end tokens of chats.

    Both files are checked. A null entry counts as absent. Raises ModelError for an entry that is not a token id below
    vocab_size.
    """
    return frozenset(_read_ids("eos_token_id", generation, config, vocab_size))


@dataclass(frozen=True)
class OutputRules:
    """Tokens that a checkpoint forces or forbids in its outputs.

    first: the first token of an output whose decoder prompt has one token; None = any. last: if an output reaches its
    greatest length, its last token is one of these; () = any. bad_words: series of tokens that no output has.
    """

    first: int | None = None
    last: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_RULES = OutputRules()


def read_start_tokens(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that a decoder's prompt begins with; () = the checkpoint names none.

    As in transformers, bos_token_id stands for a missing decoder_start_token_id. Raises ModelError as
    `read_end_tokens` does.
    """
    found = _read_ids("decoder_start_token_id", generation, config, vocab_size)
    return tuple(found[:1] or _read_ids("bos_token_id", generation, config, vocab_size)[:1])


def read_output_rules(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> OutputRules:
    """Return the forced tokens and the bad words of outputs. Raises ModelError as `read_end_tokens` does.

    As in transformers, an end token alone is no bad word.
    """
    first = _read_ids("forced_bos_token_id", generation, config, vocab_size)
    last = _read_ids("forced_eos_token_id", generation, config, vocab_size)
    ends = read_end_tokens(generation, config, vocab_size)
    words: Any = next((file[_WORDS] for file in (generation, config) if file.get(_WORDS) is not None), [])
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ModelError(f"{_WORDS} = {show(words)} is not a list of lists of token ids", f"correct {_GENERATION}.")
    checked = [tuple(_checked(_GENERATION, _WORDS, word, vocab_size)) for word in words]
    bad = tuple(word for word in checked if len(word) > 1 or word[0] not in ends)
    return OutputRules(first[0] if first else None, tuple(last), bad)


def _read_ids(key: str, generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Return the token ids of an entry of generation_config.json, or else of config.json. Both files are checked."""
    files = {_GENERATION: generation, _CONFIG: config}
    given = [
        _checked(name, key, content[key], vocab_size) for name, content in files.items() if content.get(key) is not None
    ]
    return given[0] if given else []


def _checked(file: str, key: str, given: Any, vocab_size: int) -> list[int]:
    ids = given if isinstance(given, list) else [given]
    for token_id in ids:
        if not is_whole(token_id) or not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{file} has {key} = {show(given)}, in which {show(token_id)} is no token id from 0 to"
                f" {vocab_size - 1}",
                f"correct {file}.",
            )
    return ids


def read_defaults(
    recommended: SamplingParams,
    config: str | os.PathLike[str] | None = None,
    override: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Return the sampling settings of requests that have none.

    config: "auto" or None = the checkpoint's, `recommended`; "vllm" = the defaults of `SamplingParams`; or a folder
    with generation_config.json. override: settings in place of those. Raises ConfigError for a folder without the file
    and for a setting that is unknown, ModelError for one in the file that is out of range.
    """
    settings = {_NEW_NAMES.get(name, name): value for name, value in (override or {}).items()}
    if config in (None, "auto"):
        return recommended.clone(**settings)
    if config == "vllm":
        return SamplingParams(**settings)
    folder = Path(config).expanduser()
    if not (folder / _GENERATION).is_file():
        raise ConfigError(
            f"generation_config={str(config)!r} has no {_GENERATION}", 'use "auto", "vllm" or a folder that has one.'
        )
    return read_sampling(read_generation(folder), folder).clone(**settings)


def read_sampling(generation: Mapping[str, Any], place: Path) -> SamplingParams:
    """Return the sampling settings that a checkpoint recommends; this package's defaults if do_sample is not true.

    place: its folder or GGUF file, for messages. Raises ModelError for a setting that is out of range.
    """
    sampled = generation.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ModelError(f"{_GENERATION} has do_sample = {show(sampled)}, not true or false", f"correct {_GENERATION}.")
    if not sampled:
        return SamplingParams()
    given = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    try:
        return SamplingParams.from_mapping(given)
    except ConfigError as error:
        origin = f"{place} has metadata {_GGUF_SAMPLING}*, which" if place.is_file() else _GENERATION
        raise ModelError(f"{origin} recommends a setting that can't be used: {error.problem}", error.fix) from error
