"""What speculation can be expected to gain, worked out from distributions and measured rates; numpy only."""
