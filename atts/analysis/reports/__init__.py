"""Reports on recorded runs, with their numbers, tables, charts and pages."""
