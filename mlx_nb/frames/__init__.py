"""A prompt over a DataFrame column."""

# Before any module of this package: whoever waits for pandas imports the accessor at once, which imports the others.
import pandas as pd  # noqa: F401
