"""The vocabulary of a draft model beside its target's."""

from __future__ import annotations

from pathlib import Path

from speculant.models.vocabulary import DraftVocabulary
from speculant.models.weights.load import Checkpoint
from speculant.text.tokenizer import Tokenizer, compare_vocabularies, substitute_token


def draft_vocabulary(folder: Path, target: Checkpoint, tokenizer: Tokenizer) -> DraftVocabulary | None:
    """Compare the tokenizer in a draft's folder with the target's, `tokenizer`. Raises PairError if ids clash.

    Returns the vocabulary to load the draft model with; None = it has the target's tokens.
    """
    own = Tokenizer.from_folder(folder)
    unknown = compare_vocabularies(tokenizer, own)
    if not unknown:
        return None
    lacks = len(unknown - {*own.vocab().values()})
    return DraftVocabulary(target.model.vocab_size, unknown, substitute_token(own, unknown), lacks)
