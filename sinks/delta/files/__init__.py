"""The data files of a Delta table: Parquet, its columns, hard links between generations, failures."""
