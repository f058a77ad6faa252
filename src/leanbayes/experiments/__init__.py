"""From a few words to `result.json`: which runs there are, how each is made, and what it leaves behind."""
