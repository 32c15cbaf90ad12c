"""Reports on recorded runs: their numbers, tables, charts and pages."""
