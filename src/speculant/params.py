"""Sampling settings and end conditions of a request."""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from types import MappingProxyType
from typing import Any, TypeVar

from speculant.checks import Check, Rule, check_fields, check_flag, is_whole, kind, number_from, optional, whole_from
from speculant.errors import ConfigError, suggest
from speculant.structured import StructuredOutputs, read_structured

MAX_SPECULATIVE_TOKENS = 512  # nodes of a draft
MAX_PREDICTION = 131_072  # characters of its text, and tokens
MAX_N = 128
MAX_LOGPROBS = 100  # the engine's default max_logprobs
MAX_BAD_WORDS = 1024  # texts or lists of token ids
MAX_BAD_CHARACTERS = 16_384  # of all texts together, or tokens of all lists
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings together
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKEN_IDS = 1024
MAX_COUNT = 2**31 - 1  # of tokens; far below the 64 bits of the kernels' counters
MAX_BIAS = 1e6  # far beyond any logit, and finite in every dtype
MIN_PENALTY = 1e-6  # below it products overflow
MIN_TEMPERATURE = 1e-10  # below it quotients overflow; 0 is greedy
_T = TypeVar("_T")

_NO_EFFECT: tuple[Any, ...] = (None, False)
_CHUNKS = "a result is whole, and a stream yields every token"
# Parameters that only vLLM has
FOREIGN: Mapping[str, Rule] = MappingProxyType(
    {
        "best_of": Rule((None, 1), "every sample that is made is returned", "set only n."),
        "early_stopping": Rule(_NO_EFFECT, "a beam search ends when no better text is possible"),
        "extra_args": Rule((None, {}), "no plug-in here reads them", "leave them out."),
        "flat_logprobs": Rule(_NO_EFFECT, "log-probabilities are mappings by token id"),
        "guided_decoding": Rule((None,), "it has another name", "use structured_outputs."),
        "logits_processors": Rule(
            (None, (), []), "code within a step would not see drafts", "use logit_bias or bad_words."
        ),
        "logprob_token_ids": Rule((None,), "tokens can't be selected", "use logprobs=-1 and read these tokens."),
        "output_kind": Rule((None,), _CHUNKS, "use LLM.stream or AsyncEngine.stream for single tokens."),
        "prompt_logprob_start": Rule((None, 0), "all tokens of a prompt are scored", "use only prompt_logprobs."),
        "prompt_logprob_token_ids": Rule((None,), "tokens can't be selected", "use prompt_logprobs=-1."),
        "repetition_detection": Rule((None,), "repetition does not end a text", "use repetition_penalty."),
        "routed_experts_prompt_start": Rule((None, 0), "routing of experts is not reported"),
        "skip_clone": Rule((None, False, True)),
        "skip_reading_prefix_cache": Rule(
            _NO_EFFECT, "a salt separates caches instead", 'give the prompt a "cache_salt".'
        ),
        "spaces_between_special_tokens": Rule((None, True), "the tokenizer's decoder joins tokens"),
        "stream_interval": Rule((None, 1), _CHUNKS),
        "thinking_token_budget": Rule((None, -1), "reasoning has no limit of its own", "use max_tokens."),
        "trace_decode_token_ids": Rule((None,), "the model chooses the tokens", "put these tokens into the prompt."),
        "use_beam_search": Rule(_NO_EFFECT, "it has another name", "use LLM.beam_search, or set beam_width."),
    }
)


def _read_speculation(given: Any) -> bool | Mapping[str, Any] | None:
    """Check the `speculation` of `SamplingParams`, as far as possible without an engine."""
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculation={given!r} is neither a truth value nor a mapping", "use False to turn it off.")
    for key in given:
        if key not in _SPECULATION_CHECKS:
            raise ConfigError(f"speculation can't set {key!r} per request", suggest(str(key), _SPECULATION_CHECKS))
    for name, check in _SPECULATION_CHECKS.items():
        if name in given:
            check(name, given[name])
    return dict(given)


