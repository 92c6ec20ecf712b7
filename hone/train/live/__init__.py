"""What a user sees of a running training: times of its ranks, the view in a terminal, profiles. One file a view."""
