"""What an evaluation costs."""
