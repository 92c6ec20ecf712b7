"""Linears with zeros that their products skip, and models whose linears become such."""
