"""Lets a target write the texts that heads and drafts are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speculant.cli.terminal import progress, shown_progress

if TYPE_CHECKING:
    from speculant.engine.llm import LLM
    from speculant.lab.training.heads.texts import TextsPlan
    from speculant.text.tokenizer import Tokenizer

_AT_A_TIME = 64  # prompts per call
_MOST_DOCUMENTS = 400  # to cut prompts from


def write_texts(plan: TextsPlan, data: Sequence[Path], suffix: str, width: int) -> None:
    """Let the target continue prompts. The last ones are from files that no model made by `train lm` is trained on.

    width: numbers to store of a token's hidden states.
    """
    from speculant.engine.llm import LLM
    from speculant.lab.training.heads import job
    from speculant.lab.training.heads.texts import HELD_OUT_SHARE, most_texts

    count = most_texts(plan.tokens, plan.seq, width, plan.cache_gib)
    num_held_out = max(1, round(HELD_OUT_SHARE * count))
    llm = LLM(plan.target, max_model_len=plan.seq, max_num_seqs=8, seed=plan.seed)
    with progress("Reading files for prompts"):
        prompts = _prompts(plan, data, suffix, llm.tokenizer, (count - num_held_out, num_held_out))
    texts = list[list[int]]()
    with shown_progress("The target writes texts") as watch:
        for first in range(0, count, _AT_A_TIME):
            texts += _continued(llm, plan, prompts[first : first + _AT_A_TIME], first)
            if watch:
                watch(min(1.0, (first + _AT_A_TIME) / count))
    job.save_texts(plan, texts)


def _prompts(
    plan: TextsPlan, data: Sequence[Path], suffix: str, tokenizer: Tokenizer, counts: tuple[int, int]
) -> list[list[int]]:
    """Return prompts from the files that `train lm` trains on, then from held-out ones; counts: how many of each."""
    from speculant.lab.training.corpus import read_corpus, standard_library
    from speculant.lab.training.heads import job

    begins = tokenizer.encode("")[:1] or sorted(tokenizer.special_ids)[:1] or [0]
    corpus = read_corpus(tuple(data) or (standard_library(),), suffix)
    prompts = list[list[int]]()
    for documents, count in zip((corpus.training, corpus.held_out), counts, strict=True):
        read = [
            tokenizer.encode(document.text, add_special_tokens=False)
            for document in documents[:: max(1, len(documents) // _MOST_DOCUMENTS)]
        ]
        prompts += job.cut_prompts(read, plan, begins[0], count)
    return prompts


def _continued(llm: LLM, plan: TextsPlan, prompts: Sequence[list[int]], first: int) -> list[list[int]]:
    """Return prompts with their continuations, `seq` tokens each. first: the number of the first prompt."""
    from speculant.params import SamplingParams

    params = [
        SamplingParams(
            temperature=plan.temperature, max_tokens=plan.seq - len(prompt), ignore_eos=True, seed=first + place
        )
        for place, prompt in enumerate(prompts)
    ]
    made = llm.generate(prompts, params)
    return [[*prompt, *each.outputs[0].token_ids] for prompt, each in zip(prompts, made, strict=True)]
