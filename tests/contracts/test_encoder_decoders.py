"""Encoder-decoder families agree with transformers for sources of any length, alone and in mixed batches.

tests/contracts/test_model_families.py has their decoders, with sources of one length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.errors import ModelError, RequestError
from speculant.models import NORM, Decoder, SequenceInput, build_batch, load_model
from speculant.types import DraftTree
from tests.unit.models.families import (
    ENCODER_DECODERS,
    NATIVE,
    SOURCE,
    MakePair,
    Pair,
    Session,
    loading_pairs,
    make_pair,
    on_backends,
    random_tokens,
    write_variant,
)

CLOSE = {"atol": 1e-4, "rtol": 0, "check_dtype": False}
EXACT = {"atol": 1e-10, "rtol": 0}
LONGEST = 320
TEXT = random_tokens(9, seed=3)
LENGTHS = (1, 2, 7, 64, 65, 130, 300)
TREE = DraftTree(torch.tensor([3, 9, 4, 3, 17]), torch.tensor([-1, -1, 0, 0, 2]))
HEAD, TABLE = "lm_head.weight", "shared.weight"
Write = Callable[..., Path]


EACH = [case for case in on_backends("reference", "native") if case.values[0][1] in ENCODER_DECODERS]  # type: ignore[index]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    return loading_pairs(tmp_path_factory)


@pytest.fixture(params=EACH)
def pair(request: pytest.FixtureRequest, load: MakePair) -> Pair:
    return load(*request.param)


def session_of(pair: Pair, sources: Mapping[int, list[int]]) -> Session:
    return Session(pair.ours, len(sources), LONGEST, sources)


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_source_of_any_length(pair: Pair, length: int) -> None:
    """The encoder's result, and the logits of a text that is decoded token by token."""
    source = random_tokens(length, seed=length)
    session = session_of(pair, {0: source})
    encoded = session.encode(0)
    with torch.inference_mode():
        expected = pair.theirs.get_encoder()(torch.tensor([source])).last_hidden_state[0]
    torch.testing.assert_close(encoded, expected, **CLOSE)
    logits = torch.cat([session.extend([token]) for token in TEXT])
    torch.testing.assert_close(logits, pair.reference(TEXT, source), **CLOSE)


def test_many_sources_in_mixed_batches(pair: Pair) -> None:
    """Sources are encoded beside each other, and texts with other sources are decoded beside each other."""
    sources = {index: random_tokens(length, seed=length) for index, length in enumerate((1, 300, 40, 65))}
    session = session_of(pair, sources)
    session.encode(0, 2)
    session.extend(TEXT[:4], 2)
    session.encode(3, 1)
    session.extend(TEXT[:1], 1)
    rests = {0: TEXT, 1: TEXT[1:], 2: TEXT[4:5], 3: TEXT[:2]}
    logits = session.feed(*(SequenceInput(index, rest, DraftTree.empty()) for index, rest in rests.items()))
    expected = [pair.reference(TEXT, source) for source in sources.values()]
    expected = [expected[0], expected[1][1:], expected[2][4:5], expected[3][:2]]
    torch.testing.assert_close(logits, torch.cat(expected), **CLOSE)


def test_trees_beside_texts_and_after_rollback(pair: Pair) -> None:
    sources = {0: random_tokens(90, seed=5), 1: random_tokens(3, seed=6)}
    session = session_of(pair, sources)
    session.extend([*TEXT[:3], 8, 8, 8])
    session.cache.truncate_to(0, 3)
    logits = session.feed(SequenceInput(0, TEXT[3:5], TREE), SequenceInput(1, TEXT, DraftTree.empty()))
    expected = [pair.reference(TEXT[:5], sources[0])[3:]]
    paths = {0: [3], 1: [9], 2: [3, 4], 3: [3, 3], 4: [3, 4, 17]}
    expected += [pair.reference([*TEXT[:5], *path], sources[0])[-1:] for path in paths.values()]
    torch.testing.assert_close(logits, torch.cat([*expected, pair.reference(TEXT, sources[1])]), **CLOSE)
    session.cache.compact(0, 5, [0, 2])
    after = pair.reference([*TEXT[:5], 3, 4, 1], sources[0])[-1:]
    torch.testing.assert_close(session.extend([1]), after, **CLOSE)


