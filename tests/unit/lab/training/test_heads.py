"""Training of heads: losses and gradients, rounds, and a run from prompts to a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant import LLM
from speculant.cache import slotted_cache
from speculant.drafting import HeadFolder
from speculant.drafting.heads import eagle3, page
from speculant.errors import ConfigError
from speculant.files import read_json
from speculant.lab.training import (
    KINDS,
    HeadRun,
    HeadTrainingConfig,
    Optimizer,
    OutputHead,
    RoundsObjective,
    Texts,
    Trainer,
    distances,
    most_texts,
    open_texts,
    overlaps,
    save_texts,
)
from speculant.models import CausalLM, Decoder, Rope, SequenceInput, build_batch, inner_width, read_rope
from speculant.types import DraftTree
from tests.examples import examples
from tests.gguf_models import convert
from tests.heads import QWEN35, fresh_ahead, fresh_states
from tests.models import END, Shape, write_checkpoint
from tests.unit.lab.training.runs import command, drafts, have_the_same_bits, resume
from tests.unit.models.families import STATES, VARIANTS, cases_with

SEQ = 16
QUICK = ("llama", "gpt_oss", "opt", "ministral3", "qwen2")  # families that meet all kinds of heads


def config_of(out: Path, target: str, kind: str, **changes: Any) -> HeadTrainingConfig:
    return HeadTrainingConfig(out, target, kind, **{"steps": 4, "seq": SEQ, "batch": 2, "num_heads": 2, **changes})


def logits_of(states: Tensor, matrix: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The plain formula of an output head."""
    logits = scale * (states @ matrix.T)
    return softcap * (logits / softcap).tanh() if softcap else logits


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.7, 3.0)])
def test_distance_is_that_of_the_distributions(scale: float, softcap: float | None) -> None:
    """Value and gradient are those of autograd on the plain formula."""
    torch.manual_seed(0)
    states, own, matrix = torch.randn(2, 300, 5, requires_grad=True), torch.randn(300, 5), torch.randn(11, 5)
    target = OutputHead(matrix, None, scale, softcap)
    for progress in (0.0, 0.3, 1.0):
        (gradient,) = torch.autograd.grad(distances(states, own, target, progress).sum(), states)
        q, p = (logits_of(each, matrix, scale, softcap).softmax(-1) for each in (states, own))
        divergence, variation = (p * (p.log() - q.log())).sum(-1), (p - q).abs().sum(-1) / 2
        plain = ((1 - progress) * divergence + 4 * progress * variation).mean(-1)
        (expected,) = torch.autograd.grad(plain.sum(), states)
        torch.testing.assert_close(distances(states, own, target, progress), plain, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-3)
    alpha, shares = overlaps(states.detach(), own, target, 11)
    torch.testing.assert_close(alpha, torch.minimum(p, q).sum((1, 2)), atol=1e-3, rtol=1e-4)
    assert shares.sum(1).tolist() == [300, 300]
    assert shares[0, 0] == (q[0].argmax(-1) == p.argmax(-1)).sum()


def test_a_short_output_head_learns_the_target_among_its_tokens() -> None:
    """The divergence is that from p among the head's tokens; the rest of p counts in the total variation."""
    torch.manual_seed(0)
    states, own, matrix = torch.randn(2, 300, 5, requires_grad=True), torch.randn(300, 5), torch.randn(11, 5)
    head = OutputHead(torch.randn(4, 5, requires_grad=True), torch.tensor([1, 4, 5, 9]), 1.3, 4.0)
    target = OutputHead(matrix)
    weights = torch.tensor([1.0, 0.3])
    for progress in (0.0, 0.3, 1.0):
        found = distances(states, own, target, progress, head)
        q, p = head.logits(states).softmax(-1), (own @ matrix.T).softmax(-1)[:, head.tokens]
        among = p / p.sum(-1, keepdim=True)
        divergence = (among * (among.log() - q.log())).sum(-1)
        plain = ((1 - progress) * divergence + 4 * progress * (1 - torch.minimum(p, q).sum(-1))).mean(-1)
        torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
        learned = [states, head.matrix]
        for one, other in zip(
            torch.autograd.grad((found * weights).sum(), learned),
            torch.autograd.grad((plain * weights).sum(), learned),
            strict=True,
        ):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
    alpha, shares = overlaps(states.detach(), own, target, 8, head.fixed())
    torch.testing.assert_close(alpha, torch.minimum(p, q).sum((1, 2)).detach(), atol=1e-3, rtol=1e-4)
    best = (own @ matrix.T).argmax(-1)
    assert shares[1].sum() == torch.isin(best, head.tokens).sum()
    assert shares[1, 0] == (head.tokens[q[1].argmax(-1)] == best).sum()


