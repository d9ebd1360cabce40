from .fleet import (
    EngineCosts as EngineCosts,
    FleetRun as FleetRun,
    PrefixStore as PrefixStore,
    environment as environment,
    figures as figures,
    simulate_fleet as simulate_fleet,
)
from .traffic import (
    Arrival as Arrival,
    FleetConfig as FleetConfig,
    ReplicaLimits as ReplicaLimits,
    Routing as Routing,
    Scaling as Scaling,
    TrafficConfig as TrafficConfig,
    arrivals as arrivals,
    read_trace as read_trace,
)
