"""Flags that several commands share: groups made from the fields that they set, `--log-level` and `--profile`.

A group is a class whose annotations are flags: `name: Annotated[type, "help"]`. A command decorated with
`@accepts_flags` annotates a parameter with a group and receives the values that the user gave.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from speculant.cli.terminal import messages
from speculant.config import EngineConfig
from speculant.engine import profiled
from speculant.errors import ConfigError
from speculant.files import MOST_DEPTH, is_deep
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from speculant.engine import Engine

NEW_TOKENS = 128  # the command line's max_tokens; the 16 of SamplingParams is meant for programs
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class FlagGroup:
    """The values of one group. `given` has only the flags that the user set."""

    sets: ClassVar[type]  # the dataclass whose fields these are
    from_environment: ClassVar[bool] = False  # each flag is also SPECULANT_<NAME>
    renamed: ClassVar[Mapping[str, str]] = {}  # fields whose flags have another name
    aliases: ClassVar[Mapping[str, str]] = {}  # fields whose flags have a second name
    left_out: ClassVar[Collection[str]] = ()  # inherited flags that this group does not have
    defaults: ClassVar[Mapping[str, object]] = {}  # to show in place of the dataclass's

    def __init__(self, values: Mapping[str, Any]) -> None:
        every = {name: values[self.renamed.get(name, name)] for name in self.names()}
        self.given = {name: value for name, value in every.items() if value not in (None, [])}

    @classmethod
    def names(cls) -> list[str]:
        """Return the fields in the order of their flags."""
        annotated = (name for kind in reversed(cls.__mro__) for name in vars(kind).get("__annotations__", ()))
        return [name for name in annotated if name not in FlagGroup.__annotations__ and name not in cls.left_out]

    @classmethod
    def parameters(cls) -> Iterator[inspect.Parameter]:
        """Yield the flags as typer's parameters; None = not given."""
        hints = get_type_hints(cls, include_extras=True)
        for name in cls.names():
            kind, description = get_args(hints[name])
            flag = cls.renamed.get(name, name)
            spelled = [f"--{flag.replace('_', '-')}", cls.aliases[name]] if name in cls.aliases else []
            option = typer.Option(
                *spelled,
                help=description + cls._default_text(name),
                show_default=False,
                show_envvar=False,
                envvar=f"SPECULANT_{name.upper()}" if cls.from_environment else None,
            )
            yield inspect.Parameter(
                flag,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )

    @classmethod
    def _default_text(cls, name: str) -> str:
        default = cls.defaults.get(name, {field.name: field.default for field in dataclasses.fields(cls.sets)}[name])
        return f" [default: {default}]" if isinstance(default, str | int | float) and default is not False else ""


