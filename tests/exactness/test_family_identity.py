"""Speculation changes no text of any family: alone and in batches, greedy and seeded, with every drafter.

Weights are floating-point numbers, rounded, or blocks of Q4_K and other kinds in GGUF files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
from transformers import AutoConfig

from speculant import plugins
from speculant.kernels import usable_sets
from tests.exactness.identity import Job, params_of, prompts_of
from tests.exactness.selection import combinations
from tests.examples import examples
from tests.gguf_models import convert
from tests.models import END, HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint
from tests.unit.models.families import ENCODER_DECODERS, REPEATING, STATES, VARIANTS, cases, cases_with
from tests.unit.models.test_gguf_families import QUICK, STORED, WIDE, kind_of

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINES: dict[str, dict[str, str]] = {
    "float64": {"dtype": "float64", "kernels": "reference"},
    "float32": {"dtype": "float32", "kernels": "native"},
    "bfloat16": {"dtype": "bfloat16", "kernels": "native"},
    "int8": {"dtype": "bfloat16", "kernels": "native", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "kernels": "native", "quantization": "int4"},
}
BLOCKS = "q4_k"
WEIGHTS = [name for name, engine in ENGINES.items() if engine["kernels"] == "reference" or usable_sets()]
DRAFTERS = plugins.names("speculant.drafting")
MOST_POSITIONS = 32  # as many as the smallest variant has
PROMPTS = prompts_of(4)
PARAMS = params_of(4, 12)  # with 8, some greedy texts are equal, and some repeat nothing that can be copied


class Case(NamedTuple):
    """A variant of a family, who drafts, what its weights are, and how it draws."""

    family: str
    variant: str
    drafter: str
    weights: str
    distribution: str

    @classmethod
    def of(cls, family: str, variant: str, drafter: str) -> Case:
        """Return a case; weights and distributions take turns."""
        turn = cases(with_encoders=True).index((family, variant)) + DRAFTERS.index(drafter)
        distribution = "seeded" if family in REPEATING else [*PARAMS][turn // len(WEIGHTS) % len(PARAMS)]
        return cls(family, variant, drafter, WEIGHTS[turn % len(WEIGHTS)], distribution)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, float], str]:
    """Return what writes a checkpoint of a variant, once; noise: of a draft model."""

    @functools.cache
    def written(family: str, variant: str, noise: float) -> str:
        settings = tuple(VARIANTS.get(family, {}).get(variant, {}).items())
        folder = tmp_path_factory.mktemp(family) / "model"
        return write_checkpoint(folder, Shape(family=family, layers=3, noise=noise, settings=settings))

    return written


@pytest.fixture(scope="module")
def write_blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, float], str]:
    """Return what writes a GGUF file of a variant that such files can hold, once."""

    @functools.cache
    def written(family: str, variant: str, noise: float) -> str:
        inner = {"intermediate_size": 256 * (4 if family == "gpt2" else 1), "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        own = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False}
        if family in STATES:
            own |= {"linear_value_head_dim": 64, "linear_num_value_heads": 4}  # the result of all has whole blocks
            own |= {"shared_expert_intermediate_size": 256, "shared_intermediate_size": 256}
        given = {**heads, **STORED[family][variant], **WIDE, **inner, **own}
        settings = {**AutoConfig.for_model(family, **given).to_dict(), **given, "eos_token_id": END}
        folder = tmp_path_factory.mktemp(family)
        shape = Shape(family=family, noise=noise, settings=tuple(settings.items()))
        write_checkpoint(folder / "model", shape)
        return str(convert(folder / "model", folder / "model.gguf", kind_of))

    return written


@pytest.mark.covering(1)
@pytest.mark.parametrize("names", cases_with(DRAFTERS, with_encoders=True))
def test_no_drafter_changes_a_text_of_a_family(
    names: tuple[str, str, str], write: Callable[[str, str, float], str]
) -> None:
    check(Case.of(*names), write, HIDDEN_SIZE)


DECODERS = [family for family in STORED if family not in ENCODER_DECODERS]
# In `make test`, a few families with one drafter each; all drafters: above
BLOCKS_DRAFTERS = {family: DRAFTERS[2 * place % len(DRAFTERS)] for place, family in enumerate(DECODERS)}


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("family", "drafter"),
    combinations(lambda family, drafter: family in QUICK and drafter == BLOCKS_DRAFTERS[family], DECODERS, DRAFTERS),
)
def test_no_drafter_changes_a_text_of_blocks(
    family: str, drafter: str, write_blocks: Callable[[str, str, float], str]
) -> None:
    distribution = [*PARAMS][DRAFTERS.index(drafter) % 2]
    check(Case(family, next(iter(STORED[family])), drafter, BLOCKS, distribution), write_blocks, 256)


def check(case: Case, write: Callable[[str, str, float], str], hidden_size: int) -> None:
    """Compare a case's texts with those of plain decoding, in batches, and alone in `make test-all`."""
    if case.drafter in ("pass", "specinfer") and case.family in STATES:
        pytest.skip("a state takes no look-ahead rows, and drafts no trees")
    target, draft = (write(case.family, case.variant, noise) for noise in (0.0, 0.02))
    engine = {"max_model_len": MOST_POSITIONS, **ENGINES.get(case.weights, {})}
    job, params = Job(target, PROMPTS, (hidden_size, VOCAB_SIZE), engine), PARAMS[case.distribution]
    plain = job.plain(params)
    for batch in (4, 1)[: examples(2, least=1)]:
        job.check(case.drafter, draft, params, plain, max_num_seqs=batch)