def new_objective(kind: str, folder: Path, target: Decoder, **changes: Any) -> tuple[RoundsObjective, Texts]:
    """Return an untrained head that continues its own states, and three texts."""
    save_texts(folder, torch.randint(0, 250, (3, SEQ), generator=torch.Generator().manual_seed(0)).tolist(), SEQ, 0)
    objective = KINDS[kind].make(config_of(folder, "target", kind, **changes), target)
    assert isinstance(objective, RoundsObjective)
    texts = open_texts(folder, target, layers=objective.layers)
    objective.use(texts)
    return objective, texts


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_rounds_are_drafts_from_every_row(kind: str, tmp_path: Path, target: Decoder) -> None:
    """Round m of training computes the same state for a row as the head for the m-th row of a draft."""
    objective, texts = new_objective(kind, tmp_path, target, depth=3)
    made, own = objective.predicted(torch.tensor([1]))
    torch.testing.assert_close(own, texts.states_of(torch.tensor([1]))[0, 3:])
    states = objective._entering(torch.tensor([1]))[0]
    for row in range(2, SEQ - 1):
        for depth in range(3):
            expected = draft_state(objective._head, texts.tokens[1], states, row - depth, depth)
            torch.testing.assert_close(made[depth, row - 2], expected, atol=2e-5, rtol=1e-4)


def draft_state(head: CausalLM, tokens: Tensor, states: Tensor, root: int, depth: int) -> Tensor:
    """Return the state `depth` rows after a root row; each row reads the state of the row before, in a cache."""
    cache = slotted_cache(head.cache_shape, 1, SEQ)
    fed, hidden = tokens[1 : root + 2].tolist(), states[: root + 1]
    for place in range(depth + 1):
        batch = build_batch([SequenceInput(0, fed, DraftTree.empty(), hidden=hidden)], cache, torch.device("cpu"))
        out = head.forward(batch, cache.storage)
        assert out.carried is not None
        fed, hidden = [int(tokens[root + 2 + place])] if place < depth else [], out.carried[-1:]
    return out.last[-1]


