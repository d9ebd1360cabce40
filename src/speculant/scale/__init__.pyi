from .application import PROXIES as PROXIES, app as app, read_arguments as read_arguments
from .batch_job import BatchJob as BatchJob, Write as Write
from .batch_lines import (
    MOST_BYTES as MOST_BYTES,
    BatchLine as BatchLine,
    LineAnswer as LineAnswer,
    LineError as LineError,
    Origin as Origin,
    custom_id_of as custom_id_of,
    digest_of as digest_of,
    failure as failure,
    is_torn as is_torn,
    raw_lines as raw_lines,
    read_line as read_line,
    read_record as read_record,
    success as success,
)
from .batch_run import Answerer as Answerer, answer_lines as answer_lines, inside as inside, places_of as places_of
from .cores import (
    FULL as FULL,
    Cores as Cores,
    check_fit as check_fit,
    cores_of_each as cores_of_each,
    equal_share as equal_share,
    fitting as fitting,
    needed as needed,
    wanted_replicas as wanted_replicas,
)
from .fleet import (
    MOST_CHARACTERS as MOST_CHARACTERS,
    TRIES as TRIES,
    Fleet as Fleet,
    RoutedRequest as RoutedRequest,
    routed as routed,
)
from .front import REPLICA as REPLICA, joined as joined, make_front as make_front
from .options import (
    REPLICA_FIELDS as REPLICA_FIELDS,
    ReplicaOptions as ReplicaOptions,
    check_ray as check_ray,
    replica_range as replica_range,
    with_absolute_paths as with_absolute_paths,
)
from .ray_batches import answer_on_ray as answer_on_ray
from .replicas import LocalReplicas as LocalReplicas, connect as connect
