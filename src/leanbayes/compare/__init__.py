"""Train and evaluate methods on one data set, next to each other."""
