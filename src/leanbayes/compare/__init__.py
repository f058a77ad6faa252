"""Comparison of methods: train and evaluate jobs, on one process or many, and predict with their networks."""
