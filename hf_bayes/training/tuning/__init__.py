"""``tune``: several methods on the same model, data and budget, and the best of them by held-out rows."""
