"""Is the output's law the target's? Proven by enumeration on tables, and tested on a real pair."""
