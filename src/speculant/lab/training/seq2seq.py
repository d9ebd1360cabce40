"""Training of an encoder-decoder model on pairs of texts, or of a draft on its teacher's distributions.

    source      s s s s s <end>                the encoder reads all of it
    inputs      <start> t t t                  the decoder's inputs
    target              t t t <end>            the tokens it learns to write

The start token and the end token are END_OF_TEXT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from speculant.errors import ConfigError
from speculant.lab.checkpoints import write_json
from speculant.lab.training.config import Seq2SeqConfig
from speculant.lab.training.corpus import (
    END_OF_TEXT,
    choose_tokenizer,
    end_of_text,
    is_held_out,
    train_tokenizer,
)
from speculant.lab.training.losses import (
    OutputHead,
    Overlap,
    Predicted,
    chunks,
    distribution_distance,
    mean_loss,
    mean_overlap,
    text_loss,
)
from speculant.lab.training.network import (
    decoded_states,
    encoded_sources,
    load_plain,
    new_network,
    parameter_count,
    project_embedding,
    save_weights,
)
from speculant.lab.training.trainer import Objective, Trainer, TrainingRun, Watch, model_card
from speculant.models import Decoder
from speculant.text import read_lines

_POOL = 32  # batches whose pairs are sorted by length together, so that a batch has little padding
_NO_TOKEN = -1


TextPairs = list[tuple[str, str]]  # sources and their targets


def read_texts(sources: Path, targets: Path) -> TextPairs:
    """Read a text from each line, in a .jsonl file as a JSON string. Raises ConfigError unless each has a target.

    A pair without a source or a target is left out.
    """
    found = [_lines(path) for path in (sources, targets)]
    if len(found[0]) != len(found[1]):
        raise ConfigError(
            f"{sources} has {len(found[0])} lines and {targets} has {len(found[1])}",
            "write the target of each source on the line of the same number.",
        )
    whole = [pair for pair in zip(*found, strict=True) if all(pair)]
    if not whole:
        raise ConfigError(f"{sources} and {targets} have no pairs", "write a source and its target on the same line.")
    return whole


def _lines(path: Path) -> list[str]:
    lines = read_lines(path)
    texts = [line for line in lines if isinstance(line, str)]
    if len(texts) < len(lines):
        raise ConfigError(f"{path} has token ids", "write texts, so that a tokenizer can be trained on them.")
    return texts


@dataclass(frozen=True)
class PairBatch:
    """sources [B, m], padded, and their lengths [B]. inputs [B, n]: the decoder's, padded.

    real [B, n]: which inputs are not padding. tokens [r]: the token that follows each of these inputs.
    """

    sources: Tensor
    lengths: Tensor
    inputs: Tensor
    real: Tensor
    tokens: Tensor


class Pairs:
    """Tokenised pairs by number. Batches are a pure function of the seed."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], end: int) -> None:
        """Take the tokens [m_i] and [n_i] of each pair, which end with `end`."""
        self._sources, self._targets, self._end = sources, targets, end

    @classmethod
    def of(cls, texts: TextPairs, tokenizer: Tokenizer, source_tokens: int, target_tokens: int) -> Pairs:
        """Tokenise texts; sources and targets with more tokens are cut."""
        end = end_of_text(tokenizer)
        sources, targets = zip(*texts, strict=True)
        return cls(
            _encoded(tokenizer, sources, source_tokens, end), _encoded(tokenizer, targets, target_tokens, end), end
        )

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._sources)

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens of all targets."""
        return sum(map(len, self._targets))

    def places(self, number: int) -> list[list[int]]:
        """Return the places of all pairs in groups of this size, with pairs of similar lengths together."""
        order = sorted(range(len(self)), key=self.lengths)
        return [order[first : first + number] for first in range(0, len(order), number)]

    def tensors(self, places: Sequence[int], device: torch.device | str = "cpu") -> PairBatch:
        """Return the pairs at these places."""
        sources, targets = [self._sources[place] for place in places], [self._targets[place] for place in places]
        padded = pad_sequence(targets, batch_first=True, padding_value=_NO_TOKEN).to(device)
        real, start = padded != _NO_TOKEN, padded.new_full((len(places), 1), self._end)
        return PairBatch(
            pad_sequence(sources, batch_first=True, padding_value=self._end).to(device),
            torch.tensor([len(source) for source in sources]).to(device),
            torch.cat((start, padded[:, :-1].clamp(min=0)), dim=1),
            real,
            padded[real],
        )

    def lengths(self, place: int) -> tuple[int, int]:
        """Return the numbers of tokens of a source and of its target."""
        return len(self._sources[place]), len(self._targets[place])


class PairBatches:
    """Batches of pairs by number, in another order in each epoch; see `Batches`."""

    def __init__(self, pairs: Pairs, size: int, seed: int) -> None:
        """Raises ConfigError if the pairs don't fill a batch of `size`."""
        if len(pairs) < size:
            raise ConfigError(f"{len(pairs)} pairs don't fill a batch of {size}", "lower --batch or add pairs.")
        self.pairs, self._size, self._seed = pairs, size, seed
        self._ordered = lru_cache(maxsize=1)(self._order)

    def batch(self, first: int, count: int) -> Tensor:
        """Return the places of pairs, each followed by a zero per token of the longest target: [count, 1 + n]."""
        places = [self._place(number) for number in range(first, first + count)]
        longest = max(self.pairs.lengths(place)[1] for place in places)
        return functional.pad(torch.tensor(places)[:, None], (0, longest))

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, len(self.pairs) // self._size * self._size)
        return int(self._ordered(epoch)[index])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.default_rng([self._seed, epoch])
        chosen, pool = generator.permutation(len(self.pairs)), _POOL * self._size
        pools = [sorted(chosen[at : at + pool], key=self.pairs.lengths) for at in range(0, len(chosen), pool)]
        batches = np.concatenate(pools)[: len(chosen) // self._size * self._size].reshape(-1, self._size)
        return batches[generator.permutation(len(batches))].flatten()


def _encoded(tokenizer: Tokenizer, texts: Sequence[str], most: int, end: int) -> list[Tensor]:
    """Return the first tokens of each text and then `end`, at most `most` in all."""
    found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [torch.tensor([*encoding.ids[: most - 1], end]) for encoding in found]


_WATCHED = 512  # held-out pairs that are measured during training
_AT_A_TIME = 32  # pairs in a pass


@dataclass(frozen=True)
class Seq2SeqData:
    """Tokenised pairs to train on, and held-out ones."""

    tokenizer: Tokenizer
    training: Pairs
    held_out: Pairs


@dataclass(frozen=True)
class Seq2SeqOutcome:
    """The measurements of a finished run. held_out_loss: in nats per token. overlap: with the teacher."""

    parameters: int
    pairs: int
    tokens: int  # of the targets of these pairs
    steps: int
    minutes: float
    held_out_pairs: int
    held_out_tokens: int
    held_out_loss: float
    overlap: Overlap | None = None


class Seq2SeqRun(TrainingRun[Seq2SeqConfig, Seq2SeqOutcome]):
    """A run from files of pairs to a model folder."""

    @cached_property
    def data(self) -> Seq2SeqData:
        """The pairs, read and tokenised."""
        config, doing = self.config, self.show.doing
        with doing("Reading the pairs"):
            texts = read_pairs(config)
        with doing("Making the tokenizer"):
            train = partial(train_end_tokenizer, texts[0], config.vocab_size)
            tokenizer = choose_tokenizer(config.out, config.teacher or config.tokenizer, train)
        with doing("Tokenising"):
            lengths = config.source_tokens, config.target_tokens
            return Seq2SeqData(tokenizer, *(Pairs.of(each, tokenizer, *lengths) for each in texts))

    @override
    def _prepared(self) -> Trainer:
        config, data = self.config, self.data
        hf = t5_config(config, data.tokenizer)
        model, teacher = new_network(hf, config.seed), self._teacher()
        if teacher is not None:
            _check_teacher(teacher, data.tokenizer)
            project_embedding(model, teacher)
        model.to(config.device)
        return Trainer(
            config,
            self.folder,
            model,
            PairBatches(data.training, config.batch, config.seed),
            PairObjective(data.training, teacher),
            (config.matrix_lr, config.embedding_lr),
            {"network": hf, "pairs": len(data.training), **config.settings()},
            measure=lambda: f"held-out loss {loss_of_pairs(model, data.held_out, most=_WATCHED):.3f}",
        )

    def _teacher(self) -> Decoder | None:
        config = self.config
        return load_plain(str(config.teacher), device=config.device) if config.teacher else None

    @override
    def finish(self, trainer: Trainer) -> Seq2SeqOutcome:
        out, tokenizer, name = self.config.out, self.data.tokenizer, END_OF_TEXT
        save_weights(out, trainer.model, trainer.settings["network"])
        tokenizer.save(str(out / "tokenizer.json"))
        write_json(out / "generation_config.json", _ends(tokenizer))
        write_json(out / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name, "pad_token": name,
            "model_max_length": self.config.source_tokens, "clean_up_tokenization_spaces": False,
        })  # fmt: skip
        outcome = self._measured(trainer)
        (out / "README.md").write_text(_card(self.config, outcome), encoding="utf-8")
        return outcome

    def _measured(self, trainer: Trainer) -> Seq2SeqOutcome:
        """Measure the written weights, in float32, on the held-out pairs."""
        data, teacher = self.data, self._teacher()
        model = load_plain(str(self.config.out), device=self.config.device)
        with self.show.watched("Measuring on held-out pairs") as watch:
            return Seq2SeqOutcome(
                parameters=parameter_count(model),
                pairs=len(data.training),
                tokens=data.training.num_tokens,
                steps=trainer.state.step,
                minutes=trainer.state.elapsed / 60,
                held_out_pairs=len(data.held_out),
                held_out_tokens=data.held_out.num_tokens,
                held_out_loss=loss_of_pairs(model, data.held_out, watch),
                overlap=overlap_of_pairs(teacher, model, data.held_out) if teacher else None,
            )

    @override
    def summary(self, outcome: Seq2SeqOutcome) -> list[str]:
        return [
            f"{self.config.out}: {outcome.parameters:,} weights, {outcome.pairs:,} pairs, {outcome.steps:,} steps",
            f"held-out loss {outcome.held_out_loss:.3f} nats a token ({outcome.held_out_tokens:,} tokens)",
            *(outcome.overlap.summary() if outcome.overlap else ()),
        ]


