"""The roles of drafting methods, by name: the one table in which drafters are named outside their own files.

A method without a role needs no entry. A role whose methods are not installed stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculant import plugins
from speculant.errors import ConfigError

if TYPE_CHECKING:  # without torch, so that commands' help is fast
    from speculant.drafting.base import Method

KIND = "speculant.drafting"

DEFAULT = "fallback"  # is used if no method is named
WITH_MODEL = "draft_model"  # drafts with a model alone; other methods use it for a model's drafts
LOOKUPS = ("suffix", "prompt_lookup")  # look drafts up in text; others combine them in this order if none are named
WITH_MASKS = "peagle"  # drafts with heads that read masks
WITH_BLOCKS = "dflash"  # drafts with heads whose masks are a block
IN_TARGET = ("mtp",)  # draft with a head that may be among the target's weights
PREDICTION = "prediction"  # drafts from a request's own prediction and nothing else
REFUSED = {  # kinds of drafters of other programs, each with a description
    "custom_class": "a class for vLLM's proposers; docs/adding-a-drafter.md has the form of drafters here",
    "dspark": "blocks of drafts with a table of pairs of tokens",
    "extract_hidden_states": "the target's states in a file, and no drafts",
    "mlp_speculator": "perceptrons over a state and the last token",
    "pard2": "a draft model that reads the target's states",
}

# By method of vLLM: the method here if parallel_drafting is set.
IN_ONE_PASS: Mapping[Any, str] = {None: "parallel", "draft_model": "parallel", "eagle3": "peagle"}
_OTHER_NAMES = {"ngram_gpu": "ngram", "[ngram]": "ngram"}


def own_name(name: str) -> str:
    """Return our name of one of vLLM's methods, which has a name for each family with multi-token prediction."""
    return "mtp" if name.endswith("_mtp") else _OTHER_NAMES.get(name, name)


def method_facts(name: str) -> Method:
    """Return the facts of a method. Raises ConfigError for an unknown one."""
    if name in REFUSED:
        raise ConfigError(
            f"method {name!r} ({REFUSED[name]}) is not supported", "docs/drafters.md lists those that are."
        )
    facts: Method = plugins.load(KIND, name).METHOD
    return facts


def first_installed(*names: str) -> str:
    """Return the first of these names that has a method. Raises ConfigError if none has."""
    methods = installed(*names)
    if not methods:
        raise ConfigError(f"none of the usual drafting methods ({', '.join(names)}) is installed", "name a method.")
    return methods[0]


def lookup_methods() -> list[str]:
    """Return the methods that look drafts up in text, in their order. Raises ConfigError if there is none."""
    methods = installed(*LOOKUPS)
    if not methods:
        raise ConfigError("no installed drafting method looks drafts up in text", "name the methods to use.")
    return methods


def method_within(place: Path, num_layers: int) -> str | None:
    """Return the method that drafts with a head among a model's weights, in a folder; None = they have none."""
    return next((name for name in installed(*IN_TARGET) if plugins.load(KIND, name).stored_in(place, num_layers)), None)


def takes_model(name: str) -> bool:
    """Whether a method drafts with a model if one is named."""
    facts = method_facts(name)
    return facts.uses_model or facts.accepts_model


def installed(*names: str) -> list[str]:
    """Return the names that have a method."""
    found = plugins.names(KIND)
    return [name for name in names if name in found]
