from .base import Verifier as Verifier, VerifierNeeds as VerifierNeeds, follow as follow, is_following as is_following
from .execution import Speculated as Speculated, Weights as Weights, speculate as speculate
from .match import Match as Match
from .multi_draft import MultiDraft as MultiDraft, iterative_speculative_sample as iterative_speculative_sample
from .rejection import Rejection as Rejection
