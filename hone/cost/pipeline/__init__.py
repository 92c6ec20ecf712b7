"""Pipeline schedules as data: their tables, their simulated time, and the checks that they are schedules."""
