from .acceptance import (
    Simulation as Simulation,
    correlated_tokens as correlated_tokens,
    correlation_of as correlation_of,
    divergence as divergence,
    greedy_acceptance as greedy_acceptance,
    marks as marks,
    rejection_sampling_acceptance as rejection_sampling_acceptance,
    simulate as simulate,
)
from .speedup import (
    FLAT as FLAT,
    VerificationCurve as VerificationCurve,
    accepted_lengths as accepted_lengths,
    best_length as best_length,
    expected_costs as expected_costs,
    expected_tokens as expected_tokens,
    least_acceptance as least_acceptance,
    operations as operations,
    oracle_speedup as oracle_speedup,
    speedups as speedups,
    step_costs as step_costs,
    survival as survival,
)
from .trees import best_tree as best_tree, expected_accepted as expected_accepted
