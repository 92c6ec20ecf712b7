"""What serving costs: the schedule of a run, a decode step, experts and layers that are copied in it."""
