"""Images with masks by several annotators."""
