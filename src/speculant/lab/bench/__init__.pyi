from .acceptance import (
    BLOCK as BLOCK,
    Estimate as Estimate,
    Text as Text,
    TextAcceptance as TextAcceptance,
    TextReader as TextReader,
    estimate as estimate,
    measure_acceptance as measure_acceptance,
    pooled as pooled,
    read_text as read_text,
)
from .alpha import Alpha as Alpha, along_texts as along_texts, measure_alpha as measure_alpha
from .compare import (
    Setting as Setting,
    build_ways as build_ways,
    compared as compared,
    configured as configured,
    settings as settings,
    usual_settings as usual_settings,
)
from .decoding import (
    COMPLETION as COMPLETION,
    DRAFT as DRAFT,
    EDIT as EDIT,
    HELD_OUT as HELD_OUT,
    SHAPE as SHAPE,
    TARGET as TARGET,
    TEXTS as TEXTS,
    Decoded as Decoded,
    LoadedPair as LoadedPair,
    by_text_and_method as by_text_and_method,
    decode as decode,
    prompts_of as prompts_of,
)
from .drafting import (
    check_drafts as check_drafts,
    require_lengths as require_lengths,
    stored_parameters as stored_parameters,
)
from .gains import gain as gain
from .head_sizes import (
    HeadSize as HeadSize,
    best_size as best_size,
    measure_sizes as measure_sizes,
    overlaps as overlaps,
    sizes_of as sizes_of,
)
from .history import (
    Change as Change,
    Comparison as Comparison,
    HistoryEntry as HistoryEntry,
    append as append,
    command_of as command_of,
    entry_of as entry_of,
    read as read,
    typical as typical,
)
from .http_load import Exchange as Exchange, Load as Load, LoadRun as LoadRun, connector as connector
from .measuring import (
    SPECULATIVE as SPECULATIVE,
    BenchCase as BenchCase,
    Spread as Spread,
    Way as Way,
    both_ways as both_ways,
    interleave as interleave,
    measure as measure,
    one_at_a_time as one_at_a_time,
    ratios as ratios,
    spreads as spreads,
    ways_of as ways_of,
)
from .oracle_costs import oracle_seconds as oracle_seconds
from .outputs import OutputFiles as OutputFiles
from .pair import (
    LENGTHS as LENGTHS,
    Candidate as Candidate,
    Findings as Findings,
    Notify as Notify,
    SpeedPrediction as SpeedPrediction,
    check_pair as check_pair,
    load_pair as load_pair,
    predict as predict,
    write_texts as write_texts,
)
from .quality import ChunkScores as ChunkScores, Compared as Compared, Interval as Interval, QualityText as QualityText
from .report import (
    by_category as by_category,
    conclusions as conclusions,
    described_rounds as described_rounds,
    heading as heading,
    plain_values as plain_values,
)
from .runner import (
    Benchmark as Benchmark,
    markdown as markdown,
    origin as origin,
    quartiles as quartiles,
    ratio as ratio,
    timed as timed,
)
from .runs import Bench as Bench, BenchRun as BenchRun, Mode as Mode
from .samples import (
    LINE_END as LINE_END,
    Span as Span,
    chrome_trace as chrome_trace,
    recorded as recorded,
    take_samples as take_samples,
)
from .serving_load import Level as Level, LoadPlan as LoadPlan, measure_serving as measure_serving
from .sizes import Size as Size, memory as memory
from .step_costs import LengthCosts as LengthCosts, measure_steps as measure_steps
from .sweep import (
    SweepPlan as SweepPlan,
    chains_of as chains_of,
    predict_sweep as predict_sweep,
    sweep_params as sweep_params,
)
from .tables import ROWS as ROWS, cell as cell
from .workloads import (
    CODE as CODE,
    EDIT_LENGTH as EDIT_LENGTH,
    OPENINGS as OPENINGS,
    USUAL_LENGTH as USUAL_LENGTH,
    Workload as Workload,
    WorkloadConfig as WorkloadConfig,
    added_tokens as added_tokens,
    arrival_times as arrival_times,
    code_prompt as code_prompt,
    edit_prompt as edit_prompt,
    make_workload as make_workload,
    ordinary_ids as ordinary_ids,
    random_prompt as random_prompt,
    require_room as require_room,
    server_prompts as server_prompts,
)
