"""Objectives that train draft heads beside a model that stays as it is. One file a technique."""
