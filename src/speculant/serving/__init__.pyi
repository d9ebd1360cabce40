from .acceptor import Acceptor as Acceptor
from .access_log import FORMS as FORMS, AccessLog as AccessLog, logger as logger
from .app import (
    OPEN_PATHS as OPEN_PATHS,
    PAGE as PAGE,
    add_guards as add_guards,
    add_page as add_page,
    make_app as make_app,
)
from .clients import (
    API_KEY as API_KEY,
    USER as USER,
    client_of as client_of,
    is_within as is_within,
    key_digest as key_digest,
    network_of as network_of,
    read_weights as read_weights,
    salt_of as salt_of,
    with_mapped as with_mapped,
)
from .connections import Connections as Connections, Rarely as Rarely, bounded_connections as bounded_connections
from .errors import (
    ApiError as ApiError,
    api_error as api_error,
    refusal as refusal,
    scrub as scrub,
    timed_out as timed_out,
    unavailable as unavailable,
)
from .fields import ACCEPTED as ACCEPTED, REFUSED as REFUSED
from .http1 import HttpConnection as HttpConnection, Surroundings as Surroundings
from .inside import InsideRequest as InsideRequest, ResponseHead as ResponseHead, whole_response as whole_response
from .messages import MessageReader as MessageReader, joined_calls as joined_calls
from .metrics import RequestMeter as RequestMeter, ServerMetrics as ServerMetrics, token_buckets as token_buckets
from .middleware import (
    ApiKeys as ApiKeys,
    BodyBytes as BodyBytes,
    Heads as Heads,
    NamedUsers as NamedUsers,
    RequestIds as RequestIds,
    RequestLimits as RequestLimits,
)
from .options import MOST_MESSAGES as MOST_MESSAGES, ServerOptions as ServerOptions
from .process import load_app as load_app, load_engine as load_engine
from .prompts import Prompt as Prompt
from .protocol import (
    BODIES as BODIES,
    MOST_ENTRIES as MOST_ENTRIES,
    SETTINGS as SETTINGS,
    Body as Body,
    ChatBody as ChatBody,
    CompletionBody as CompletionBody,
    GeneratingBody as GeneratingBody,
    Message as Message,
    ResponseBody as ResponseBody,
    count_entries as count_entries,
    read_body as read_body,
)
from .reasoning import ReasoningParser as ReasoningParser, find_reasoning as find_reasoning
from .records import (
    RECORD as RECORD,
    REQUEST_ID as REQUEST_ID,
    RequestRecord as RequestRecord,
    RequestRecords as RequestRecords,
    note_end as note_end,
)
from .request_heads import (
    MOST_HEADERS as MOST_HEADERS,
    ChunkCount as ChunkCount,
    check_head as check_head,
    check_request as check_request,
    find_head as find_head,
)
from .responses.chat import as_chat as as_chat, shown_settings as shown_settings
from .responses.items import as_messages as as_messages, read_items as read_items
from .responses.routes import page_of as page_of
from .responses.store import (
    PER_ITEM as PER_ITEM,
    PER_RESPONSE as PER_RESPONSE,
    SHARE as SHARE,
    ResponseStore as ResponseStore,
    StoredItem as StoredItem,
    StoredResponse as StoredResponse,
    Turn as Turn,
)
from .round_robin import RoundRobin as RoundRobin
from .sampling import (
    chat_params as chat_params,
    completion_params as completion_params,
    response_params as response_params,
    with_bounded_drafts as with_bounded_drafts,
)
from .server import Server as Server
from .service import error_event as error_event
from .state import Admission as Admission, ServerState as ServerState
from .streams import (
    ABORT as ABORT,
    ClientGoneError as ClientGoneError,
    EventStream as EventStream,
    while_connected as while_connected,
)
from .text_lanes import LARGE as LARGE, TextLane as TextLane, TextLanes as TextLanes
from .token_texts import (
    LOWEST as LOWEST,
    TokenTexts as TokenTexts,
    chat_logprob as chat_logprob,
    completion_logprobs as completion_logprobs,
    prompt_logprobs as prompt_logprobs,
)
from .tool_use import (
    finish_reason_of_calls as finish_reason_of_calls,
    reader_for as reader_for,
    unknown_formats as unknown_formats,
    with_allowed_tools as with_allowed_tools,
    with_tools as with_tools,
)
from .tools import call_schema as call_schema, find_format as find_format, find_parser as find_parser
from .tools.base import (
    Delta as Delta,
    ReasoningDelta as ReasoningDelta,
    TextDelta as TextDelta,
    ToolDelta as ToolDelta,
    parse as parse,
)
from .tools.schema import CallShape as CallShape, call_grammar as call_grammar, json_symbol as json_symbol
from .tracing import Tracer as Tracer, phases as phases, traces_url as traces_url
from .wire import (
    Deferred as Deferred,
    encode as encode,
    encode_in_parts as encode_in_parts,
    event as event,
    json_response as json_response,
)