def _check_prediction(name: str, given: object) -> None:
    if not isinstance(given, str | list | tuple):
        raise ConfigError(f"the prediction is a {type(given).__name__}", "give text or a list of token ids.")
    if len(given) > MAX_PREDICTION:
        unit = "characters" if isinstance(given, str) else "tokens"
        raise ConfigError(f"the prediction has {len(given)} {unit}, more than {MAX_PREDICTION}", "shorten it.")


_SPECULATION_CHECKS: Mapping[str, Check] = dict(
    num_speculative_tokens=kind(
        lambda count: is_whole(count) and 0 <= count <= MAX_SPECULATIVE_TOKENS,
        f"is not a whole number from 0 to {MAX_SPECULATIVE_TOKENS}",
        "use for example 4.",
    ),
    method=kind(
        lambda name: isinstance(name, str), "is not the name of a drafter", "leave it out for the engine's own."
    ),
    verification=kind(lambda name: isinstance(name, str), "is not the name of a verifier", 'use for example "auto".'),
    prediction=optional(_check_prediction),
)


def _reads_foreign(cls: type[_T]) -> type[_T]:
    """Make a class accept vLLM's other parameters if they change nothing, and raise ConfigError for unknown ones."""
    made: Callable[..., None] = cls.__init__

    @functools.wraps(made)
    def init(self: _T, *args: Any, **values: Any) -> None:
        made(self, *args, **_without_foreign(values))

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls


def _changeable(cls: type[_T]) -> type[_T]:
    """Let a setting of an object be changed, as vLLM's users do: the others stay, and all are checked again."""

    def change(self: Any, name: str, value: object) -> None:
        made = dataclasses.replace(self, **{name: value})
        vars(self).clear()  # with what was computed from the old settings
        vars(self).update(vars(made))

    cls.__setattr__ = change  # type: ignore[method-assign]
    return cls


def _without_foreign(values: dict[str, Any]) -> dict[str, Any]:
    known = SamplingParams.__dataclass_fields__
    for name in [name for name in values if name not in known]:
        if name not in FOREIGN:
            raise ConfigError(f"unknown sampling parameter {name!r}", suggest(name, known))
        FOREIGN[name].check(name, values.pop(name))
    return values


