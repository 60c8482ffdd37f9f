"""What makes pages of the documentation from the code, a module for each page."""
