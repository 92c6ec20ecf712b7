"""The measured serving run behind `hone bench`: its requests, and the closed loop that serves them."""
