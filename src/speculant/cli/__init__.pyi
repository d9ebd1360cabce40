from .chat import (
    Answer as Answer,
    AnswerPiece as AnswerPiece,
    Conversation as Conversation,
    LocalChatBackend as LocalChatBackend,
    Messages as Messages,
    RemoteChatBackend as RemoteChatBackend,
    Summary as Summary,
)
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
from .doctor import (
    Speeds as Speeds,
    inspect_machine as inspect_machine,
    inspect_model as inspect_model,
    measure_speeds as measure_speeds,
)
from .entry import EXIT_INTERRUPTED as EXIT_INTERRUPTED
from .flags import (
    NEW_TOKENS as NEW_TOKENS,
    EngineFlags as EngineFlags,
    FlagGroup as FlagGroup,
    LogLevel as LogLevel,
    Model as Model,
    NamedModel as NamedModel,
    SamplingFlags as SamplingFlags,
    accepts_flags as accepts_flags,
    accepts_log_level as accepts_log_level,
    model_first as model_first,
    parse_mapping as parse_mapping,
    parse_speculation as parse_speculation,
    profiling as profiling,
)
from .generate import fetch as fetch, figures as figures, read_prompt as read_prompt
from .main import all_commands as all_commands, app as app
from .serve import (
    LISTENING as LISTENING,
    LinePrinter as LinePrinter,
    ServerFlags as ServerFlags,
    VllmFlags as VllmFlags,
)
from .terminal import (
    Bar as Bar,
    Parts as Parts,
    WholeSummaries as WholeSummaries,
    command_group as command_group,
    counted_progress as counted_progress,
    examples as examples,
    messages as messages,
    minutes_left as minutes_left,
    plain_table as plain_table,
    print_json as print_json,
    progress as progress,
    progress_bar as progress_bar,
    progress_of_parts as progress_of_parts,
    results as results,
    show_error as show_error,
)
