"""Many LoRA adapters at once over one base model: read, kept in host memory, and moved to slots on the device by use."""
