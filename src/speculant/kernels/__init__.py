"""The operations that models use. `reference` defines the correct results."""
