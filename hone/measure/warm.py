"""Initializes torch before a measurement, so that its own memory and start-up time are not attributed to the work."""

from __future__ import annotations

from hone.base.lazy import lazy

torch = lazy("torch")


def warm_up(device: str = "cpu") -> None:
    """A small product, attention and update, forward and backward: loads libraries, starts threads, allocates workspaces."""
    x = torch.zeros(64, 64, device=device, requires_grad=True)
    heads = (x @ x).view(1, 4, 16, 64)
    mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    mixed.sum().backward()
    torch.optim.AdamW([x], fused=True).step()
