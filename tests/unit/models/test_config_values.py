"""Every family answers a wrong entry of config.json with a ModelError, or reads it; never with another error."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from speculant import plugins
from speculant.errors import ModelError
from speculant.models import DecoderConfig
from tests.unit.models.families import SMALL, VARIANTS, cases

VALUES: list[Any] = [
    None, 0, -1, 1, 2, 3, 1.5, 1e300, -1e300, 10**30, math.nan, math.inf, True, False, "", "x", "gelu", [], [1], [[1]],
    [None] * 3, [0.5] * 3, [0, 1, 1], ["full_attention"], ["full_attention", "sliding_attention", "x"], {}, {"a": 1},
    {"full_attention": None}, {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}, {"rope_type": ["x"]},
    {"rope_type": "yarn", "factor": 0}, {"rope_type": "longrope", "short_factor": [1], "long_factor": "x"},
]  # fmt: skip
CASES = cases(with_encoders=True)
FIRST = dict(reversed(CASES))
KNOWN = [
    pytest.param(
        *case,
        id="-".join(case),
        marks=[] if case[0] in ("llama", "gpt2") and FIRST[case[0]] == case[1] else [pytest.mark.slow],
    )
    for case in CASES
    if case[0] in CONFIG_MAPPING
]


def config_of(family: str, variant: str) -> dict[str, Any]:
    """Return the config.json of a small model."""
    given = {**SMALL, **VARIANTS.get(family, {}).get(variant, {})}
    hf: dict[str, Any] = AutoConfig.for_model(family, **given).to_dict()
    return hf


@pytest.mark.parametrize(("family", "variant"), KNOWN)
def test_any_value_of_any_entry(family: str, variant: str) -> None:
    hf, read = config_of(family, variant), plugins.load("speculant.models", family).read_config
    assert isinstance(read(hf), DecoderConfig)
    refused = 0
    for key in hf:
        for changed in [{**hf, key: value} for value in VALUES] + [{k: v for k, v in hf.items() if k != key}]:
            try:
                assert isinstance(read(changed), DecoderConfig)
            except ModelError:
                refused += 1
    assert refused > len(hf)
