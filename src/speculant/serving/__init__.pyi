from .anthropic.messages import (
    MESSAGE_BODIES as MESSAGE_BODIES,
    MessagesBody as MessagesBody,
    chat_of as chat_of,
    is_billing as is_billing,
)
from .app import (
    OPEN_PATHS as OPEN_PATHS,
    PAGE as PAGE,
    add_guards as add_guards,
    add_page as add_page,
    make_app as make_app,
)
from .http.clients import (
    API_KEY as API_KEY,
    USER as USER,
    Connections as Connections,
    Rarely as Rarely,
    RoundRobin as RoundRobin,
    bounded_connections as bounded_connections,
    client_of as client_of,
    is_within as is_within,
    key_digest as key_digest,
    network_of as network_of,
    read_weights as read_weights,
    salt_of as salt_of,
    with_mapped as with_mapped,
)
from .http.connection import (
    MOST_HEADERS as MOST_HEADERS,
    ChunkCount as ChunkCount,
    HttpConnection as HttpConnection,
    Surroundings as Surroundings,
    check_head as check_head,
    check_request as check_request,
    find_head as find_head,
)
from .http.limits import (
    ApiKeys as ApiKeys,
    BodyBytes as BodyBytes,
    Heads as Heads,
    NamedUsers as NamedUsers,
    RequestLimits as RequestLimits,
)
from .http.server import LAST_EVENTS as LAST_EVENTS, Acceptor as Acceptor, Server as Server, tls_context as tls_context
from .infill import IndentedLines as IndentedLines
from .metrics import (
    RequestMeter as RequestMeter,
    ServerMetrics as ServerMetrics,
    joined as joined,
    token_buckets as token_buckets,
)
from .models import (
    Admission as Admission,
    LoadedModels as LoadedModels,
    ModelSource as ModelSource,
    ServedModel as ServedModel,
    check_sizes as check_sizes,
)
from .openai.ahead import answers as answers, certain as certain
from .openai.answers import (
    LOWEST as LOWEST,
    TokenTexts as TokenTexts,
    chat_logprob as chat_logprob,
    completion_logprobs as completion_logprobs,
    prompt_logprobs as prompt_logprobs,
)
from .openai.messages import (
    MessageReader as MessageReader,
    ReasoningParser as ReasoningParser,
    find_reasoning as find_reasoning,
    joined_calls as joined_calls,
)
from .openai.protocol import (
    ACCEPTED as ACCEPTED,
    BODIES as BODIES,
    MOST_ENTRIES as MOST_ENTRIES,
    REFUSED as REFUSED,
    SETTINGS as SETTINGS,
    Body as Body,
    ChatBody as ChatBody,
    CompletionBody as CompletionBody,
    GeneratingBody as GeneratingBody,
    InfillBody as InfillBody,
    Message as Message,
    ResponseBody as ResponseBody,
    count_entries as count_entries,
    read_body as read_body,
)
from .openai.responses import (
    as_chat as as_chat,
    as_messages as as_messages,
    page_of as page_of,
    read_items as read_items,
    shown_settings as shown_settings,
)
from .openai.settings import (
    Prompt as Prompt,
    Prompts as Prompts,
    chat_params as chat_params,
    completion_params as completion_params,
    finish_reason_of_calls as finish_reason_of_calls,
    reader_for as reader_for,
    unknown_formats as unknown_formats,
    with_allowed_tools as with_allowed_tools,
    with_bounded_drafts as with_bounded_drafts,
    with_tools as with_tools,
)
from .openai.store import (
    PER_ITEM as PER_ITEM,
    PER_RESPONSE as PER_RESPONSE,
    SHARE as SHARE,
    ResponseStore as ResponseStore,
    StoredItem as StoredItem,
    StoredResponse as StoredResponse,
    Turn as Turn,
)
from .options import MOST_MESSAGES as MOST_MESSAGES, ServerOptions as ServerOptions
from .process import (
    InsideRequest as InsideRequest,
    ResponseHead as ResponseHead,
    load_app as load_app,
    load_engine as load_engine,
    responses as responses,
    whole_response as whole_response,
)
from .records import (
    FORMS as FORMS,
    AccessLog as AccessLog,
    RequestRecord as RequestRecord,
    RequestRecords as RequestRecords,
    Tracer as Tracer,
    logger as logger,
    phases as phases,
    traces_url as traces_url,
)
from .state import LARGE as LARGE, ServerState as ServerState, TextLanes as TextLanes
from .tools import find_format as find_format
from .tools.base import (
    CallShape as CallShape,
    Delta as Delta,
    ReasoningDelta as ReasoningDelta,
    TextDelta as TextDelta,
    ToolDelta as ToolDelta,
    ToolParser as ToolParser,
    call_grammar as call_grammar,
    choose_tools as choose_tools,
    json_symbol as json_symbol,
    parse as parse,
    read_tools as read_tools,
)
from .wire import (
    ABORT as ABORT,
    RECORD as RECORD,
    REQUEST_ID as REQUEST_ID,
    ApiError as ApiError,
    ClientGoneError as ClientGoneError,
    Deferred as Deferred,
    EventStream as EventStream,
    api_error as api_error,
    encode as encode,
    encode_in_parts as encode_in_parts,
    error_event as error_event,
    event as event,
    json_response as json_response,
    note_end as note_end,
    refusal as refusal,
    scrub as scrub,
    timed_out as timed_out,
    unavailable as unavailable,
    while_connected as while_connected,
)