@torch.inference_mode()
def test_kept_states_equal_those_of_a_drafter(tmp_path: Path, target: Decoder) -> None:
    """Of several layers, even the same one twice, and equal to those of a pass with a cache."""
    save_texts(tmp_path, torch.randint(0, 250, (3, SEQ)).tolist(), SEQ, 0)
    layers = (2, 0, 1, 1)
    texts = open_texts(tmp_path, target, layers=layers)
    for row in range(3):
        *taps, last = fresh_states(target, texts.tokens[row].tolist(), (*layers, target.num_layers + 1))
        torch.testing.assert_close(texts.taps_of(torch.tensor([row]))[0], torch.cat(taps, -1), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(texts.states_of(torch.tensor([row]))[0], last, atol=1e-3, rtol=1e-3)
    assert sorted(path.name for path in tmp_path.glob("*.f16")) == [
        "states-0.f16", "states-1.f16", "states-2.f16", "states.f16",
    ]  # fmt: skip


def test_an_eagle3_head_learns(tmp_path: Path, target: Decoder) -> None:
    """The loss falls on repeated texts; all of the head is learned, and nothing of the target."""
    objective, texts = new_objective("eagle3", tmp_path, target, depth=2, draft_vocab=40)
    optimizer, losses = Optimizer(objective.module, 0.01, 0.002), list[float]()
    before = [parameter.detach().clone() for parameter in objective.module.parameters()]
    for _ in range(12):
        loss = objective.loss(objective.module, texts.batch(0, 2), 0.0)
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(1.0)
    assert losses[-1] < 0.7 * losses[0]
    after = list(objective.module.parameters())
    assert not any(torch.equal(*both) for both in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_an_interrupted_run_ends_with_the_same_bits(
    kind: str, tmp_path: Path, target: Decoder, target_folder: str
) -> None:
    config = config_of(tmp_path, target_folder, kind, draft_vocab=40 if kind == "eagle3" else None)

    def new_trainer() -> Trainer:
        new_objective(kind, tmp_path, target, draft_vocab=config.draft_vocab)
        return HeadRun(config).trainer()

    whole, first, second = new_trainer(), new_trainer(), new_trainer()
    assert len(list(whole.run())) == 4
    assert have_the_same_bits(resume(first, second, saved=2), whole)


@torch.inference_mode()
@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_a_folder_has_the_measured_acceptance(
    draft_vocab: int | None, tmp_path: Path, target: Decoder, target_folder: str
) -> None:
    """The drafter's head has the measured sum min(p, q) on the same texts, up to the rounding of its weights."""
    config = config_of(tmp_path, target_folder, "eagle3", depth=2, draft_vocab=draft_vocab)
    objective, texts = new_objective("eagle3", tmp_path, target, depth=2, draft_vocab=draft_vocab)
    run = HeadRun(config)
    measured = run.finish(run.trainer()).acceptance
    folder = HeadFolder.open(str(tmp_path), "eagle3")
    assert page.three_layers(folder, target) == objective.layers == (2, 1, 0)
    model, encode = eagle3.load(folder, target)
    tokens = texts.tokens[2]
    states = encode(fresh_states(target, tokens.tolist(), objective.layers))
    p = target.logits(fresh_states(target, tokens.tolist(), [target.num_layers + 1])[0]).softmax(-1)
    for depth in range(2):
        made = [draft_state(model, tokens, states, row - depth, depth) for row in range(1, SEQ - 1)]
        q = model.logits(torch.stack(made)).softmax(-1)
        assert float(torch.minimum(p[2:], q).sum(-1).mean()) == pytest.approx(measured.alpha[depth], abs=0.01)
    known = page.read_tokens(folder, target)
    counts = texts.tokens[:2].flatten().bincount(minlength=target.vocab_size)
    assert len(known) == (draft_vocab or 0)
    if known:
        assert int(counts[list(known)].sum()) == int(counts.sort(descending=True).values[:40].sum())
        assert folder.read("t2d").nonzero()[:, 0].tolist() == list(known)


@pytest.mark.parametrize(("kind", "size"), [("eagle", 40), ("eagle3", 10**6)])
def test_a_short_output_head_has_its_limits(kind: str, size: int, tmp_path: Path, target: Decoder) -> None:
    with pytest.raises(ConfigError, match="draft_vocab|output head"):
        KINDS[kind].make(config_of(tmp_path, "target", kind, draft_vocab=size), target)


def test_texts_stay_within_the_bound() -> None:
    assert most_texts(10_000, 100, 64, cache_gib=1.0) == 100
    assert most_texts(10_000, 100, 64, cache_gib=10 * 2 * 100 * 64 / 2**30) == 10
    assert most_texts(1, 100, 64, cache_gib=1e-6) == 2


def test_every_kind_is_a_method() -> None:
    from speculant import plugins

    assert set(KINDS) <= set(plugins.names("speculant.drafting"))
    with pytest.raises(ConfigError, match="did you mean 'eagle'"):
        config_of(Path("out"), "demo", "eagel")


@pytest.mark.slow  # quick tests run the command on conversations, and all else that this does in one process
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_makes_a_head_that_drafts(kind: str, tmp_path: Path, target_folder: str, corpus_folder: Path) -> None:
    """From prompts to a folder for an engine, in one session and in two."""
    arguments = [
        "head", "--kind", kind, "--target", target_folder, "--data", corpus_folder, "--tokens", 640, "--seq", SEQ,
        "--batch", 4, "--num-heads", 2, "--depth", 2, *(["--draft-vocab", 100] if kind == "eagle3" else []),
    ]  # fmt: skip
    found = []
    for name, sessions in (("once", [["--steps", 6]]), ("twice", [["--steps", 3], ["--steps", 6, "--resume"]])):
        out = tmp_path / name
        *_, measured = [command(*arguments, "--out", out, *session) for session in sessions]
        found.append(measured)
    assert found[0]["steps"] == found[1]["steps"] == 6
    assert len(found[0]["acceptance"]["alpha"]) == 2
    assert all(0 <= share <= 1 for share in found[0]["acceptance"]["alpha"])
    assert "Measured" in (out / "README.md").read_text()
    training = read_json(out / "config.json")["training"]
    assert training["steps"] == 6
    assert training["minutes"] == pytest.approx(found[1]["minutes"], abs=0.01)
    speculative = {"method": kind, "model": str(out), "num_speculative_tokens": 2}
    assert drafts(target_folder, speculative) > 0


def test_a_head_names_its_target_without_suffix_and_part(tmp_path: Path) -> None:
    """The command names the file."""
    file = tmp_path / "target-00001-of-00002.gguf"
    file.write_bytes(b"GGUF")
    config = HeadTrainingConfig(tmp_path / "head", str(file), "eagle", steps=1)
    assert config.target_name == "target"
    assert "--target target-00001-of-00002.gguf " in config.command() + " "


@pytest.mark.slow
def test_a_head_is_trained_for_a_gguf_file(tmp_path: Path, target_folder: str, corpus_folder: Path) -> None:
    """The rotary factors of a file are written unchanged."""
    factors = {"rope_freqs.weight": np.linspace(1, 4, 4, dtype=np.float32)}
    target, out = convert(target_folder, tmp_path / "target.gguf", "Q8_0", extra=factors), tmp_path / "head"
    arguments = ["--data", corpus_folder, "--tokens", 640, "--seq", SEQ, "--batch", 4, "--steps", 3, "--out", out]
    command("head", "--kind", "eagle", "--target", target, *arguments)
    assert read_json(out / "config.json")["rope_scaling"] == {"rope_type": "factors", "factors": [1, 2, 3, 4]}
    drafts(str(target), {"method": "eagle", "model": str(out)})


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", cases_with(list(KINDS), QUICK))
def test_a_head_is_trained_for_any_family(case: tuple[str, str, str], tmp_path: Path) -> None:
    family, variant, kind = case
    settings = tuple(VARIANTS.get(family, {}).get(variant, {}).items())
    folder = Path(write_checkpoint(tmp_path / "target", Shape(family=family, layers=3, end=END, settings=settings)))
    config = config_of(tmp_path / "head", str(folder), kind)
    config.out.mkdir()
    generator = torch.Generator().manual_seed(0)
    save_texts(config.out, torch.randint(0, 250, (40, SEQ), generator=generator).tolist(), SEQ, config.seed)
    if family in STATES and kind == "pass":
        with pytest.raises(ConfigError, match="a layer with a state sees all rows"):
            _ = HeadRun(config).head
        return
    run = HeadRun(config)
    target = run.target
    open_texts(config.out, target, layers=run.head.layers)
    run.carry_out()
    speculative = {"method": kind, "model": str(config.out)}
    drafts(str(folder), speculative, max_tokens=examples(30, least=16), dtype="float64")
    if kind in ("eagle", "eagle3", "mtp"):
        head = read_json(config.out / "config.json")
        rope = target.config.ropes[0] if target.config.ropes else Rope(10000.0)
        assert read_rope(head, head["max_position_embeddings"], share=0.25 if kind == "mtp" else None) == rope
        assert head["intermediate_size"] == inner_width(target.config.layers[0].mlp)


def test_a_head_is_written_with_its_target(tmp_path: Path, target_folder: str, corpus_folder: Path) -> None:
    """It drafts by default, by the tensors' names in the target's files; other kinds and targets are refused early."""
    settings = {name: value for name, value in QWEN35.items() if name != "mtp_num_hidden_layers"}
    hybrid = Shape(family="qwen3_5_text", layers=3, end=END, settings=tuple(settings.items()))
    target, joined = write_checkpoint(tmp_path / "target", hybrid), tmp_path / "joined"
    texts = ["--data", corpus_folder, "--tokens", 640, "--seq", SEQ, "--batch", 4, "--steps", 2]
    arguments = ["head", "--kind", "mtp", *texts, "--with-target", joined]
    command(*arguments, "--target", target, "--out", tmp_path / "head")
    assert LLM(str(joined)).speculation.startswith("suffix, prompt_lookup, mtp")
    assert LLM(target).speculation.startswith("suffix, prompt_lookup (")
    assert drafts(str(joined), {"method": "mtp"}, dtype="float64", kernels="reference") > 0
    assert read_json(joined / "config.json")["mtp_num_hidden_layers"] == 1
    for other, why in (
        (target_folder, "describes no such layer"), (str(joined), "a head among its weights already"),
        (target, "is not an empty folder"), (convert(target, tmp_path / "target.gguf", "F32"), "can't take up"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            command(*arguments, "--target", other, "--out", tmp_path / "other")
    with pytest.raises(ConfigError, match="heads of the kind eagle are not among"):
        config_of(tmp_path, target, "eagle", with_target=joined)


def test_look_ahead_learns_later_distributions(tmp_path: Path, target: Decoder, target_folder: str) -> None:
    """Row t is compared with the target's state t tokens later; the embeddings alone have gradients."""
    save_texts(tmp_path, [torch.randint(0, 250, (SEQ,)).tolist() for _ in range(3)], SEQ, 0)
    texts = open_texts(tmp_path, target)
    objective = KINDS["pass"].make(config_of(tmp_path, target_folder, "pass"), target)
    objective.use(texts)
    made, own = objective.predicted(torch.tensor([1]), 5)
    states = texts.states_of(torch.tensor([1]))[0]
    torch.testing.assert_close(own, torch.stack([states[[6, 14]], states[[7, 15]]]))
    (inputs,) = objective.module.parameters()
    for index, place in enumerate((5, 13)):
        expected = fresh_ahead(target, texts.tokens[1, : place + 1].tolist(), inputs)
        torch.testing.assert_close(made[:, index], expected, atol=2e-5, rtol=1e-4)
    objective.loss(objective.module, texts.batch(0, 2), 0.5).backward()
    assert inputs.grad is not None
    assert inputs.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.parameters())