def read_pairs(config: Seq2SeqConfig) -> tuple[TextPairs, TextPairs]:
    """Read the pairs to train on, and the held-out ones."""
    texts = read_texts(config.sources, config.targets)
    if config.held_out_sources is None or config.held_out_targets is None:
        training: TextPairs = [pair for pair in texts if not is_held_out(pair[0])]
        held_out: TextPairs = [pair for pair in texts if is_held_out(pair[0])]
    else:
        training, held_out = texts, read_texts(config.held_out_sources, config.held_out_targets)
    if not held_out:
        raise ConfigError(
            f"none of the {len(texts)} pairs falls under the held-out rule",
            "add pairs, as one in fifty is held out, or give --held-out-sources and --held-out-targets.",
        )
    return training, held_out


def train_end_tokenizer(training: TextPairs, vocab_size: int) -> Tokenizer:
    """Train a tokenizer that adds the end token to each text."""
    tokenizer = train_tokenizer((text for pair in training for text in pair), vocab_size)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end_of_text(tokenizer))]
    )
    return tokenizer


class PairObjective(Objective):
    """Cross-entropy of the targets, or with a teacher the distance to its distributions at their tokens.

    The first column of windows has the places of pairs.
    """

    def __init__(self, pairs: Pairs, teacher: Decoder | None = None) -> None:
        self._pairs, self._teacher = pairs, teacher
        self.name = "cross-entropy" if teacher is None else "distance to the teacher"

    @override
    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        batch = self._pairs.tensors(windows[:, 0].tolist(), model.lm_head.weight.device)
        hidden, head = states_of_pairs(model, batch), OutputHead.of(model)
        if self._teacher is None:
            return text_loss(hidden, head, batch.tokens)
        with torch.no_grad():
            target_hidden = states_of_pairs(self._teacher, batch)
        return distribution_distance(hidden, head, target_hidden, OutputHead.of(self._teacher), progress)


