"""Workloads: prompts as token ids, and their arrival times. All randomness is seeded, so they are reproducible."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculant.errors import ConfigError, RequestError
from speculant.text import FilePrompt, read_prompts

if TYPE_CHECKING:
    from speculant.config import Limits
    from speculant.engine import Runtime
    from speculant.text import Tokenizer

USUAL_LENGTH = 128  # default tokens of a random prompt
EDIT_LENGTH = 240  # default tokens of a prompt to be edited
OPENINGS = (
    "def {verb}_{noun}(path, {noun}=None):\n",
    "class {Noun}Reader:\n    def __init__(self, {noun}s):\n",
    "import os\nimport sys\n\n\ndef {verb}_{noun}s(argv=None):\n",
    "for {noun} in self.{noun}s:\n    if not {noun}.{verb}",
    "    def test_{verb}_{noun}(self):\n        self.assert",
    "try:\n    {noun} = {verb}_{noun}(name)\nexcept",
    "# {Verb} every {noun} of the list and return\n",
    "with open(path) as {noun}_file:\n    {noun}s = ",
)
BODIES = '''\
def {verb}_{noun}({noun}s, limit={number}):
    result = []
    for {noun} in {noun}s[:limit]:
        if {noun} is not None:
            result.append({noun}.strip())
    return result
---
class {Noun}:
    """A {noun} that can {verb} itself."""

    def __init__(self, name, size={number}):
        self.name = name
        self.size = size

    def {verb}(self):
        return self.name * self.size
---
def {verb}_all_{noun}s(path):
    with open(path) as {noun}_file:
        lines = {noun}_file.readlines()
    return [line.split()[{number} % 3] for line in lines if line.strip()]
---
{NOUN}_LIMIT = {number}


def is_{noun}(value):
    try:
        return int(value) < {NOUN}_LIMIT
    except ValueError:
        return False
'''
VERBS = "read parse check write merge split update remove format copy"
NOUNS = "line file token value header record message field name item block node"


class BuiltIn(StrEnum):
    """The built-in sources of prompts; any other is a file."""

    CODE = auto()
    EDIT = auto()
    RANDOM = auto()


CODE = BuiltIn.CODE.value


@dataclass(frozen=True)
class WorkloadConfig:
    """The choice of prompts. `prompts` is "code", "edit", "random" or a file; see `make_workload`.

    num_prompts None = all of the file, or the benchmark's default number. prompt_length: tokens per
    prompt; None = their own length. request_rate: Poisson arrivals per second; None = all prompts at once.
    """

    prompts: str = CODE
    num_prompts: int | None = None
    prompt_length: int | None = None
    request_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "prompt_length", "request_rate"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} is not above 0", f"set {name} above 0, or leave it out.")


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the seconds from the start at which each arrives, in order; () = all at once.

    categories: the kind of task of each prompt, by name; () = not known. sources: the prompts are the sources
    of an encoder-decoder model.
    """

    source: str
    prompts: Sequence[Sequence[int]]
    arrivals: Sequence[float] = ()
    request_rate: float | None = None
    categories: Sequence[str] = ()
    sources: bool = False

    def first(self, number: int) -> Workload:
        """Return the first prompts alone."""
        return replace(
            self,
            prompts=self.prompts[:number],
            arrivals=self.arrivals[:number],
            categories=self.categories[:number],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of the workload for a report."""
        lengths = [len(prompt) for prompt in self.prompts]
        return {
            "prompts": self.source,
            "num_prompts": len(lengths),
            "prompt_tokens": {"min": min(lengths), "median": statistics.median(lengths), "max": max(lengths)},
            "request_rate": self.request_rate,
            "sources": self.sources,
        }


def make_workload(config: WorkloadConfig, runtime: Runtime, usual_number: int) -> Workload:
    """Make prompts for a model.

    "code" prompts are openings of Python code, or prompt_length tokens of code that end with one. "edit" prompts are
    code and the beginning of the same code again, as if it were repeated with changes. "random" tokens are uniform over
    all tokens but special and end tokens. Prompts of a file are cut at prompt_length; categories count only if all
    prompts have one.
    """
    number, rate, categories = config.num_prompts or usual_number, config.request_rate, list[str]()
    if config.prompts == CODE:
        prompts = [code_prompt(runtime.tokenizer, index, config.prompt_length) for index in range(number)]
    elif config.prompts == BuiltIn.EDIT:
        prompts = [edit_prompt(runtime.tokenizer, index, config.prompt_length) for index in range(number)]
    elif config.prompts == BuiltIn.RANDOM:
        ids = ordinary_ids(runtime.tokenizer, runtime.checkpoint.eos_token_ids)
        prompts = [random_prompt(ids, index, config.prompt_length or USUAL_LENGTH) for index in range(number)]
    else:
        found = _prompts_of_file(config)
        prompts = [
            each.content if isinstance(each.content, list) else runtime.tokenizer.encode(each.content) for each in found
        ]
        prompts = [prompt[: config.prompt_length] for prompt in prompts]
        categories = [each.category for each in found if each.category is not None]
    return Workload(
        config.prompts,
        prompts,
        [] if rate is None else list(itertools.islice(poisson_process(rate, "arrivals"), len(prompts))),
        rate,
        categories if len(categories) == len(prompts) else (),
        runtime.checkpoint.model.needs.source,
    )


def server_prompts(source: str, number: int) -> list[str | list[int]]:
    """Return prompts for a server, which has the tokenizer: openings of Python code for "code", else those of a file.

    Raises RequestError for prompts that are made of tokens, as a client has no vocabulary, and for a file that can't be
    read.
    """
    if source in (BuiltIn.RANDOM, BuiltIn.EDIT):
        raise RequestError(f"{source} prompts need the vocabulary, which the server has", f'use "{CODE}" or a file.')
    if source == CODE:
        return [_opening(index, random.Random(f"code-{index}")) for index in range(number)]
    return [each.content for each in read_prompts(Path(source))]


def require_room(workload: Workload, max_tokens: int, limits: Limits) -> None:
    """Check that every prompt and its output fit: truncated outputs can't be compared. Raises RequestError."""
    longest, most = max(len(prompt) for prompt in workload.prompts), limits.max_model_len
    if workload.sources:
        if longest > limits.max_source_len:
            raise RequestError(
                f"a source has {longest} tokens, and at most {limits.max_source_len} are encoded in one pass",
                f"lower prompt_length to {limits.max_source_len}, or raise max_model_len and max_num_batched_tokens.",
            )
        longest = 1  # the decoder's start token
    if longest + max_tokens > most:
        raise RequestError(
            f"a prompt of {longest} tokens and {max_tokens} to generate are more than max_model_len={most}",
            f"lower max_tokens to {max(1, most - longest)}"
            f" or prompt_length to {max(1, most - max_tokens)}, or raise max_model_len.",
        )


def code_prompt(tokenizer: Tokenizer, index: int, length: int | None = None) -> list[int]:
    """Return the index-th piece of code: an opening, or `length` tokens that end with one."""
    generator = random.Random(f"code-{index}")
    opening = _opening(index, generator)
    if length is None:
        return tokenizer.encode(opening)
    before, after = added_tokens(tokenizer)
    start, end = before[:length], after[: max(0, length - len(before))]
    body = tokenizer.encode(opening, add_special_tokens=False)
    bodies = BODIES.replace("---\n", "\n\n---").split("---")
    while len(body) < length:
        body = tokenizer.encode(_fill(generator.choice(bodies), generator), add_special_tokens=False) + body
    return [*start, *body[len(body) - length + len(start) + len(end) :], *end]


def edit_prompt(tokenizer: Tokenizer, index: int, length: int | None = None) -> list[int]:
    """Return the index-th piece of code and the first half of it again: `length` tokens together, or EDIT_LENGTH."""
    length = length or EDIT_LENGTH
    pause = tokenizer.encode("\n\n\n", add_special_tokens=False)
    before, after = added_tokens(tokenizer)
    code = code_prompt(tokenizer, index, max(1, 2 * (length - len(pause)) // 3))
    code = code[: len(code) - len(after)]
    return [*[*code, *pause, *code[len(before) :]][: length - len(after)], *after]


def added_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before every text, and those after it."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    first = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), len(whole))
    return whole[:first], whole[first + len(plain) :]


def _opening(index: int, generator: random.Random) -> str:
    return _fill(OPENINGS[index % len(OPENINGS)], generator)


def _fill(template: str, generator: random.Random) -> str:
    verb, noun = generator.choice(VERBS.split()), generator.choice(NOUNS.split())
    number = generator.randrange(1, 1000)
    return template.format(verb=verb, Verb=verb.title(), noun=noun, Noun=noun.title(), NOUN=noun.upper(), number=number)


def random_prompt(ids: Sequence[int], index: int, length: int) -> list[int]:
    """Return the index-th draw of `length` tokens."""
    return random.Random(f"random-{index}").choices(ids, k=length)


def ordinary_ids(tokenizer: Tokenizer, end_token_ids: frozenset[int]) -> list[int]:
    """Return the tokens of text: all but added tokens and end tokens."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return sorted(set(tokenizer.vocab().values()) - set(added) - end_token_ids)


def poisson_process(rate: float, seed: str) -> Iterator[float]:
    """Yield the times in seconds of a Poisson process with `rate` arrivals per second, endlessly; the first is 0."""
    generator, now = random.Random(seed), 0.0
    while True:
        yield now
        now += generator.expovariate(rate)


def _prompts_of_file(config: WorkloadConfig) -> list[FilePrompt]:
    found = read_prompts(Path(config.prompts))
    number = config.num_prompts or len(found)
    if number > len(found):
        raise RequestError(
            f"{config.prompts} has {len(found)} prompts, fewer than {number}", "lower num_prompts or add some."
        )
    return _spread_out(found, number)


def _spread_out(found: Sequence[FilePrompt], number: int) -> list[FilePrompt]:
    """Return `number` prompts in the order of the file, of all categories in turn if there are any."""
    by_category: dict[str | None, list[int]] = {}
    for place, each in enumerate(found):
        by_category.setdefault(each.category, []).append(place)
    in_turn = [place for turn in itertools.zip_longest(*by_category.values()) for place in turn if place is not None]
    return [found[place] for place in sorted(in_turn[:number])]
