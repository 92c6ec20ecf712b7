"""Small truths of teaching and adapting a model, several seeds each: what every form of distillation, rounding in training, preferences and rewards bring."""