def states_of_pairs(model: Decoder, batch: PairBatch) -> Tensor:
    """Return the states [r, hidden] from which the tokens [r] of a batch are predicted."""
    encoded = encoded_sources(model, batch.sources, batch.lengths)
    return decoded_states(model, batch.inputs, encoded, batch.lengths)[batch.real]


def loss_of_pairs(model: Decoder, pairs: Pairs, watch: Watch | None = None, most: int | None = None) -> float:
    """Return the mean cross-entropy, in nats per token, of the targets; most: of this many pairs, None = all."""
    return mean_loss(_predicted([model], pairs, watch, most))


def overlap_of_pairs(target: Decoder, draft: Decoder, pairs: Pairs) -> Overlap:
    """Compare two models' distributions at each token of the targets."""
    return mean_overlap(_predicted([target, draft], pairs))


def _predicted(
    models: Sequence[Decoder], pairs: Pairs, watch: Watch | None = None, most: int | None = None
) -> Iterator[Predicted]:
    groups = pairs.places(_AT_A_TIME)
    for done, places in enumerate(groups[:: 1 if most is None else max(1, len(pairs) // most)], start=1):
        batch = pairs.tensors(places, models[0].lm_head.weight.device)
        states = [states_of_pairs(model, batch) for model in models]
        for rows in chunks(len(batch.tokens)):
            logits = [OutputHead.of(model).logits(own[rows]) for model, own in zip(models, states, strict=True)]
            yield logits, batch.tokens[rows]
        if watch:
            watch(done / len(groups))


def t5_config(config: Seq2SeqConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the config.json of a new T5 1.1: gated, with a head of its own. One token starts and ends its texts."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": tokenizer.get_vocab_size(),
        "d_model": config.hidden,
        "d_kv": config.hidden // config.heads,
        "d_ff": config.intermediate,
        "num_layers": config.layers,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.heads,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.0,
        "tie_word_embeddings": False,
        **_ends(tokenizer),
    }


def _check_teacher(teacher: Decoder, tokenizer: Tokenizer) -> None:
    if teacher.config.encoder is None or teacher.vocab_size != tokenizer.get_vocab_size():
        raise ConfigError(
            f"the teacher has {teacher.vocab_size} tokens{'' if teacher.config.encoder else ' and no encoder'};"
            f" its tokenizer has {tokenizer.get_vocab_size()}",
            "name a folder that this command wrote.",
        )


def _ends(tokenizer: Tokenizer) -> dict[str, int]:
    return dict.fromkeys(("decoder_start_token_id", "pad_token_id", "eos_token_id"), end_of_text(tokenizer))


def _card(config: Seq2SeqConfig, outcome: Seq2SeqOutcome) -> str:
    role = "" if config.teacher is None else f", a draft for the model in {config.teacher.name}/"
    how = "the texts" if config.teacher is None else "that model's distributions on the texts"
    rows = [f"| held-out loss, nats a token | {outcome.held_out_loss:.3f} |"]
    if outcome.overlap is not None:
        rows += [
            f"| mean of sum min(p, q) with the target at temperature 1 | {outcome.overlap.alpha:.3f} |",
            f"| tokens where both have the same likeliest token | {outcome.overlap.greedy_agreement:.3f} |",
        ]
    return model_card(
        config.out.name,
        [
            (
                f"A small encoder-decoder model{role}: T5 1.1 format, {outcome.parameters:,} weights (hidden size"
                f" {config.hidden}, {config.layers} and {config.num_decoder_layers} layers), bfloat16, byte-level BPE"
                " tokenizer."
            )
        ],
        f"Trained from random weights on {how} of {outcome.pairs:,} pairs ({outcome.tokens:,} tokens of targets) in"
        f" {outcome.steps:,} steps of {config.batch}, {outcome.minutes:.3g} minutes on"
        f" {'a CPU' if config.device == 'cpu' else 'a GPU'}, by",
        config.command(),
        f"On the {outcome.held_out_tokens:,} tokens of the targets of {outcome.held_out_pairs:,} held-out pairs,"
        " computed in float32 from the weights of this folder.",
        ["| | |", "| --- | --- |", *rows],
        task="text2text-generation",
    )
