"""What is measured: a figure, its cost, and how figures are printed and drawn."""
