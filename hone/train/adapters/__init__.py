"""Parameter-efficient fine-tuning: the model is frozen, its adapters are trained and saved as a PEFT folder."""
