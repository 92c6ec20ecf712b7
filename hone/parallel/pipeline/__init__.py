"""Pipeline parallelism: schedules as data, their validator, simulator and drawing, and one executor for all of them."""
