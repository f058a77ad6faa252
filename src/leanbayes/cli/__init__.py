"""The command line: one module per command, with its flags and its action."""
