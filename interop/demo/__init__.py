"""The demo: one small model, trained on real text in both frameworks, with and without full logits."""
