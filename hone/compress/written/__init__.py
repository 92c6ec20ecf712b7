"""Written: what lies beside the weights of a compressed folder, its config, figures and card, and which engines load it."""
