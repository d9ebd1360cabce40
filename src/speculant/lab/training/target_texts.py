"""Texts that a target writes for training, with the hidden states of their tokens, on disk.

The target continues prompts, or writes conversations (arXiv 2406.08464):

    begin                 question    asked                    answer    answered           question ...
    <system><user>        ...         <end><assistant>         ...       <end><user>        ...

A model that was trained on conversations continues `begin` with a question. So no data are needed, and the texts are
like those that the model writes for its users.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from speculant.cache import slotted_cache
from speculant.engine import LLM
from speculant.errors import ConfigError, SpeculantError
from speculant.lab.training.config import TargetRunConfig
from speculant.lab.training.corpus import read_corpus, standard_library
from speculant.lab.training.trainer import SILENT, Batches, Show, Watch
from speculant.models import CausalLM, SequenceInput, build_batch
from speculant.params import SamplingParams
from speculant.text import Tokenizer, read_prompts
from speculant.types import DraftTree

FILE, STATES = "texts.safetensors", "states.f16"
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Texts(Batches):
    """Texts of equal length. tokens [w, n] int64; states [w, n, hidden] float16, after the target's final norm.

    Batches [b, 1 + n] have the places of texts before their tokens, in another order in each epoch. taps: states of
    other layers, of the same form. The last `num_held_out` texts are not trained on. States are read
    from disk when they are used, and given on `device`.
    """

    tokens: Tensor
    states: NDArray[np.float16]
    num_held_out: int
    taps: tuple[NDArray[np.float16], ...] = ()
    device: torch.device | str = "cpu"

    @property
    def num_training(self) -> int:
        """The number of texts that are trained on."""
        return len(self.tokens) - self.num_held_out

    @cached_property
    def opening(self) -> int:
        """How many first tokens all texts share, such as a chat template's; at most half of a text.

        Losses and figures leave them out, because a drafter never has to predict them.
        """
        same = (self.tokens == self.tokens[0]).all(0)
        return min(int(same.long().cumprod(0).sum()), self.tokens.shape[1] // 2)

    def states_of(self, rows: Tensor) -> Tensor:
        """Return the states [b, n, hidden] of texts [b] in float32."""
        return self._read(self.states, rows)

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Return the tokens [b, n] of texts."""
        return self.tokens[rows].to(self.device)

    def taps_of(self, rows: Tensor) -> Tensor:
        """Return the states of the other layers, side by side: [b, n, layers * hidden] in float32."""
        return torch.cat([self._read(states, rows) for states in self.taps], dim=-1)

    @override
    def batch(self, first: int, count: int) -> Tensor:
        rows = torch.tensor([self._place(number) for number in range(first, first + count)])
        return torch.cat((rows[:, None], self.tokens[rows]), dim=1)

    def _read(self, states: NDArray[np.float16], rows: Tensor) -> Tensor:
        return torch.from_numpy(np.stack([states[row] for row in rows.tolist()])).to(self.device).float()

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, self.num_training)
        return int(np.random.default_rng(epoch).permutation(self.num_training)[index])


def num_held_out(count: int) -> int:
    """Return how many of `count` texts are held out; they are the last ones."""
    return max(1, round(HELD_OUT_SHARE * count))


def save_texts(folder: Path, texts: Sequence[Sequence[int]], seq: int, seed: int) -> None:
    """Write the tokens of texts of at least `seq` tokens. Raises ConfigError if there are fewer than 2."""
    whole = [list(text[:seq]) for text in texts if len(text) >= seq]
    if len(whole) < 2:
        raise ConfigError(
            f"{len(whole)} of {len(texts)} texts have {seq} tokens", "lower --seq, or name more files for prompts."
        )
    temporary = folder / (FILE + ".part")
    save_file({"tokens": torch.tensor(whole)}, temporary, metadata={"seed": str(seed)})
    os.replace(temporary, folder / FILE)


def open_texts(folder: Path, model: CausalLM, watch: Watch | None = None, layers: Sequence[int] = ()) -> Texts:
    """Return the texts of a folder; missing states are computed by the model and written.

    layers: whose states are kept beside those after the final norm, numbered as in `DrafterNeeds.hidden_layers`.
    """
    tokens = _tokens(folder)
    shape, paths = (*tokens.shape, model.hidden_size), _paths(folder, layers)
    missing = [layer for layer, path in paths.items() if not _is_whole(path, tokens, model.hidden_size)]
    if missing:
        _write_states({layer: paths[layer] for layer in missing}, tokens, model, watch)
    states = {layer: np.memmap(path, dtype=np.float16, mode="r", shape=shape) for layer, path in paths.items()}
    taps = tuple(states[layer] for layer in layers)
    return Texts(tokens, states[None], num_held_out(len(tokens)), taps, model.cache_shape.device)


