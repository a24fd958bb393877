"""Which model, which engine, which defaults."""
