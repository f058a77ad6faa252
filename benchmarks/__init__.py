"""Cost of the methods, as ratios to the plain network measured in the same run."""
