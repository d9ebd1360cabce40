"""The expected gain of speculation, computed from distributions and measured rates; numpy only."""
