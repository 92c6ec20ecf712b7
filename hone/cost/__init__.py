"""Estimates: seconds from a roofline, bytes from closed forms, both with their formula."""
