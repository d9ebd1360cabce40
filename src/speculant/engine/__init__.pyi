from .async_engine import AsyncEngine as AsyncEngine, PieceStream as PieceStream
from .build import (
    Runtime as Runtime,
    build_around as build_around,
    build_drafters as build_drafters,
    build_engine as build_engine,
    build_verifiers as build_verifiers,
    expected_bytes as expected_bytes,
    load_target as load_target,
    load_tokenizer as load_tokenizer,
    load_verifiers as load_verifiers,
    method_name as method_name,
)
from .commit import Committed as Committed, fail as fail, roll_back as roll_back
from .draft_loading import DraftLoader as DraftLoader, draft_vocabulary as draft_vocabulary
from .engine import Engine as Engine, EngineOptions as EngineOptions
from .fair_steps import FairSteps as FairSteps
from .generation import (
    REFUSED as REFUSED,
    ExplicitEncoderDecoderPrompt as ExplicitEncoderDecoderPrompt,
    Generation as Generation,
    PlainPrompt as PlainPrompt,
    Prompt as Prompt,
    PromptPair as PromptPair,
    RenderedPrompt as RenderedPrompt,
    StreamPiece as StreamPiece,
    TextPrompt as TextPrompt,
    TokensPrompt as TokensPrompt,
)
from .learning import (
    LearnedFiles as LearnedFiles,
    Learning as Learning,
    target_digest as target_digest,
)
from .llm import (
    LLM as LLM,
    BeamSearchOutput as BeamSearchOutput,
    BeamSearchParams as BeamSearchParams,
    BeamSearchSequence as BeamSearchSequence,
    progress as progress,
)
from .logprobs import LogprobRow as LogprobRow, record_prompt as record_prompt, token_logprobs as token_logprobs
from .memory import (
    FALLBACK as FALLBACK,
    SHARE_OF_FREE as SHARE_OF_FREE,
    CacheMemory as CacheMemory,
    Need as Need,
    free_memory as free_memory,
)
from .nearby import candidates as candidates
from .precision import (
    AUTO as AUTO,
    LEAST_GAIN as LEAST_GAIN,
    PROMPT as PROMPT,
    ROOM as ROOM,
    UNCHANGED as UNCHANGED,
    DraftSample as DraftSample,
    LargeDraft as LargeDraft,
    Precision as Precision,
    choose_precision as choose_precision,
    draft_seconds as draft_seconds,
    drawn as drawn,
    hosting as hosting,
    keep_choice as keep_choice,
    pass_seconds as pass_seconds,
    probs_along as probs_along,
    rounded as rounded,
)
from .profiling import (
    PHASES as PHASES,
    check_trace_path as check_trace_path,
    profiled as profiled,
    unmarked as unmarked,
)
from .requests import CheckedRequest as CheckedRequest, RequestFactory as RequestFactory
from .runner import (
    Decision as Decision,
    TargetOutput as TargetOutput,
    advance_sound as advance_sound,
    forward_target as forward_target,
    verifier_for as verifier_for,
    verify as verify,
    verify_sound as verify_sound,
)
from .step import DraftBudget as DraftBudget
from .vllm_arguments import (
    ABSENT as ABSENT,
    FRONTEND as FRONTEND,
    QUANTISED as QUANTISED,
    RENAMED as RENAMED,
    ROUNDED as ROUNDED,
    RULES as RULES,
    SERVER_RULES as SERVER_RULES,
    SHORT as SHORT,
    SPECULATIVE_RULES as SPECULATIVE_RULES,
    SWITCHES as SWITCHES,
    TOOL_PARSERS as TOOL_PARSERS,
    VALUES as VALUES,
    check_call as check_call,
    configured as configured,
    read_arguments as read_arguments,
)
