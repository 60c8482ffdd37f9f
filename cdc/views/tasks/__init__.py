"""What the engine of documents runs on executors, as tasks of Spark."""
