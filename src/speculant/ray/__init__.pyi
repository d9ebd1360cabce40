from .application import app as app
from .arguments import PROXIES as PROXIES, read_arguments as read_arguments
from .batches import answer_on_ray as answer_on_ray
from .cores import Cores as Cores
from .extra import check_ray as check_ray
from .fleet import TRIES as TRIES, Fleet as Fleet
from .front import REPLICA as REPLICA, make_front as make_front
from .llm_server import LLMServer as LLMServer
from .local import LocalReplicas as LocalReplicas, connect as connect
from .options import (
    REPLICA_FIELDS as REPLICA_FIELDS,
    ReplicaOptions as ReplicaOptions,
    replica_range as replica_range,
    with_absolute_paths as with_absolute_paths,
)
from .pages import joined as joined
from .placing import (
    check_fit as check_fit,
    cores_of_each as cores_of_each,
    equal_share as equal_share,
    fitting as fitting,
)
from .routed import MOST_CHARACTERS as MOST_CHARACTERS, RoutedRequest as RoutedRequest
from .scaling import FULL as FULL, needed as needed, wanted_replicas as wanted_replicas
