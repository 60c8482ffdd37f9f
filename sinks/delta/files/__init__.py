"""The data files of a Delta table: Parquet, columns, links between generations, failures."""