class SamplingFlags(FlagGroup):
    """Sampling and stop conditions."""

    sets = SamplingParams
    defaults: ClassVar[Mapping[str, object]] = {"max_tokens": NEW_TOKENS}

    n: Annotated[int, "Samples per prompt."]
    temperature: Annotated[float, "0 is greedy; higher is more varied."]
    top_k: Annotated[int, "Sample among the k most likely tokens; 0 = all."]
    top_p: Annotated[float, "Sample among the likeliest tokens that together have this probability."]
    min_p: Annotated[float, "Drop tokens less likely than this share of the likeliest one's probability."]
    repetition_penalty: Annotated[float, "Above 1 makes repeating tokens of prompt and output less likely."]
    presence_penalty: Annotated[float, "Subtracted once from the logit of each token of the output."]
    frequency_penalty: Annotated[float, "Subtracted from a token's logit for each time it is in the output."]
    logit_bias: Annotated[str, "Added to logits: ID=VALUE,ID=VALUE or a JSON object; -inf bans a token."]
    seed: Annotated[int, "Fixes the text: the same with speculation on or off, alone or in a batch."]
    max_tokens: Annotated[int, "The most tokens to generate."]
    min_tokens: Annotated[int, "Tokens to generate before an end token is allowed."]
    stop: Annotated[list[str], "Text to stop at; can be repeated."]
    stop_token_ids: Annotated[list[int], "Token ids to stop at; can be repeated."]
    include_stop_str_in_output: Annotated[bool, "Keep the stop string or end token in the text."]
    ignore_eos: Annotated[bool, "Continue after an end token."]
    logprobs: Annotated[int, "Report each token's log-probability and this many alternatives, -1 = all (with --json)."]
    prompt_logprobs: Annotated[int, "The same for the prompt's tokens (with --json)."]
    skip_special_tokens: Annotated[bool, "Leave special tokens out of the text."]
    speculation: Annotated[str, "This request's speculation: off, or KEY=VALUE,... such as num_speculative_tokens=3."]
    beam_width: Annotated[int, "Search for the likeliest text with this many beams instead of sampling."]
    length_penalty: Annotated[
        float, "A beam's score is its log-probability / length ** this; higher favours longer texts."
    ]
    structured_outputs: Annotated[
        str, 'The form of the text: json_object=true, regex=EXPRESSION or a JSON object such as {"json": SCHEMA}.'
    ]

    bad_words: Annotated[list[str], "Text to ban, tokenised with and without a leading space; can be repeated."]
    allowed_token_ids: Annotated[list[int], "Allow no token ids but this; can be repeated."]
    detokenize: Annotated[bool, "Convert tokens to text; on by default."]
    truncate_prompt_tokens: Annotated[int, "Keep only this many tokens at the end of a prompt; -1 = as many as fit."]

    @property
    def new_tokens(self) -> int | None:
        """The value of max_tokens unless it is given; None = as many as the context has room for."""
        return NEW_TOKENS

    def params(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """Return the sampling parameters; `defaults` replace flags that were not given."""
        values = {"max_tokens": self.new_tokens, **self.fields()}
        if defaults is None or "beam_width" in values:  # a beam search does not use sampling defaults
            defaults = SamplingParams()
        return dataclasses.replace(defaults, **values)

    def fields(self) -> dict[str, Any]:
        """Return the given values by parameter name, as a request to a server has them."""
        values = dict(self.given)
        for name in {"logit_bias", "structured_outputs"} & values.keys():
            values[name] = parse_mapping("--" + name.replace("_", "-"), values[name])
        if "speculation" in values:
            values["speculation"] = parse_speculation(values["speculation"])
        return values


class EngineFlags(FlagGroup):
    """The engine's arguments."""

    sets = EngineConfig
    from_environment = True
    renamed: ClassVar[Mapping[str, str]] = {"seed": "engine_seed"}  # --seed is the request's

    model: Annotated[str, "The target: a folder or GGUF file, a Hugging Face id, or demo for the embedded one."]
    draft_model: Annotated[str, "The model that drafts: a folder or GGUF file, a Hugging Face id, or demo."]
    spec_length: Annotated[int, "Tokens to draft per step."]
    use_speculative_decoding: Annotated[bool, "Turn speculation on or off; on by default."]
    speculative_config: Annotated[str, "How to draft: KEY=VALUE,... or a JSON object, with method, model and the rest."]
    find_drafts: Annotated[bool, "Without a named draft, use one that lies near the target; on by default."]
    dtype: Annotated[str, "auto (the checkpoint's), float64, float32 or bfloat16."]
    device: Annotated[str, "Where to compute: cpu, cuda, or one of several, such as cuda:1."]
    max_model_len: Annotated[int, "Positions per sequence, prompt and output together."]
    max_num_seqs: Annotated[int, "Sequences that run at a time."]
    max_num_batched_tokens: Annotated[int, "Rows per pass: prompt chunks, last tokens and drafts together."]
    kv_cache_backend: Annotated[str, "How keys and values are stored: paged (blocks) or slotted (one piece each)."]
    kv_cache_dtype: Annotated[str, "The type of stored keys and values: auto (the model's), int8, bfloat16 or float32."]
    kv_memory: Annotated[str, "Memory for all keys and values, such as 2GiB; else at most half of what is free."]
    block_size: Annotated[int, "Positions in a block of the paged cache."]
    enable_prefix_caching: Annotated[bool, "Keep the keys and values of prompts that may come again."]
    scheduling_policy: Annotated[str, "Which requests go first: first-come, decode-first or shortest-prompt."]
    max_waiting: Annotated[int, "Sequences that may wait beyond max_num_seqs; more are refused."]
    model_backend: Annotated[str, "What computes the models: auto, or transformers for any model of it, slower."]
    kernels: Annotated[str, "Kernels to use: auto, native or reference."]
    quantization: Annotated[str, "Weights of the target in int8 or int4."]
    draft_quantization: Annotated[str, "Weights of the draft: int8, int4, none (as they are) or auto (fastest here)."]
    weight_packing: Annotated[
        str, "How bfloat16 weights are stored: plain, 12bit (the same bits) or auto (faster here)."
    ]
    weight_cache: Annotated[str, "Where packed weights are kept for the next start: a folder, auto or off."]
    prompt_cache: Annotated[str, "A folder that keeps keys and values of prompts, so that none is computed twice."]
    prompt_cache_size: Annotated[str, "The most bytes of that folder, such as 20GiB."]
    learn: Annotated[str, "A folder for what drafts learn from texts, so that it outlives a restart; see the manual."]
    measure: Annotated[bool, "Forget the costs that were measured on this machine, and measure anew."]
    seed: Annotated[int, "Seed for requests without their own seed, so that their texts are reproducible."]
    tokenizer: Annotated[str, "The tokenizer's folder or Hugging Face id, if it is not the model's."]
    revision: Annotated[str, "A branch, tag or commit of the model on the hub."]
    tokenizer_revision: Annotated[str, "A branch, tag or commit of the tokenizer on the hub."]
    download_dir: Annotated[str, "The folder for downloads; else the hub's own cache."]
    max_logprobs: Annotated[int, "The most log-probabilities per token that a request may have; -1 = all."]

    def values(self) -> dict[str, Any]:
        """Return the arguments of `LLM`; ConfigError if no model was given."""
        if "model" not in self.given:
            raise ConfigError(
                "no model was given",
                "name it last or with --model: a folder, a GGUF file or an id; or --model demo --draft-model demo.",
            )
        return self.parsed()

    def parsed(self) -> dict[str, Any]:
        """Return those arguments of `LLM` that were given."""
        values = dict(self.given)
        if "speculative_config" in values:
            values["speculative_config"] = parse_mapping("--speculative-config", values["speculative_config"])
        return values

    def remote_model(self) -> str | None:
        """Return the model named for a remote server, if any. Raises ConfigError for flags that only an engine has.

        Values from the environment are meant for local engines and are ignored.
        """
        if useless := sorted(self.typed - {"model"}):
            flag = useless[0].replace("_", "-")
            raise ConfigError(f"--{flag} has no meaning with --url", "give it to speculant serve.")
        return self.given["model"] if "model" in self.typed else None

    @property
    def typed(self) -> set[str]:
        """The given arguments that are not from the environment."""
        return {name for name in self.given if f"SPECULANT_{name.upper()}" not in os.environ}

    def name_model(self, model: str | None) -> None:
        """Use a command's argument MODEL as --model. Raises ConfigError if both are given and differ."""
        if model is not None:
            if self.given.get("model", model) != model and "SPECULANT_MODEL" not in os.environ:
                raise ConfigError("the model is named twice", "leave out --model.")
            self.given["model"] = model

    def environment(self) -> dict[str, str]:
        """Return the given values as environment variables for another process."""
        return {f"SPECULANT_{name.upper()}": str(value) for name, value in self.given.items()}


Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="As --model: a folder or GGUF file, a Hugging Face id, or demo."),
]
NamedModel = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The model, in place of the first argument.")
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(metavar="FILE_OR_TEXT", help="The chat template, or its file [default: the checkpoint's]."),
]
ChatVariables = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="KEY=VALUE,...",
        help="Variables of the chat template, such as enable_thinking=false.",
    ),
]


