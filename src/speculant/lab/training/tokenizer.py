"""A byte-level BPE tokenizer, trained on a corpus and saved in the format of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from speculant.errors import ConfigError
from speculant.lab.training.corpus import Document

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; END_OF_TEXT is token 0 and precedes every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json from a folder. Raises ConfigError if it isn't there or has no END_OF_TEXT."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json", "name a folder that this command wrote.")
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ConfigError(f"{path} has no token {END_OF_TEXT}", "use a tokenizer that this command trained.")
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of END_OF_TEXT."""
    token_id: int = tokenizer.get_vocab()[END_OF_TEXT]
    return token_id


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[NDArray[np.int64]]:
    """Tokenise each document, with END_OF_TEXT after it and not before it."""
    end = [end_of_text(tokenizer)]
    encodings = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    return [np.array(encoding.ids + end, dtype=np.int64) for encoding in encodings]


def line_starts(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the tokens [n] that begin a line or a text: those after a line feed or END_OF_TEXT."""
    ends_line = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    for token, token_id in tokenizer.get_vocab().items():
        ends_line[token_id] = token.endswith("Ċ") or token == END_OF_TEXT
    return np.concatenate(([True], ends_line[tokens[:-1]]))
