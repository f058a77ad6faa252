"""Make, train on and predict with a stochastic network."""