def model_first(named: str | None, *arguments: str | None, needed: Sequence[str] = ()) -> list[Any]:
    """Return a command's arguments, the first of which is its model. named: the model, if --model gave it instead.

    None = not given. needed: names of the arguments that must be there, in order. Raises ConfigError if one of these
    is missing, and if --model and all arguments are given.
    """
    given = [each for each in (named, *arguments) if each is not None]
    if len(given) > len(arguments):
        raise ConfigError("the model is named twice", "name it once.")
    if len(given) < len(needed):
        raise ConfigError(f"no {needed[len(given)]} was named", "--help shows the arguments, with examples.")
    return [*given, *[None] * (len(arguments) - len(given))]


def accepts_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is annotated with a group by the group's flags."""
    signature = inspect.signature(command, eval_str=True)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    groups = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, FlagGroup)}
    own = [parameter for name, parameter in signature.parameters.items() if name not in groups]
    parameters = [*own, *(flag for group in groups.values() for flag in group.parameters())]

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        command(
            **{parameter.name: values[parameter.name] for parameter in own},
            **{name: group(values) for name, group in groups.items()},
        )

    return set_parameters(with_flags, parameters)


def set_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Replace the parameters that typer reads from a command's definition."""
    vars(command).pop("__wrapped__", None)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def parse_mapping(flag: str, text: str) -> dict[str, Any]:
    """Read KEY=VALUE,KEY=VALUE or a JSON object; values are JSON if valid, else text."""
    if text.lstrip().startswith("{"):
        return _parse_object(flag, text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    if any(not (key.strip() and equals) for key, equals, _ in pairs):
        raise ConfigError(f"{flag} {text!r} is not KEY=VALUE,...", "write key=value pairs or a JSON object.")
    return {key.strip(): parse_value(value.strip()) for key, _, value in pairs}


def _parse_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = _parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is not valid JSON: {error}", "quote it for the shell, or write KEY=VALUE."
        ) from error
    return value


