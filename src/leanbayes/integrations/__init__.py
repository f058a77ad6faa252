"""leanbayes for other libraries. Each module imports its library; `import leanbayes` imports none of them."""