@_changeable
@_reads_foreign
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings with vLLM's names. They define a distribution over tokens (arXiv 2211.17192, section 2.2).

    temperature 0 is greedy: the lowest token id among the most likely ones. The settings apply in this
    order: bad_words and allowed_token_ids, logit_bias, end tokens banned below min_tokens, repetition, presence and
    frequency penalties, temperature, top_k, top_p, min_p. `logprobs` belong to the model's own distribution, before
    any setting; -1 reports the whole vocabulary, if the engine's max_logprobs allows it.

    bad_words: texts or lists of token ids to ban. Only two tokenisations of a text are banned, without and with a
    leading space, as in vLLM; the same text in other tokens may occur. The last token of a tokenisation is banned where
    the output ends with its other tokens. allowed_token_ids: the only allowed tokens, including end tokens; None = all.
    detokenize: False makes no text, so stop strings are not possible. truncate_prompt_tokens: keep only this many
    tokens at the end of a prompt; -1 = as many as the context holds together with max_tokens.

    A setting may be changed by an assignment, which has no effect on requests that were made before.

    A `seed` fixes the text: it is the same with speculation on or off, alone or in any batch.
    `speculation` overrides the engine per request: False turns it off, a mapping may set `method`,
    `num_speculative_tokens`, `verification`, and for methods that draft from it a `prediction`: the caller's guess of
    the output, as text or token ids.

    With `beam_width` nothing is sampled. A beam search of that width returns its `n` best texts, scored by the sum of
    log-probabilities / length ** length_penalty under the distribution at temperature 1.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 = all tokens; so is -1, as in other engines
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16  # None = up to the end of the context
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report per token
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculation: bool | Mapping[str, Any] | None = None
    beam_width: int | None = None  # None = no beam search
    length_penalty: float = 1.0  # above 0 favours longer texts
    structured_outputs: StructuredOutputs | None = None  # the form of the text; may be a mapping of its fields
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        self._set(stop=stops, stop_token_ids=_ids("stop_token_ids", self.stop_token_ids))
        self._set(logit_bias=_read_bias(self.logit_bias), speculation=_read_speculation(self.speculation))
        if self.structured_outputs is not None:
            self._set(structured_outputs=read_structured(self.structured_outputs))
        self._set(top_k=0 if self.top_k == -1 else self.top_k)
        self._set(bad_words=_read_words(self.bad_words), allowed_token_ids=_read_allowed(self.allowed_token_ids))
        check_fields(self, _CHECKS)
        self._check_rest()

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return type(self).from_mapping, ({**values, "logit_bias": dict(self.logit_bias)},)

    @cached_property
    def softened(self) -> SamplingParams:
        """These settings; greedy ones become temperature 1, unfiltered."""
        if not self.greedy:
            return self
        return dataclasses.replace(self, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    @cached_property
    def edits(self) -> bool:
        """Whether the logits of single tokens may change before the distribution is made."""
        return bool(self.logit_bias) or self.penalised or self.min_tokens > 0

    @cached_property
    def biased(self) -> array[int]:
        """The tokens of logit_bias, in int64."""
        return array("q", self.logit_bias)

    @cached_property
    def biases(self) -> array[float]:
        """The values added to the logits of `biased`, in float64."""
        return array("d", self.logit_bias.values())

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_rest(self) -> None:
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0", "use temperature=0 for greedy decoding.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}", "lower min_tokens."
            )
        texts: tuple[object, ...] = tuple(self.stop)
        if len(texts) > MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(f"stop must be at most {MAX_STOPS} non-empty strings", "remove empty or surplus ones.")
        if (length := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise ConfigError(
                f"stop has {length} characters, more than {MAX_STOP_CHARACTERS} over all strings",
                "use shorter strings.",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ConfigError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, more than {MAX_STOP_TOKEN_IDS}", "use fewer."
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ConfigError(f"temperature={self.temperature} is too small to divide by", "use 0 for greedy decoding.")
        if self.stop and not self.detokenize:
            raise ConfigError("stop strings need text, and detokenize=False makes none", "use stop_token_ids.")
        if self.truncate_prompt_tokens == 0:
            raise ConfigError("truncate_prompt_tokens=0 leaves no prompt", "keep at least one token.")
        self._check_search()

    def _check_search(self) -> None:
        """Refuse settings that a beam search does not use."""
        if self.beam_width is None:
            if self.length_penalty != 1:
                raise ConfigError(f"length_penalty={self.length_penalty} needs a beam search", "set beam_width too.")
            return
        if self.n > self.beam_width:
            raise ConfigError(f"n={self.n} is above beam_width={self.beam_width}", "lower n or raise beam_width.")
        for name, useless in self._useless_for_search().items():
            if useless:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} can't be combined with beam_width={self.beam_width}",
                    f"leave out {name}, or beam_width.",
                )

    def _useless_for_search(self) -> dict[str, bool]:
        """Return the settings that a beam search refuses, and whether each is set. A beam search samples no tokens."""
        named = isinstance(self.speculation, Mapping) and self.speculation.get("verification", "auto") != "auto"
        return {
            "temperature": self.temperature not in (0, 1),
            "top_k": self.top_k != 0,
            "top_p": self.top_p != 1,
            "min_p": self.min_p != 0,
            "stop": bool(self.stop),
            "logprobs": self.logprobs is not None,
            "speculation": named,
            "structured_outputs": self.structured_outputs is not None,
            "bad_words": bool(self.bad_words),
            "allowed_token_ids": self.allowed_token_ids is not None,
        }

    @cached_property
    def greedy(self) -> bool:
        """Whether the distribution is a point mass."""
        return self.temperature == 0

    @cached_property
    def penalised(self) -> bool:
        """Whether the distribution depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def prediction(self) -> str | Sequence[int] | None:
        """The caller's guess of the output, as given; None if there is none."""
        return self.speculation.get("prediction") if isinstance(self.speculation, Mapping) else None

    def with_prediction(self, tokens: Sequence[int]) -> SamplingParams:
        """Return these settings with the prediction's text replaced by token ids."""
        assert isinstance(self.speculation, Mapping), "there is no prediction"
        return dataclasses.replace(self, speculation=dict(self.speculation, prediction=tokens))

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with other values of some settings. Raises ConfigError as the constructor does."""
        if changes:
            return dataclasses.replace(self, **changes)
        made = object.__new__(type(self))
        made._set(**{name: vars(self)[name] for name in self.__dataclass_fields__})  # no value computed for `self`
        return made

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Build from keyword values. None is the default of each, except for max_tokens, where None is a value."""
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping. Raises ConfigError with a suggestion for an unknown key."""
        return cls(**values)


_CHECKS: Mapping[str, Check] = {
    "n": whole_from(1, MAX_N),
    "temperature": number_from(0, 100),
    "top_k": whole_from(0, MAX_COUNT),
    "top_p": number_from(0, 1),
    "min_p": number_from(0, 1),
    "repetition_penalty": number_from(MIN_PENALTY, 100),
    "presence_penalty": number_from(-100, 100),
    "frequency_penalty": number_from(-100, 100),
    "max_tokens": optional(whole_from(1, MAX_COUNT)),
    "min_tokens": whole_from(0, MAX_COUNT),
    "logprobs": optional(whole_from(-1, MAX_COUNT)),
    "prompt_logprobs": optional(whole_from(-1, MAX_COUNT)),
    "truncate_prompt_tokens": optional(whole_from(-1, MAX_COUNT)),
    "seed": optional(whole_from(-(2**63), 2**64 - 1)),
    "beam_width": optional(whole_from(1, MAX_N)),
    "length_penalty": number_from(-10, 10),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"), check_flag),
}


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} is not a list", f"give {name} as a list.") from None


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids; raises ConfigError for anything else among them."""
    tokens = _listed(name, value)
    if set(map(type, tokens)) <= {int}:  # nearly always, and there may be one for each token of a vocabulary
        return tokens
    if wrong := [token for token in tokens if not is_whole(token)]:
        raise ConfigError(f"{name} has {wrong[0]!r:.80} among token ids", "give whole numbers.")
    return tokens


