from .base import (
    CheckedVerifier as CheckedVerifier,
    Verifier as Verifier,
    VerifierNeeds as VerifierNeeds,
    Verifiers as Verifiers,
    checked_verifiers as checked_verifiers,
    follow as follow,
)
from .execution import Speculated as Speculated, Weights as Weights, speculate as speculate
from .match import Match as Match
from .multi_draft import MultiDraft as MultiDraft, iterative_speculative_sample as iterative_speculative_sample
from .rejection import Rejection as Rejection
