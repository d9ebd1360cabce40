from .chat import Conversation as Conversation
from .chat_backends import (
    Answer as Answer,
    AnswerPiece as AnswerPiece,
    LocalChatBackend as LocalChatBackend,
    Messages as Messages,
    RemoteChatBackend as RemoteChatBackend,
    Summary as Summary,
)
from .check_lossless import CheckedEngine as CheckedEngine, CheckedSampling as CheckedSampling
from .demo import (
    ACCEPTED as ACCEPTED,
    CHOSEN as CHOSEN,
    DTYPE as DTYPE,
    PROMPT as PROMPT,
    SPEC_LENGTH as SPEC_LENGTH,
    ComparedPrompt as ComparedPrompt,
    DecodedPrompt as DecodedPrompt,
    pool as pool,
    run as run,
    summary as summary,
)
from .describe import figures as figures
from .doctor import Speeds as Speeds, inspect_machine as inspect_machine, measure_speeds as measure_speeds
from .flags import (
    NEW_TOKENS as NEW_TOKENS,
    BenchSampling as BenchSampling,
    EngineFlags as EngineFlags,
    FlagGroup as FlagGroup,
    LogLevel as LogLevel,
    SamplingFlags as SamplingFlags,
    accepts_flags as accepts_flags,
    parse_mapping as parse_mapping,
    parse_speculation as parse_speculation,
)
from .generate import read_prompt as read_prompt
from .main import COMMANDS as COMMANDS, app as app
from .model_report import inspect_model as inspect_model
from .serve import LinePrinter as LinePrinter, ServerFlags as ServerFlags
from .terminal import (
    Parts as Parts,
    counted_progress as counted_progress,
    messages as messages,
    print_json as print_json,
    progress as progress,
    progress_of_runs as progress_of_runs,
    results as results,
    show_error as show_error,
)
from .train import TrainingFlags as TrainingFlags
from .train_draft import BoostedFlags as BoostedFlags
from .train_head import HeadFlags as HeadFlags
from .train_seq2seq import Seq2SeqFlags as Seq2SeqFlags
from .train_static import decoder_texts as decoder_texts
