"""Lets a target write the texts that heads and drafts are trained on, and computes their hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from speculant.cli.terminal import progress, shown_progress
from speculant.errors import ConfigError

if TYPE_CHECKING:
    from speculant.engine.llm import LLM
    from speculant.lab.training.heads.texts import TextsPlan
    from speculant.text.tokenizer import Tokenizer

_AT_A_TIME = 256  # texts that are written together, and kept together
_SEQUENCES = 64  # of a pass
_MOST_DOCUMENTS = 400  # to cut prompts from

Write = Callable[[int, int], list[list[int]]]  # the first text's number, the number of texts -> the texts


def prepare_texts(plan: TextsPlan, hidden_size: int, layers: Sequence[int] = ()) -> None:
    """Let the target write missing texts, and compute missing hidden states.

    hidden_size: the target's. layers: see `open_texts`. An interrupted run keeps the texts that it has written.
    """
    from speculant.engine.llm import LLM
    from speculant.lab.training.heads.texts import missing_states, open_texts, wanted_texts

    count = wanted_texts(plan, hidden_size * (1 + len(layers)))
    if count is None and not missing_states(plan.out, hidden_size, layers):
        return
    with progress("Loading the target"):
        llm = LLM(plan.target, max_model_len=plan.seq, max_num_seqs=_SEQUENCES, seed=plan.seed)
    if count is not None:
        _write_texts(llm, plan, count)
    with shown_progress("Computing hidden states") as watch:
        open_texts(plan.out, llm.checkpoint.model, watch, layers)


def _write_texts(llm: LLM, plan: TextsPlan, count: int) -> None:
    """Write texts in parts. The last texts are held out, and so are the files or questions of their prompts."""
    from speculant.lab.training.heads.texts import PartialTexts

    with progress("Reading prompts"):
        write = _conversations(llm, plan, count) if plan.chat else _continuations(llm, plan, count)
    with shown_progress("The target writes texts") as watch, PartialTexts.open(plan, count) as kept:
        for first in range(len(kept), count, _AT_A_TIME):
            kept.add(write(first, min(_AT_A_TIME, count - first)))
            watch(len(kept) / count)
        kept.finish()


def _continuations(llm: LLM, plan: TextsPlan, count: int) -> Write:
    """Return a function that continues prompts cut from files."""
    from speculant.lab.training.heads.texts import num_held_out

    held_out = num_held_out(count)
    prompts = _prompts(plan, llm.tokenizer, (count - held_out, held_out))

    def write(first: int, number: int) -> list[list[int]]:
        chosen = prompts[first : first + number]
        added = _continued(llm, plan, chosen, [plan.seq - len(prompt) for prompt in chosen], first, ignore_eos=True)
        return [[*prompt, *each] for prompt, each in zip(chosen, added, strict=True)]

    return write


def _conversations(llm: LLM, plan: TextsPlan, count: int) -> Write:
    """Return a function that writes conversations; without data, the target writes the first questions too."""
    from speculant.lab.training.heads.conversations import Turns, write_conversations

    turns = Turns.of(llm.tokenizer)
    questions = _questions(llm.tokenizer, plan, count)

    def write(first: int, number: int) -> list[list[int]]:
        def go_on(texts: Sequence[list[int]], most: Sequence[int], turn: int) -> list[list[int]]:
            return _continued(llm, plan, texts, most, first + turn * count, ignore_eos=False)

        ends = llm.checkpoint.eos_token_ids
        return write_conversations(turns, questions[first : first + number], plan.seq, ends, go_on)

    return write


def _questions(tokenizer: Tokenizer, plan: TextsPlan, count: int) -> list[list[int]]:
    """Return each conversation's first question; empty = the target writes it.

    Held-out texts have questions of their own.
    """
    from speculant.lab.training.heads.texts import num_held_out
    from speculant.text.text_files import read_prompts

    if not plan.data:
        _check_variety(plan, count, 1)
        return [[] for _ in range(count)]
    for path in plan.data:
        if not path.is_file():
            raise ConfigError(f"{path} is not a file", "with --chat, --data names files with one question per line.")
    read = [each.content for path in plan.data for each in read_prompts(path)]
    known = [tokenizer.encode(each, add_special_tokens=False) if isinstance(each, str) else each for each in read]
    fitting = [question for question in known if len(question) < plan.seq // 2]
    if len(fitting) < 2:
        raise ConfigError(
            f"{len(fitting)} of {len(known)} questions have fewer than {plan.seq // 2} tokens",
            "raise --seq, or name more questions.",
        )
    _check_variety(plan, count, len(fitting))
    last = num_held_out(len(fitting))
    parts = (fitting[:-last], count - num_held_out(count)), (fitting[-last:], num_held_out(count))
    return [own[place % len(own)] for own, number in parts for place in range(number)]


def _check_variety(plan: TextsPlan, count: int, beginnings: int) -> None:
    """Check that no text is written twice: at temperature 0 its beginning determines it. Raises ConfigError."""
    if plan.temperature == 0 and count > beginnings:
        raise ConfigError(
            f"at temperature 0, {count} texts would be {beginnings} different ones",
            "set a --temperature, lower --tokens, or name more questions by --data.",
        )


def _prompts(plan: TextsPlan, tokenizer: Tokenizer, counts: tuple[int, int]) -> list[list[int]]:
    """Return prompts from the files that `train lm` trains on, then from held-out ones; counts: how many of each."""
    from speculant.lab.training.corpus import read_corpus, standard_library
    from speculant.lab.training.heads import job

    begins = tokenizer.encode("")[:1] or sorted(tokenizer.special_ids)[:1] or [0]
    corpus = read_corpus(tuple(plan.data) or (standard_library(),), plan.suffix)
    prompts = list[list[int]]()
    for documents, count in zip((corpus.training, corpus.held_out), counts, strict=True):
        read = [
            tokenizer.encode(document.text, add_special_tokens=False)
            for document in documents[:: max(1, len(documents) // _MOST_DOCUMENTS)]
        ]
        prompts += job.cut_prompts(read, plan, begins[0], count)
    return prompts


def _continued(
    llm: LLM, plan: TextsPlan, texts: Sequence[list[int]], most: Sequence[int], seed: int, ignore_eos: bool
) -> list[list[int]]:
    """Return the tokens that the target adds to texts. seed: that of the first; each further text has the next one."""
    from speculant.params import SamplingParams

    params = [
        SamplingParams(temperature=plan.temperature, max_tokens=each, ignore_eos=ignore_eos, seed=seed + place)
        for place, each in enumerate(most)
    ]
    return [list(made.outputs[0].token_ids) for made in llm.generate(list(texts), params, use_tqdm=False)]
