"""A fleet of replicas, simulated from the measured costs of one: latency, throughput, routing, failures, scaling."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
