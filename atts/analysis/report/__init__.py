"""Reports of a run, HTML, Markdown and JSON, from one set of numbers."""
