"""Decontamination: finds, reports and removes documents that contain examples of evaluation sets."""
