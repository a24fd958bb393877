"""From messages and templates to tokens."""
