"""A fleet of replicas, simulated from the measured costs of one: latency, throughput, routing, failures, scaling."""
