"""The rules that decide which drafted tokens stand."""
