"""Where tokens are made: one backend behind the Protocol of `base`, and everything that touches MLX."""
