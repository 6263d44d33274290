"""Arrow schemas, sharded Parquet files and their provenance: the only code that knows column names."""
