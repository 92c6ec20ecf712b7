"""Draft heads: small modules that guess a frozen model's next tokens from its hidden states. One file a technique."""
