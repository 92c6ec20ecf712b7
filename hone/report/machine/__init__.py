"""The report of one machine: the levels of its memory, its links and its roofline, from the files of a probe and a calibration."""
