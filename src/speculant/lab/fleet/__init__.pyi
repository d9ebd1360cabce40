from .config import (
    FleetConfig as FleetConfig,
    ReplicaLimits as ReplicaLimits,
    Routing as Routing,
    Scaling as Scaling,
    TrafficConfig as TrafficConfig,
)
from .costs import EngineCosts as EngineCosts
from .fleet import FleetRun as FleetRun, environment as environment, simulate_fleet as simulate_fleet
from .prefixes import PrefixStore as PrefixStore
from .report import figures as figures
from .traffic import Arrival as Arrival, arrivals as arrivals, read_trace as read_trace
