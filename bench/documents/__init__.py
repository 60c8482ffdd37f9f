"""Documents of several tables: what is measured of them, and their rival."""
