from .config import (
    FleetConfig as FleetConfig,
    ReplicaLimits as ReplicaLimits,
    Routing as Routing,
    Scaling as Scaling,
    TrafficConfig as TrafficConfig,
)
from .fleet import (
    FleetRun as FleetRun,
    environment as environment,
    figures as figures,
    simulate_fleet as simulate_fleet,
)
from .replica import EngineCosts as EngineCosts, PrefixStore as PrefixStore
from .traffic import Arrival as Arrival, arrivals as arrivals, read_trace as read_trace
