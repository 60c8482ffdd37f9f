"""The measurements of `make bench`: a limit of a server, this pipeline and a plain rival, in one
run on the same data.
"""
