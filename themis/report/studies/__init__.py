"""One module for each group of the paper's figures."""
