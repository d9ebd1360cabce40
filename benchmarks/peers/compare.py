"""Runs all peers in turn on the same prompts, one case after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.base import Job, Measurement, Mode, Pair, Peer, PeerError, Workload
from benchmarks.peers.models import Workloads

from speculant.cli import measure_speeds
from speculant.lab.bench import interleave
from speculant.text import Tokenizer


@dataclass(frozen=True)
class Case:
    """The settings that all peers share: tokens of a prompt, prompts at once, precision of the weights."""

    prompt_tokens: int
    batch: int
    precision: str


@dataclass(frozen=True)
class Plan:
    """The cases and modes to measure. tokens: new ones for each prompt."""

    cases: Sequence[Case]
    modes: Sequence[Mode]
    tokens: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: a peer, its format of the weights, and the name of a mode."""

    peer: str
    format: str
    mode: str


@dataclass(frozen=True)
class Run:
    """One measurement, the texts of its outputs, and the memory speed just before: GB/s that all threads read."""

    measured: Measurement
    texts: Sequence[str] | None
    read_gb_per_s: float


@dataclass(frozen=True)
class CaseResult:
    """The runs of a case by entry, one for each round; notes have the reasons why others did not run."""

    case: Case
    runs: Mapping[Entry, Sequence[Run]] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass
class _Subject:
    """A peer with weights of one format; each call is the next round, which has prompts of its own."""

    peer: Peer
    format: str
    jobs: Iterator[Job]  # one for each round
    decode: Callable[[Sequence[int]], str]

    def __call__(self) -> dict[str, Run] | PeerError:
        job, read = next(self.jobs), measure_speeds().read
        try:
            found = self.peer.run(job)
        except PeerError as error:
            return error
        return {mode: Run(each, self._texts(each), read) for mode, each in found.items()}

    def _texts(self, measured: Measurement) -> Sequence[str] | None:
        return measured.texts if measured.outputs is None else [self.decode(ids) for ids in measured.outputs]


class Comparison:
    """The installed peers, and the models in the format of each."""

    def __init__(self, peers: Sequence[Peer], models: Pair, folder: Path, tokenizer: Tokenizer) -> None:
        """models: in Speculant's format. folder: of the conversions."""
        self._peers, self._models, self._folder, self._tokenizer = peers, models, folder, tokenizer
        self._prepared: dict[str, Pair | PeerError] = {}

    def run(self, plan: Plan, notify: Callable[[str], None]) -> Iterator[CaseResult]:
        """Yield the result of each case when it has run. notify: called with a line before each run.

        The workloads of all cases are made before anything is measured, so that an impossible one fails at once.
        """
        notify("making the prompts of all cases")
        made = [self._make_workloads(case, plan) for case in plan.cases]
        for case, workloads in zip(plan.cases, made, strict=True):
            notes, subjects = list[str](), dict[str, _Subject]()
            for peer, weights in self._formats(case):
                self._enter(subjects, notes, peer, weights, case, workloads, plan)

            def tell(name: str, case: Case = case) -> None:
                notify(f"{case.prompt_tokens} tokens, {case.batch} at once, {case.precision}: {name}")

            rounds = interleave(subjects, plan.rounds, tell)
            yield CaseResult(case, *_by_entry(subjects, rounds, notes))

    def _formats(self, case: Case) -> Iterator[tuple[Peer, str]]:
        for peer in self._peers:
            for weights in peer.formats.get(case.precision, ()):
                yield peer, weights

    def _make_workloads(self, case: Case, plan: Plan) -> list[Workload]:
        """Make one workload for each round; cases that differ in precision alone have the same ones."""
        source = Workloads(self._tokenizer)
        return [source.make(case.batch, case.prompt_tokens, plan.tokens) for _ in range(plan.rounds)]

    def _enter(
        self,
        subjects: dict[str, _Subject],
        notes: list[str],
        peer: Peer,
        weights: str,
        case: Case,
        workloads: Sequence[Workload],
        plan: Plan,
    ) -> None:
        """Add a peer with one format to the subjects, or the reason why not to the notes."""
        name, refusals = f"{peer.name} {weights}", {mode: peer.refusal(mode, case.batch) for mode in plan.modes}
        modes = [mode for mode, refusal in refusals.items() if refusal is None]
        for reason in dict.fromkeys(filter(None, refusals.values())):
            refused = ", ".join(mode.name for mode, refusal in refusals.items() if refusal == reason)
            notes.append(f"{name}, {refused}: {reason}")
        models = self._prepare(peer, weights)
        if isinstance(models, PeerError):
            notes.append(f"{name}: {models}")
            return
        if modes:
            jobs = [Job(models, weights, modes, workload, plan.threads) for workload in workloads]
            subjects[name] = _Subject(peer, weights, iter(jobs), self._tokenizer.decode)

    def _prepare(self, peer: Peer, weights: str) -> Pair | PeerError:
        """Convert the models once; a failed conversion is not tried again."""
        name = f"{peer.name} {weights}"
        if name not in self._prepared:
            try:
                self._prepared[name] = peer.prepare(self._models, weights, self._folder)
            except PeerError as error:
                self._prepared[name] = error
        return self._prepared[name]


def _by_entry(
    subjects: Mapping[str, _Subject], rounds: Mapping[str, Sequence[dict[str, Run] | PeerError]], notes: Sequence[str]
) -> tuple[dict[Entry, list[Run]], list[str]]:
    """Return the runs by entry, and the notes; a peer that failed in any round has a note and no runs."""
    runs, failures = dict[Entry, list[Run]](), list[str]()
    for name, results in rounds.items():
        failed = [each for each in results if isinstance(each, PeerError)]
        if failed:
            failures.append(f"{name} failed: {failed[0]}")
            continue
        subject = subjects[name]
        for result in results:
            for mode, run in result.items() if isinstance(result, dict) else ():
                runs.setdefault(Entry(subject.peer.name, subject.format, mode), []).append(run)
    return runs, [*notes, *failures]