def missing_states(folder: Path, hidden_size: int, layers: Sequence[int]) -> bool:
    """Whether states of a folder's texts are missing."""
    tokens = _tokens(folder)
    return not all(_is_whole(path, tokens, hidden_size) for path in _paths(folder, layers).values())


def _tokens(folder: Path) -> Tensor:
    with safe_open(folder / FILE, framework="pt") as opened:
        tokens: Tensor = opened.get_tensor("tokens")
    return tokens


def _paths(folder: Path, layers: Sequence[int]) -> dict[int | None, Path]:
    """Return the files of states by layer; None = those after the final norm."""
    return {None: folder / STATES, **{layer: folder / f"states-{layer}.f16" for layer in layers}}


def _is_whole(path: Path, tokens: Tensor, hidden_size: int) -> bool:
    return path.exists() and path.stat().st_size == 2 * tokens.numel() * hidden_size


def _write_states(paths: Mapping[int | None, Path], tokens: Tensor, model: CausalLM, watch: Watch | None) -> None:
    """Write the states of each layer to its file; numbers beyond float16 become its largest ones."""
    temporary = {layer: path.with_suffix(".part") for layer, path in paths.items()}
    most, taps = torch.finfo(torch.float16).max, [layer for layer in paths if layer is not None]
    cache = slotted_cache(model.cache_shape, 1, tokens.shape[1])
    with ExitStack() as stack, torch.inference_mode():
        files = {layer: stack.enter_context(path.open("wb")) for layer, path in temporary.items()}
        for place, text in enumerate(tokens.tolist(), 1):
            batch = build_batch([SequenceInput(0, text, DraftTree.empty())], cache, model.cache_shape.device)
            hidden = model.forward(batch, cache.storage, taps)
            cache.release(0)
            for layer, file in files.items():
                states = hidden.last if layer is None else hidden.taps[taps.index(layer)]
                file.write(states.float().clamp(-most, most).half().cpu().numpy().tobytes())
            if watch:
                watch(place / len(tokens))
    for layer, path in paths.items():
        os.replace(temporary[layer], path)


PART = "texts.part.jsonl"
PROMPT_SHARE = 8  # a prompt is the first eighth of a text
MOST_OF_QUESTION = 4  # a question that the target writes takes at most a quarter of a text
_AT_A_TIME = 256  # texts that are written together, and kept together
_SEQUENCES = 64  # of a pass
_MOST_DOCUMENTS = 400  # to cut prompts from
_MARKS = ("first-question", "first-answer", "second-question")
_FIX = "leave out --chat, or add a chat template to the target's folder that shows every message."

Write = Callable[[int, int], list[list[int]]]  # the first text's number, the number of texts -> the texts
# texts, the most tokens to add to each, the number of the turn -> the tokens that the target adds
Continue = Callable[[Sequence[list[int]], Sequence[int], int], list[list[int]]]


def prepare_texts(plan: TargetRunConfig, target: CausalLM, show: Show = SILENT, layers: Sequence[int] = ()) -> Texts:
    """Return a run's texts, after the target has written missing ones and computed missing hidden states.

    layers: see `open_texts`. An interrupted run keeps the texts that it has written.
    """
    count = wanted_texts(plan, target.hidden_size * (1 + len(layers)))
    if count is not None or missing_states(plan.out, target.hidden_size, layers):
        began = time.monotonic()
        show.tell(_announced(plan, count))
        with show.doing("Loading the target"):
            llm = LLM(plan.target, max_model_len=plan.seq, max_num_seqs=_SEQUENCES, seed=plan.seed)
        if count is not None:
            _write_texts(llm, plan, count, show)
        with show.watched("Computing hidden states") as watch:
            open_texts(plan.out, llm.checkpoint.model, watch, layers)
        show.tell(f"prepared in {(time.monotonic() - began) / 60:.1f} minutes; the training begins")
    return open_texts(plan.out, target, layers=layers)


def _announced(plan: TargetRunConfig, count: int | None) -> str:
    """Return a line on what comes before the training. count: of texts to write; None = they are there."""
    texts = "" if count is None else f"writes {count:,} texts of {plan.seq} tokens (--tokens), and "
    then = f"; the {plan.minutes:g} minutes begin after that" if plan.minutes else ""
    return f"preparation: the target {texts}computes its hidden states{then}"


