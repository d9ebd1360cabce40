"""Checks that the output has the target's distribution: by enumeration on tables, and by tests on a real pair."""
