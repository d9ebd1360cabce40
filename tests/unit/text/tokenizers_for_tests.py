"""Small tokenizers of the two kinds that checkpoints have: byte-level BPE, and sentencepiece with byte fallback."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from speculant.text import IncrementalDetokenizer, Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "größer, naïve café", "こんにちは 世界", "👍🏽 👨‍👩‍👧"] * 4
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


def byte_level(vocab_size: int = 320) -> Tokenizer:
    """GPT-2's kind: every byte is a character of the vocabulary."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend, SETTINGS)


def sentencepiece_style() -> Tokenizer:
    """Llama 2's kind: words begin with a mark, unknown characters become byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "世", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Backend(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, SETTINGS)


def metaspace_style() -> Tokenizer:
    """Its newer form: one decoder that turns the mark into a space."""
    tokenizer = sentencepiece_style().backend
    tokenizer.normalizer = normalizers.Replace(Regex(" +"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return Tokenizer(tokenizer, SETTINGS)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
    """Return the text of each token as it is streamed, and the rest at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.flush()]
