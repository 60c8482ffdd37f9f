"""Documents: views of several tables, declared in the pipeline file and kept from the log alone."""
