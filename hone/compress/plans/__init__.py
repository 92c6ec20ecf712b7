"""What a compression plans before it runs: its calibration sequences, the steps of each matrix, its work and estimates."""
