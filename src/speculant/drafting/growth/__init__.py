"""Chains, trees and beams drafted by models."""
