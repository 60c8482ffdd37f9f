"""The catalogue of findings: for each stable code its severity, its hop, the class of errors that it
belongs to, and what becomes of it if nobody acts.

A code that has been published is never given another meaning. docs/operate/runbooks has a page for
each, and a test holds that.
"""
