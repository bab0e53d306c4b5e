"""Self-distillation of a next-token model into one that predicts several tokens in one pass (arXiv 2602.06019)."""
