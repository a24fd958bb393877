"""A prompt over a DataFrame column."""
