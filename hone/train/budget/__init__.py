"""Training within a budget of joules, in the hours that a schedule allows."""
