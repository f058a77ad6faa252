"""Mathematics only: laws of factors, their divergences, mixtures, assignments."""