def _write_texts(llm: LLM, plan: TargetRunConfig, count: int, show: Show) -> None:
    """Write texts in parts. The last texts are held out, and so are the files or questions of their prompts."""
    with show.doing("Reading prompts"):
        write = _conversations(llm, plan, count) if plan.chat else _continuations(llm, plan, count)
    with show.watched("The target writes texts") as watch, PartialTexts.open(plan, count) as kept:
        for first in range(len(kept.texts), count, _AT_A_TIME):
            kept.add(write(first, min(_AT_A_TIME, count - first)))
            watch(len(kept.texts) / count)
        kept.finish()


def _continuations(llm: LLM, plan: TargetRunConfig, count: int) -> Write:
    """Return a function that continues prompts cut from files."""
    held_out = num_held_out(count)
    prompts = _prompts(plan, llm.tokenizer, (count - held_out, held_out))

    def write(first: int, number: int) -> list[list[int]]:
        chosen = prompts[first : first + number]
        added = _continued(llm, plan, chosen, [plan.seq - len(prompt) for prompt in chosen], first, ignore_eos=True)
        return [[*prompt, *each] for prompt, each in zip(chosen, added, strict=True)]

    return write


def _conversations(llm: LLM, plan: TargetRunConfig, count: int) -> Write:
    """Return a function that writes conversations; without data, the target writes the first questions too."""
    turns = Turns.of(llm.tokenizer)
    questions = _questions(llm.tokenizer, plan, count)

    def write(first: int, number: int) -> list[list[int]]:
        def go_on(texts: Sequence[list[int]], most: Sequence[int], turn: int) -> list[list[int]]:
            return _continued(llm, plan, texts, most, first + turn * count, ignore_eos=False)

        ends = llm.checkpoint.eos_token_ids
        return write_conversations(turns, questions[first : first + number], plan.seq, ends, go_on)

    return write


def _questions(tokenizer: Tokenizer, plan: TargetRunConfig, count: int) -> list[list[int]]:
    """Return each conversation's first question; empty = the target writes it.

    Held-out texts have questions of their own.
    """
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


def _check_variety(plan: TargetRunConfig, count: int, beginnings: int) -> None:
    """Check that no text is written twice: at temperature 0 its beginning determines it. Raises ConfigError."""
    if plan.temperature == 0 and count > beginnings:
        raise ConfigError(
            f"at temperature 0, {count} texts would be {beginnings} different ones",
            "set a --temperature, lower --tokens, or name more questions by --data.",
        )