def parse_value(text: str) -> Any:
    """Read a value: JSON if it is valid, else text."""
    try:
        return _parse_json(text)
    except ValueError:
        return text


def _parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, or nested too deep to be printed in an error message."""
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    else:
        if not is_deep(value):
            return value
    raise ValueError(f"it is nested over {MOST_DEPTH} levels deep")


def parse_speculation(text: str) -> bool | dict[str, Any]:
    """Read the per-request switch: on, off, or values of the speculative config."""
    switches = {"on": True, "off": False}
    return switches[text] if text in switches else parse_mapping("--speculation", text)


class LogLevel(StrEnum):
    """Log levels, the most verbose first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Option = Annotated[
    LogLevel | None,
    typer.Option(
        help="Log to standard error: info shows loading and failures, debug also preemptions.",
        envvar="SPECULANT_LOG_LEVEL",
        show_envvar=False,
    ),
]


def show_logs(level: LogLevel) -> None:
    """Send the package's log records from a level upwards to standard error, unless there is a handler already."""
    logging.basicConfig(format=FORMAT)
    logging.getLogger("speculant").setLevel(level.upper())


def accepts_log_level(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--log-level` to a command's flags."""
    flag = inspect.Parameter("log_level", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Option)

    @functools.wraps(command)
    def with_logs(*, log_level: LogLevel | None = None, **values: Any) -> None:
        if log_level is not None:
            show_logs(log_level)
        command(**values)

    return set_parameters(with_logs, [*inspect.signature(command, eval_str=True).parameters.values(), flag])


Profile = Annotated[
    Path | None,
    typer.Option(help="Write a trace of the engine's steps here, for ui.perfetto.dev; profiling slows the run down."),
]


@contextmanager
def profiling(engine: Engine, path: Path | None) -> Iterator[None]:
    """Profile the steps of this block and print the path of the trace; None = do nothing."""
    with profiled(engine, path):
        yield
    if path is not None:
        messages().print(f"trace of the steps: {path}; open it at https://ui.perfetto.dev", style="dim")
