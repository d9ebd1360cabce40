"""The complete check of a configuration: proofs, tests and the verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from speculant.config import EngineConfig
from speculant.engine import Runtime, build_verifiers
from speculant.lab.exactness.proofs import SHAPING, Proof, choose_draft, claims, prove
from speculant.lab.exactness.texts import (
    FALSE_ALARM,
    Scores,
    TextComparison,
    compare,
    complete,
    is_filtered,
    score_texts,
)
from speculant.metrics import SpeculationMetrics
from speculant.params import SamplingParams
from speculant.types import Request

SAMPLING = (*SHAPING, "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
Tell = Callable[[str], None]  # called with the name of each part before it starts
Found = Callable[[str, Any], None]  # called with each finished part of the report: a key of `to_dict`, and a value


@dataclass(frozen=True)
class Subject:
    """The subject of a check: a speculative configuration, its engine, and settings that sample without a seed."""

    config: EngineConfig
    runtime: Runtime
    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    @property
    def kinds(self) -> dict[str, SamplingParams]:
        """The settings of each kind of request; the engine may choose a different verifier for each."""
        return {
            "sampled": self.params,
            "greedy": replace(self.params, temperature=0.0),
            "seeded": replace(self.params, seed=0),
        }

    def requests(self) -> dict[str, Request]:
        """Return one request of each kind, with the verifier that the engine chose."""
        return {kind: self._request(params) for kind, params in self.kinds.items()}

    def _request(self, params: SamplingParams) -> Request:
        prompt, source = self.runtime.prompt_and_source(self.prompts[0])
        (request,) = self.runtime.engine.add_request(prompt, params, "rule", source=source)
        self.runtime.engine.abort("rule")
        return request


@dataclass(frozen=True)
class ScoredTexts:
    """Texts scored by the target's own distributions. bitwise: with the bits from which tokens were drawn."""

    texts: int
    scores: Scores
    speculation: SpeculationMetrics
    bitwise: bool

    @property
    def passed(self) -> bool:
        """Whether no test found a shift, and no token was impossible."""
        return all(entry["passed"] for entry in self.to_list())

    def to_list(self) -> list[dict[str, Any]]:
        """Return the figures of each test as plain values for JSON."""
        impossible = self.scores.impossible
        return [
            *(score.to_dict(self.scores.level) for score in self.scores.made),
            {
                "test": "impossible",
                "what": "tokens whose probability is 0",
                "tokens": self.scores.favourite.num_tokens,
                "observed": impossible,
                "expected": 0,
                "passed": impossible == 0 or not self.bitwise,
            },
        ]


@dataclass(frozen=True)
class Report:
    """The results of a check."""

    proven: Sequence[Proof]
    tested: ScoredTexts
    identity: Sequence[TextComparison]
    settings: Mapping[str, Any]

    @property
    def lossy(self) -> list[str]:
        """The verifiers in use that announce that they are not lossless."""
        return sorted({proof.claim.verifier for proof in self.proven if not proof.claim.lossless})

    @property
    def lossless(self) -> bool:
        """Whether every part of the check passed, and every verifier announces that it is lossless."""
        parts = [*(proof.passed for proof in self.proven), *(each.passed for each in self.identity)]
        return all(parts) and self.tested.passed and not self.lossy

    def verdict(self) -> str:
        """Return the conclusion as one sentence."""
        if self.lossy:
            return f"not lossless by design: {', '.join(self.lossy)}"
        if self.lossless:
            return "lossless: everything that was proven, tested and compared holds"
        failed = [
            *(["the proof"] if not all(proof.passed for proof in self.proven) else []),
            *(["the tests on this pair"] if not self.tested.passed else []),
            *(["the identity of texts"] if not all(each.passed for each in self.identity) else []),
        ]
        return f"NOT lossless: {' and '.join(failed)} failed"

    def notes(self) -> Iterator[str]:
        """Yield the limits of this check."""
        for proof in self.proven:
            if not proof.mean_accepted:
                yield f"no draft was ever accepted while {proof.claim.verifier} was enumerated"
        if not self.tested.speculation.num_draft_tokens:
            yield "nothing was drafted in the tested texts: they show plain decoding alone"
        if self.tested.scores.impossible and not self.tested.bitwise:
            yield "tokens of probability 0 may be rounding at a filter's border on these kernels"
        if any(each.gap is not None and each.passed for each in self.identity):
            yield "these kernels are exact given the logits: near-ties fall otherwise in another batch"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {
            "lossless": self.lossless,
            "verdict": self.verdict(),
            "lossy_rules": self.lossy,
            "proven": [proof.to_dict() for proof in self.proven],
            "tested": self.tested.to_list(),
            "identity": [each.to_dict() for each in self.identity],
            "speculation": self.tested.speculation.to_dict(),
            "settings": dict(self.settings),
            "notes": list(self.notes()),
        }