def _prompts(plan: TargetRunConfig, tokenizer: Tokenizer, counts: tuple[int, int]) -> list[list[int]]:
    """Return prompts from the files that `train lm` trains on, then from held-out ones; counts: how many of each."""
    begins = tokenizer.encode("")[:1] or sorted(tokenizer.special_ids)[:1] or [0]
    corpus = read_corpus(tuple(plan.data) or (standard_library(),), plan.suffix)
    prompts = list[list[int]]()
    for documents, count in zip((corpus.training, corpus.held_out), counts, strict=True):
        read = [
            tokenizer.encode(document.text, add_special_tokens=False)
            for document in documents[:: max(1, len(documents) // _MOST_DOCUMENTS)]
        ]
        prompts += cut_prompts(read, plan, begins[0], count)
    return prompts


def _continued(
    llm: LLM, plan: TargetRunConfig, texts: Sequence[list[int]], most: Sequence[int], seed: int, ignore_eos: bool
) -> list[list[int]]:
    """Return the tokens that the target adds to texts. seed: that of the first; each further text has the next one."""
    params = [
        SamplingParams(temperature=plan.temperature, max_tokens=each, ignore_eos=ignore_eos, seed=seed + place)
        for place, each in enumerate(most)
    ]
    return [list(made.outputs[0].token_ids) for made in llm.generate(list(texts), params, use_tqdm=False)]


def cut_prompts(documents: Sequence[Sequence[int]], config: TargetRunConfig, begin: int, count: int) -> list[list[int]]:
    """Return prompts from random places of documents, each after `begin`."""
    length = max(1, config.seq // PROMPT_SHARE - 1)
    long = [document for document in documents if len(document) >= length]
    if not long:
        raise ConfigError(f"no text has {length} tokens, as a prompt takes", "lower --seq, or name longer files.")
    generator = torch.Generator().manual_seed(config.seed)
    prompts = []
    for _ in range(count):
        document = long[int(torch.randint(len(long), (), generator=generator))]
        first = int(torch.randint(len(document) - length + 1, (), generator=generator))
        prompts.append([begin, *(int(token) for token in document[first : first + length])])
    return prompts


@dataclass(frozen=True)
class Turns:
    """The tokens of a chat template around the messages of a conversation."""

    begin: list[int]
    asked: list[int]
    answered: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Turns:
        """Read a tokenizer's template. Raises ConfigError if it has none, or one that hides a message."""
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        try:
            opening = tokenizer.apply_chat_template(messages[:1])
            whole = tokenizer.apply_chat_template(messages)
        except SpeculantError as error:
            raise ConfigError(f"the target writes no conversations: {error}", _FIX) from error
        begin, _, asked = opening.partition(_MARKS[0])
        answered = whole.partition(_MARKS[1])[2].partition(_MARKS[2])[0]
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in (begin, asked, answered)]
        if not all(parts):
            raise ConfigError("the target's chat template does not show the messages of a conversation", _FIX)
        return cls(*parts)


def write_conversations(
    turns: Turns, questions: Sequence[Sequence[int]], seq: int, ends: frozenset[int], go_on: Continue
) -> list[list[int]]:
    """Return conversations of `seq` tokens, one for each question.

    The target writes a first question where none is given, and all later ones. ends: the target's end tokens, which end
    a message.
    """
    texts = [[*turns.begin, *question, *(turns.asked if question else ())] for question in questions]
    asking, turn = [not question for question in questions], 0
    while short := [place for place, text in enumerate(texts) if len(text) < seq]:
        room = [seq - len(texts[place]) for place in short]
        most = [
            min(left, max(1, seq // MOST_OF_QUESTION)) if asking[place] else left
            for place, left in zip(short, room, strict=True)
        ]
        added = go_on([texts[place] for place in short], most, turn)
        for place, message in zip(short, added, strict=True):
            ended = message[:-1] if message and message[-1] in ends else message
            texts[place] += [*ended, *(turns.asked if asking[place] else turns.answered)]
            asking[place] = not asking[place]
        turn += 1
    return [text[:seq] for text in texts]


def most_texts(tokens: int, seq: int, width: int, cache_gib: float) -> int:
    """Return the number of texts with this many tokens in total whose states fit on disk; at least 2.

    width: how many numbers are kept for each token.
    """
    return max(2, min(tokens // seq, int(cache_gib * 2**30) // (2 * seq * width)))


def wanted_texts(plan: TargetRunConfig, width: int) -> int | None:
    """Return the number of texts to write; None = the folder has its texts. width: see `most_texts`."""
    return None if (plan.out / FILE).exists() else most_texts(plan.tokens, plan.seq, width, plan.cache_gib)


@dataclass
class PartialTexts:
    """The texts that a run has written so far, in a file: the run's plan in the first line, then one text per line."""

    plan: TargetRunConfig
    file: IO[str]
    texts: list[list[int]]

    @classmethod
    @contextmanager
    def open(cls, plan: TargetRunConfig, count: int) -> Iterator[PartialTexts]:
        """Open the file of a run of `count` texts. An unfinished line is cut.

        Raises ConfigError if the file can't be read, or if its texts are those of another plan.
        """
        own = {name: getattr(plan, name) for name in ("target", "seq", "temperature", "chat", "seed")}
        path, wanted = plan.out / PART, {"count": count, "data": [plan.suffix, *map(str, plan.data)], **own}
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        try:
            known, *texts = [json.loads(line) for line in whole.splitlines()] or [wanted]
        except ValueError as error:
            raise ConfigError(f"the texts in {path} can't be read: {error}", "delete this file.") from None
        if known != wanted:
            raise ConfigError(
                f"the texts in {path} were begun with other settings", "repeat these, or choose another --out."
            )
        with path.open("a", encoding="utf-8") as file:
            file.truncate(len(whole) + 1 if whole else 0)
            file.write("" if whole else f"{json.dumps(wanted)}\n")
            yield cls(plan, file, texts)

    def add(self, texts: Sequence[list[int]]) -> None:
        """Append texts."""
        self.texts += texts
        self.file.write("".join(f"{json.dumps(text)}\n" for text in texts))
        self.file.flush()

    def finish(self) -> None:
        """Write the run's texts in their final form, see `save_texts`, and drop the file."""
        save_texts(self.plan.out, self.texts, self.plan.seq, self.plan.seed)
        (self.plan.out / PART).unlink()