def test_texts_share_a_source(pair: Pair) -> None:
    session = session_of(pair, {0: list(SOURCE), 1: [1]})
    session.encode(0)
    inputs = [SequenceInput(index, TEXT[: 4 + index], DraftTree.empty(), source=-1) for index in range(2)]
    batch = build_batch(inputs, session.cache, torch.device("cpu"))
    logits = pair.ours.logits(pair.ours.forward(batch, session.cache.storage).last)
    expected = pair.reference(TEXT)
    torch.testing.assert_close(logits, torch.cat((expected[:4], expected[:5])), **CLOSE)


def test_a_text_without_its_source_is_refused(pair: Pair, tmp_path: Path) -> None:
    session = session_of(pair, {0: list(SOURCE)})
    batch = build_batch([SequenceInput(0, TEXT, DraftTree.empty())], session.cache, torch.device("cpu"))
    with pytest.raises(RequestError, match="sequence 0 has no encoded source"):
        pair.ours.forward(batch, session.cache.storage)
    decoder = Session(load_model(str(write_variant(tmp_path, "llama", "llama2")), kernels=pair.kernels).model)
    decoder.extend(TEXT, seq_id=7)
    batch = build_batch([SequenceInput(0, TEXT, DraftTree.empty(), source=7)], decoder.cache, torch.device("cpu"))
    with pytest.raises(RequestError, match="sequence 0 has an encoded source"):
        decoder.model.forward(batch, decoder.cache.storage)


def test_the_first_layers_keep_the_encoder(pair: Pair) -> None:
    layers = pair.ours.num_layers - 1
    if not layers:
        pytest.skip("the decoder has one layer")
    first = pair.ours.truncated(layers)  # type: ignore[attr-defined]
    with torch.inference_mode():
        encoded = pair.theirs.get_encoder()(torch.tensor([SOURCE]))
        seen = pair.theirs.get_decoder()(
            torch.tensor([TEXT]), encoder_hidden_states=encoded.last_hidden_state, output_hidden_states=True
        ).hidden_states[layers][0]
        norm = pair.ours.config.tensors.stored(NORM).removesuffix(".weight")  # type: ignore[attr-defined]
        normed = pair.theirs.get_submodule(norm)(seen)
    torch.testing.assert_close(Session(first).extend(TEXT), pair.ours.logits(normed.contiguous()), **CLOSE)


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=NATIVE)])
def test_a_short_head_has_its_own_rows_of_a_bias(backend: str, load: MakePair) -> None:
    whole, tokens = load(backend, "bart", "plain"), [2, 7, 60]
    short = load_model(str(whole.folder), "float32", kernels=backend, head_tokens=tuple(tokens)).model
    found, expected = (Session(each).extend(TEXT) for each in (short, whole.ours))
    torch.testing.assert_close(found[:, tokens], expected[:, tokens], **CLOSE)
    assert bool((found == -torch.inf).sum(1).eq(61 - len(tokens)).all())


