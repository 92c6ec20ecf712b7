"""Linear layers in training whose three products are of fp8 codes: recipes, casts and the product with its gradients."""
