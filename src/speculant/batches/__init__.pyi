from .job import BatchJob as BatchJob
from .lines import (
    MOST_BYTES as MOST_BYTES,
    BatchLine as BatchLine,
    LineAnswer as LineAnswer,
    LineError as LineError,
    custom_id_of as custom_id_of,
    digest_of as digest_of,
    failure as failure,
    is_torn as is_torn,
    raw_lines as raw_lines,
    read_line as read_line,
    read_record as read_record,
    success as success,
)
from .origin import Origin as Origin
from .results import Write as Write
from .run import Answerer as Answerer, answer_lines as answer_lines, inside as inside, places_of as places_of
