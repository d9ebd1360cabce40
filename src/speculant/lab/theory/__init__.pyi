from .acceptance import (
    divergence as divergence,
    greedy_acceptance as greedy_acceptance,
    rejection_sampling_acceptance as rejection_sampling_acceptance,
)
from .correlation import correlated_tokens as correlated_tokens, correlation_of as correlation_of, marks as marks
from .curve import FLAT as FLAT, VerificationCurve as VerificationCurve
from .oracle import oracle_speedup as oracle_speedup
from .simulate import Simulation as Simulation
from .speedup import (
    accepted_lengths as accepted_lengths,
    best_length as best_length,
    expected_costs as expected_costs,
    expected_tokens as expected_tokens,
    least_acceptance as least_acceptance,
    operations as operations,
    speedups as speedups,
    step_costs as step_costs,
    survival as survival,
)
from .trees import best_tree as best_tree, expected_accepted as expected_accepted
