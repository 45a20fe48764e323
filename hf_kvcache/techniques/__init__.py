"""Names, options and defaults of all techniques, a file for each role. Imports no torch."""
