"""Evaluation of one model: metrics, cost, and the file `result.json`."""
