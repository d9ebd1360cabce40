"""Drafters that combine others."""
