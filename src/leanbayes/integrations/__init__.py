"""leanbayes in the manner of other libraries; each module imports its library, and `import leanbayes` none of them."""
