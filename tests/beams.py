"""Hypotheses and their scores, made of plain texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from speculant.beams import Beams, BeamSearch, Continuations, Hypothesis, Scored
from speculant.types import Request

Text = tuple[int, ...]


def hypotheses(texts: Mapping[Text, float] | Iterable[Text]) -> tuple[Hypothesis, ...]:
    """Link texts that share their beginning; log-probabilities are those given, -1 unless there are any."""
    logprobs = texts if isinstance(texts, Mapping) else dict.fromkeys(texts, -1.0)
    known: dict[Text, Hypothesis] = {(): Hypothesis()}
    for text, logprob in sorted(logprobs.items(), key=lambda each: len(each[0])):
        for end in range(1, len(text) + 1):
            if text[:end] not in known:
                known[text[:end]] = known[text[: end - 1]].continued(text[end - 1], logprob)
    return tuple(known[text] for text in logprobs)


def text_of(hypothesis: Hypothesis) -> Text:
    """Return its tokens as a key."""
    return tuple(hypothesis.tokens())


def texts_of(those: Iterable[Hypothesis]) -> list[Text]:
    """Return their tokens as keys."""
    return [text_of(each) for each in those]


def scored(beams: Beams, known: Mapping[Text, Continuations]) -> dict[Hypothesis, Scored]:
    """Return the scores of live hypotheses whose continuations are known for these texts."""

    def of(text: Text) -> Scored:
        longer = [(*text, token) for token, _ in known[text]]
        return Scored(known[text], {each[-1]: of(each) for each in longer if each in known})

    return {each: of(text_of(each)) for each in beams.live if text_of(each) in known}


def give_search(request: Request, beams: Beams) -> BeamSearch[Request]:
    """Let a request search for itself alone."""
    request.search = BeamSearch(beams, [request])
    return request.search


def beams_of(request: Request) -> Beams:
    """Return where a request's search stands."""
    assert request.search is not None, "this is no beam search"
    return request.search.beams


def is_fed(request: Request) -> bool:
    """Whether it takes part in passes: the first sample of a search does so for all."""
    return request.search is None or request.search.samples[0] is request


def found_by(request: Request) -> tuple[float | None, float | None]:
    """Return the log-probability and the score of a search's result for a request."""
    if request.search is None:
        return None, None
    found = request.search.result(request.index)
    return found.logprob if found else None, request.search.score(request.index)
