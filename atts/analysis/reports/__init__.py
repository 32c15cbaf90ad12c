"""The construction of reports on recorded runs, with numbers, tables, charts and pages."""