def run_check(
    subject: Subject,
    cases: int,
    texts: int,
    tell: Tell = lambda part: None,
    found: Found = lambda key, value: None,
) -> Report:
    """Prove on tables, test on the pair, and compare texts.

    cases: random pairs of distributions for the verifier of sampled requests. texts: number of texts that are tested.
    found: called with the settings, each proof, the counts of speculation, the list of tests and each comparison.
    """
    requests = subject.requests()
    described = settings(subject, requests, cases, texts)
    found("settings", described)
    proven = list(_prove(subject, requests, cases, tell, found))
    tested = draw_and_score(subject, texts, tell)
    found("speculation", tested.speculation.to_dict())
    found("tested", tested.to_list())
    identity: list[TextComparison] = []
    for kind in ("greedy", "seeded"):
        tell(f"Comparing {kind} texts")
        compared = compare(subject.runtime, kind, subject.prompts, subject.kinds[kind])
        for each in compared:
            found("identity", each.to_dict())
        identity += compared
    return Report(proven, tested, identity, described)


def _prove(subject: Subject, requests: Mapping[str, Request], cases: int, tell: Tell, found: Found) -> Iterator[Proof]:
    """Yield the proof of each verifier in use."""
    spec = subject.config.speculative()
    assert spec is not None, "nothing drafts"
    verifiers, _ = build_verifiers(spec)
    draft = choose_draft(spec, verifiers)
    for claim in claims(requests, cases):
        proof = prove(claim, draft, verifiers, tell)
        found("proven", proof.to_dict())
        yield proof


def draw_and_score(subject: Subject, count: int, tell: Tell) -> ScoredTexts:
    """Draw texts with speculation, and score every token by the target's own distribution."""
    tell("Drawing texts")
    prompts = list(itertools.islice(itertools.cycle(subject.prompts), count))
    texts = complete(subject.runtime, prompts, [subject.params] * count)
    tell("Scoring texts")
    scores = score_texts(subject.config, subject.runtime, texts)
    speculation = SpeculationMetrics.total(text.metrics.speculative_decoding for text in texts)
    bitwise = subject.runtime.checkpoint.backend.row_invariant or not is_filtered(subject.params)
    return ScoredTexts(count, scores, speculation, bitwise)


def settings(subject: Subject, requests: Mapping[str, Request], cases: int, texts: int) -> dict[str, Any]:
    """Return the settings of the check, as plain values for JSON."""
    runtime = subject.runtime
    return {
        "engine": {**asdict(subject.config), "max_model_len": runtime.limits.max_model_len},
        "target": runtime.checkpoint.name,
        "dtype": str(runtime.checkpoint.dtype).removeprefix("torch."),
        "kernels": runtime.checkpoint.kernels,
        "speculation": runtime.speculation,
        "rules": {kind: request.drafts.verifier for kind, request in requests.items()},
        "sampling": _plain(subject.params),
        "cases": cases,
        "prompts": len(subject.prompts),
        "texts": texts,
        "false_alarm": FALSE_ALARM,
    }


def _plain(params: SamplingParams) -> dict[str, Any]:
    """Return the settings that determine a distribution or an end, as plain values for JSON."""
    bias = {str(token): value if math.isfinite(value) else str(value) for token, value in params.logit_bias.items()}
    return {**{name: getattr(params, name) for name in SAMPLING}, "logit_bias": bias}