@pytest.mark.parametrize(
    ("backend", "family"),
    [("reference", "bart"), *(pytest.param("native", each, marks=NATIVE) for each in ("bart", "marian"))],
)
def test_positions_beyond_the_table_are_refused(backend: str, family: str, load: MakePair) -> None:
    model = load(backend, family, "plain").ours
    for source, text in ((random_tokens(513), [1]), ([1], random_tokens(513))):
        with pytest.raises((ValueError, IndexError)):
            Session(model, 1, 600, {0: source}).extend(text)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return what writes a checkpoint of a family whose tensors and config.json are changed by hand."""

    def written(family: str, change: Callable[[dict[str, Tensor]], None], **entries: Any) -> Path:
        variant = {"t5": "flan"}.get(family, "plain")
        folder = make_pair(tmp_path / f"{family} {len(list(tmp_path.iterdir()))}", family, variant).folder
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config.pop("scale_decoder_outputs", None)
        (folder / "config.json").write_text(json.dumps({**config, **entries}))
        return folder

    return written


def another_head(tensors: dict[str, Tensor]) -> None:
    """Give a checkpoint a head of its own."""
    tensors[HEAD] = tensors[TABLE].flip(0) * 1.5


def logits_of(folder: Path) -> tuple[Tensor, Tensor]:
    """Return our logits and those of transformers for a checkpoint."""
    from transformers import AutoModelForSeq2SeqLM

    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ours = load_model(str(folder)).model
    return Session(ours).extend(TEXT), Pair(theirs, ours, folder).reference(TEXT)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_differs_is_used(family: str, tied: bool, write: Write) -> None:
    """Whatever config.json says. It decides whether logits are scaled, except for mT5."""
    ours, theirs = logits_of(write(family, another_head, tie_word_embeddings=tied))
    scaled = {"t5": tied, "mt5": False, "umt5": tied}[family]
    if family == "umt5" and not tied:  # transformers scales these from 5.23 on, and not before and after it
        theirs = theirs * 32**0.5
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert (ours.std() < 1) == scaled


def test_a_head_that_is_the_table_is_tied(write: Write) -> None:
    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[TABLE].clone()

    folder = write("t5", repeat, tie_word_embeddings=False)
    model = load_model(str(folder)).model
    assert isinstance(model, Decoder)
    assert model.config.head.tied
    torch.testing.assert_close(*logits_of(folder), **CLOSE)


def test_whether_logits_are_scaled_is_an_entry_of_its_own(write: Write) -> None:
    """transformers 5 writes tie_word_embeddings = true for all."""
    for scaled in (True, False):
        folder = write("t5", lambda tensors: None, tie_word_embeddings=True, scale_decoder_outputs=scaled)
        torch.testing.assert_close(*logits_of(folder), **CLOSE)
        assert (load_model(str(folder)).model.config.head.scale == 1) != scaled  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_the_table_may_have_the_name_of_a_part(part: str, write: Write) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors[f"{part}.embed_tokens.weight"] = tensors.pop(TABLE)

    torch.testing.assert_close(*logits_of(write("t5", rename)), **CLOSE)


def test_copies_of_the_table_must_be_equal(write: Write) -> None:
    def copy(tensors: dict[str, Tensor]) -> None:
        for part in ("encoder", "decoder"):
            tensors[f"{part}.embed_tokens.weight"] = tensors[TABLE].clone()
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(32, 4)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["encoder.embed_tokens.weight"] = 2 * tensors[TABLE]

    torch.testing.assert_close(*logits_of(write("t5", copy)), **CLOSE)
    with pytest.raises(ModelError, match=r"encoder\.embed_tokens\.weight differs from shared\.weight"):
        load_model(str(write("t5", change)))


@pytest.mark.parametrize("family", ["bart", pytest.param("marian", marks=pytest.mark.slow)])
def test_files_may_have_what_transformers_leaves_out(family: str, write: Write) -> None:
    """Copies of the table, versions, and positions that are computed; and they may lack the bias of logits."""

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["final_logits_bias"]
        for part in ("encoder", "decoder"):
            tensors[f"model.{part}.embed_tokens.weight"] = tensors["model.shared.weight"].clone()
            tensors[f"model.{part}.version"] = torch.ones(1)
            if family == "marian":
                tensors[f"model.{part}.embed_positions.weight"] = torch.ones(512, 32)

    folder = write(family, change)
    if family == "bart":
        torch.testing.assert_close(*logits_of(folder), **CLOSE)
    ours, other = (load_model(str(each)).model for each in (folder, write(family, lambda tensors: None)))
    assert (ours.config.head.bias, other.config.head.bias) == (False, True)  # type: ignore[attr-defined]
    bias = load_file(write(family, lambda tensors: None) / "model.safetensors")["final_logits_bias"]
    torch.testing.assert_close(Session(ours).extend(TEXT) + bias, Session(other).extend(TEXT), **CLOSE)


@pytest.mark.parametrize(
    ("family", "entries", "words"),
    [
        ("marian", {"share_encoder_decoder_embeddings": False}, "different vocabularies"),
        ("marian", {"decoder_vocab_size": 60}, "different vocabularies"),
        ("marian", {"max_position_embeddings": 2**17}, "max_position_embeddings = 131072"),
        ("bart", {"encoder_attention_heads": 2}, "heads of different sizes"),
        ("bart", {"max_position_embeddings": 511}, "embed_positions"),
        ("mbart", {"activation_function": "tanh"}, "activation_function='tanh'"),
        ("bart", {"decoder_layers": 0}, "decoder_layers = 0"),
    ],
)
def test_models_that_are_not_implemented_are_refused(
    family: str, entries: dict[str, Any], words: str, write: Write
) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_model(str(write(family, lambda tensors: None, **entries)))
    assert caught.value.fix


@pytest.mark.parametrize(
    "entries",
    [
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu", "is_gated_act": True},
        {"feed_forward_proj": "relu", "dense_act_fn": None, "is_gated_act": True},
        {"feed_forward_proj": "gated-gelu_new", "dense_act_fn": None, "is_gated_act": None},
    ],
)
def test_entries_that_override_the_activation(entries: dict[str, Any], write: Write) -> None:
    folder = write("t5", lambda tensors: None)
    config = {**json.loads((folder / "config.json").read_text()), **entries}
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    torch.testing.assert_close(*logits_of(folder), **CLOSE)
