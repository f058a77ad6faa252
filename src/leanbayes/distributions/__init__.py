"""Mathematics only: distributions of factors, divergences, likelihoods, assignments, random numbers."""
