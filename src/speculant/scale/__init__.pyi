from .application import PROXIES as PROXIES, app as app, read_arguments as read_arguments
from .batches import (
    MOST_BYTES as MOST_BYTES,
    Answerer as Answerer,
    BatchJob as BatchJob,
    BatchLine as BatchLine,
    LineAnswer as LineAnswer,
    LineError as LineError,
    Origin as Origin,
    Write as Write,
    answer_lines as answer_lines,
    custom_id_of as custom_id_of,
    digest_of as digest_of,
    failure as failure,
    inside as inside,
    is_torn as is_torn,
    places_of as places_of,
    raw_lines as raw_lines,
    read_line as read_line,
    read_record as read_record,
    success as success,
)
from .front import (
    MOST_CHARACTERS as MOST_CHARACTERS,
    REPLICA as REPLICA,
    TRIES as TRIES,
    Fleet as Fleet,
    RoutedRequest as RoutedRequest,
    make_front as make_front,
    routed as routed,
)
from .held import MARGIN_S as MARGIN_S, HeldPrefixes as HeldPrefixes
from .options import (
    FULL as FULL,
    REPLICA_FIELDS as REPLICA_FIELDS,
    Cores as Cores,
    ReplicaOptions as ReplicaOptions,
    check_fit as check_fit,
    check_ray as check_ray,
    cores_of_each as cores_of_each,
    equal_share as equal_share,
    fitting as fitting,
    needed as needed,
    replica_range as replica_range,
    wanted_replicas as wanted_replicas,
    with_absolute_paths as with_absolute_paths,
)
from .ray_batches import answer_on_ray as answer_on_ray
from .replicas import LocalReplicas as LocalReplicas, connect as connect
from .router import SentTexts as SentTexts
