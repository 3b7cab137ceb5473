"""Figures and tables: the paper's evaluation beside ours. The one place besides the command line that draws."""
