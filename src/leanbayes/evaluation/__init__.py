"""Evaluate a trained network and store the result."""
