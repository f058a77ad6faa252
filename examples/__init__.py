"""Short programs that show what leanbayes does; run one with `python -m examples.<name>`."""
