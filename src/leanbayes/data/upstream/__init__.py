"""Convert data sets from the files in which they are published."""
