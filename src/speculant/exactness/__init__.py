"""Is the output's distribution the target's? Proven by enumeration on tables, and tested on a real pair."""
