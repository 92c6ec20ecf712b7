"""The probe of a machine on the command line: `hone calibrate --report`."""
