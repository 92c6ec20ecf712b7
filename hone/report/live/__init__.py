"""The page of running trainings: reads their logs as they grow and draws them in the report's look."""
