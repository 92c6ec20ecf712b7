"""Personal data and secrets in text: a kernel that finds candidates and the checks that each must pass."""
