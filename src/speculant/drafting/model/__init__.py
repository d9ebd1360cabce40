"""Drafters that draw chains, trees and beams from small models."""
