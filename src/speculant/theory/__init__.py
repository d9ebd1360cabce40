"""What speculation can be expected to gain, worked out from laws and measured rates; numpy only."""