def _read_words(given: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        raise ConfigError(f"bad_words={given!r} is one text", "give a list of texts.")
    words = tuple(word if isinstance(word, str) else _ids("bad_words", word) for word in _listed("bad_words", given))
    if len(words) > MAX_BAD_WORDS or not all(words):
        raise ConfigError(
            f"bad_words must be at most {MAX_BAD_WORDS} non-empty entries", "remove empty or surplus ones."
        )
    if (length := sum(map(len, words))) > MAX_BAD_CHARACTERS:
        raise ConfigError(f"bad_words has {length} characters, more than {MAX_BAD_CHARACTERS}", "ban fewer words.")
    return words


def _read_allowed(given: Any) -> tuple[int, ...] | None:
    tokens = None if given is None else _ids("allowed_token_ids", given)
    if tokens == ():
        raise ConfigError("allowed_token_ids is empty, so no token is allowed", "allow one, or leave it out.")
    return tokens


def _read_bias(given: Any) -> Mapping[int, float]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"logit_bias={given!r} is not a mapping", "map token ids to numbers.")
    if given and len(given) > MAX_LOGIT_BIAS:
        raise ConfigError(
            f"logit_bias has {len(given)} entries, more than {MAX_LOGIT_BIAS}",
            "bias fewer tokens.",
        )
    return MappingProxyType({_token_id(key): _bias(value) for key, value in (given or {}).items()})


def _token_id(key: Any) -> int:
    """Read a token id. Its digits as text are accepted too, because JSON has no other keys."""
    if not isinstance(key, bool) and isinstance(key, Integral):
        return int(key)
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    raise ConfigError(f"logit_bias has the key {key!r:.80}, not a token id", "use token ids as keys.")


def _bias(given: Any) -> float:
    """Read a bias. Text is accepted too, because JSON has no other form of -inf."""
    try:
        value = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if math.isnan(value) or value > MAX_BIAS:
        raise ConfigError(
            f"logit_bias has the value {given!r}, not a number up to {MAX_BIAS:.0f}",
            "use a smaller number, or -inf to ban a token.",
        )
    return value
