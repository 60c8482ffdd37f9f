"""What `make bench` measures: a limit of a server, this pipeline and a plain rival, in one run on
the same data.
"""
