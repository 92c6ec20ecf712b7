"""Endpoints beyond plain generation, and ways to generate that take several requests of the engine."""
